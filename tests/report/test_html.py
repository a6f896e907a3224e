"""The page as a file: one piece, closed to the outside, small enough, and clear when it cannot be written."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import pytest

import clearhead.report.html as html
from clearhead.errors import ArgumentError
from clearhead.report import render, write

from .conftest import HOSTILE
from .looks import hostile_look, long_look, small_look


class Outline(HTMLParser):
    """Tags and attributes of a page, as a parser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_policy_allows_this_style_and_this_script_and_nothing_else():
    page = render(small_look())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    style, script = (re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S) for tag in ("style", "script"))
    assert len(style) == len(script) == 1
    for name, text in (("style-src", style[0]), ("script-src", script[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_nothing_in_the_page_loads_or_runs_by_an_attribute():
    for tag, attributes in Outline(render(small_look())).tags:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "style", "srcdoc")
        ], tag
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        if "href" in attributes:
            assert attributes["href"] == "#text"


@pytest.mark.parametrize("sample", HOSTILE["TEXTS"], ids=lambda sample: sample.name)
def test_hostile_text_adds_no_tag(sample):
    quiet = Outline(render(hostile_look(["x"], everywhere="quiet"))).tags
    loud = Outline(render(hostile_look([sample.text], everywhere=sample.text))).tags
    assert loud == quiet


def test_the_script_uses_no_way_in_for_markup_or_code():
    sources = [
        f for f in files("clearhead.report").joinpath("page", "js").iterdir() if f.name.endswith(".js")
    ]
    assert {f.name.removesuffix(".js") for f in sources} == set(html._SCRIPTS)
    for source in sources:
        text = source.read_text(encoding="utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "fetch(",
        ):
            assert word not in text, source.name
        assert not re.search(r"</script|<!--|localStorage|XMLHttpRequest|import\(", text, re.I), source.name


def test_queries_beyond_the_limit_are_left_out_and_named(monkeypatch):
    look = small_look()
    whole = len(render(look))
    monkeypatch.setattr(html, "FILE_LIMIT", whole - 400)
    page = render(look)
    assert f'"queries":{list(look.map_queries[1:])}'.replace(" ", "") in page
    assert f'"dropped":1,"droppedFirst":[{look.map_queries[0]}]' in page


def test_a_long_prompt_stays_below_15_mb_even_if_nothing_compresses():
    look = long_look(queries=8)
    noise = replace(look, maps=(look.maps + 0.37 * abs(look.maps[:, :, ::-1, ::-1]) + 1e-4).clip(0, 1))
    for each in (look, noise):
        page = render(each)
        assert len(page.encode()) < 15_000_000
        assert f'id="map-{each.map_queries[-1]}"' in page


def test_write_writes_what_render_returns(tmp_path):
    look = small_look()
    target = tmp_path / "look.html"
    target.write_text("old")
    write(look, str(target))
    assert target.read_bytes() == render(look).encode()


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    target = tmp_path / "nowhere" / "look.html"
    with pytest.raises(
        ArgumentError, match=re.escape(f"path: cannot write {target}: the folder {target.parent} does not")
    ):
        write(small_look(), target)


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ArgumentError, match=re.escape(f"path: {tmp_path} is a folder")):
        write(small_look(), tmp_path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    for name, reason in (("x" * 300, "File name too long"), ("a\0b", "embedded null byte")):
        with pytest.raises(ArgumentError, match=f"path: cannot write '.*': {reason}"):
            write(small_look(), tmp_path / name)
