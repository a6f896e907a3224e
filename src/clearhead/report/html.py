"""Put template, style, script and data together into one page.

The page names the two things it may use, its own style and its own script, by their hash; everything else
is forbidden to it (see `policy`). What a look holds goes in as JSON inside a block that browsers do not
run. What the numbers mean is not this file's business.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from string import Template

from clearhead.errors import ArgumentError
from clearhead.look.result import Look
from clearhead.report.maps import PackedMap, pack_maps
from clearhead.report.payload import payload

FILE_LIMIT = 14_500_000
"""Most bytes of a page. Mail gateways and browsers stay comfortable below 15 MB; the rest is margin."""

_SCRIPTS = (
    *("marks", "words", "scale", "data", "state"),
    *("theme", "header", "table", "grid", "text", "overview", "guard", "choices", "start"),
)
"""The parts of the script, in the order in which they need one another."""


_DROPPED_NAMED = 12
"""How many of the queries that were left out are named on the page; of the others only the number."""


def render(look: Look) -> str:
    """Return `look` as one HTML page: text coloured by attention, heads by layer, the table, all offline.

    The page holds the weights of as many of `look.map_queries` as fit into `FILE_LIMIT` bytes, the latest
    positions first, and says so where some had to be left out.

    Raises:
        ArgumentError: the arrays of `look` do not fit together (the message names field and sizes).
    """
    data = payload(look)
    style, script, frame = _style(), _script(), _read("look.html")
    around = len(_data_block(data)) + len(f"{style}{script}{frame}".encode())
    packed = pack_maps(look, budget=FILE_LIMIT - around)
    kept = [q.position for q in packed]
    dropped = sorted({int(q) for q in look.map_queries} - set(kept))
    data |= {"queries": kept, "dropped": len(dropped), "droppedFirst": dropped[:_DROPPED_NAMED]}
    return Template(frame).substitute(
        policy=policy(style, script),
        style=style,
        script=script,
        data=_data_block(data),
        maps="\n".join(_map_block(q) for q in packed),
    )


def write(look: Look, path: str | os.PathLike[str]) -> None:
    """Write the page of `look` (see `render`) to `path`, over what was there.

    Raises:
        ArgumentError: the folder of `path` does not exist, `path` is a folder, or it cannot be written.
    """
    target = Path(path)
    if os.path.isdir(target):  # unlike Path.is_dir, False for a name that no file can have
        raise ArgumentError(
            f"path: {target} is a folder; name the HTML file to write, such as {target}/look.html"
        )
    if not os.path.isdir(target.parent):
        raise ArgumentError(
            f"path: cannot write {target}: the folder {target.parent} does not exist; create it first"
        )
    page = render(look)
    try:
        target.write_text(page, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"path: cannot write {str(target)!r}: {reason}") from error


def policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy of a page that may use exactly this style and this script."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _data_block(data: dict[str, object]) -> str:
    """JSON that no HTML parser can leave: ASCII, and `<`, `>`, `&` only as escapes."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _map_block(packed: PackedMap) -> str:
    return f'<script type="application/octet-stream" id="map-{packed.position}">{packed.base64}</script>'


def _style() -> str:
    return _read("look.css")


def _script() -> str:
    parts = "\n".join(_read(f"js/{name}.js") for name in _SCRIPTS)
    return f'\n(() => {{\n"use strict";\n{parts}\n}})();\n'


def _read(name: str) -> str:
    return files("clearhead.report").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
