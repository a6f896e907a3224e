"""JSON bodies of HTTP requests: read up to a limit, strictly; answers as JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_LIMIT = 1_000_000
"""Bytes."""


class BadBodyError(Exception):
    """A body that is not taken. status: of the HTTP answer. message: without a word of the body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


async def read(receive: Receive, limit: int) -> bytes:
    """Return an ASGI request's body. Raises BadBodyError (413) as soon as it is longer than `limit` bytes."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise BadBodyError(400, "the client left before the body was complete")
        part = event.get("body", b"")
        size += len(part)
        if size > limit:
            raise BadBodyError(413, f"the body may have {limit} bytes at most")
        parts.append(part)
        more = event.get("more_body", False)
    return b"".join(parts)


def parse(body: bytes) -> Any:
    """Return the JSON value of a body in UTF-8.

    A key that stands twice in an object is refused: two readers may take different ones. Raises
    BadBodyError (400).
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise BadBodyError(400, "the body is not JSON in UTF-8, or nested too deeply") from error


def texts(value: Any, path: str) -> Iterator[tuple[str, str, Callable[[str], None]]]:
    """Yield (place, text, set) of every str at a path of an object or below it.

    path: keys and numbers joined by dots, `*` for every item: "documents.*.text". `set` puts another text
    in the place. What is not there is left out; values are taken, keys are not.
    """
    yield from _at([value], 0, path.split("."), "", root=True)


def _at(
    holder: Any, key: Any, steps: list[str], place: str, *, root: bool = False
) -> Iterator[tuple[str, str, Callable[[str], None]]]:
    value = holder[key]
    if not root:
        place = f"{place}.{key}" if place else str(key)
    if not steps:
        if isinstance(value, str):
            yield place, value, lambda text: holder.__setitem__(key, text)
            return
        steps_below, wanted = [], "*"
    else:
        steps_below, wanted = steps[1:], steps[0]
    if isinstance(value, dict):
        keys: list[Any] = list(value) if wanted == "*" else [wanted] * (wanted in value)
    elif isinstance(value, list):
        keys = [n for n in range(len(value)) if wanted in ("*", str(n))]
    else:
        return
    for below in keys:
        yield from _at(value, below, steps_below, place)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


async def answer(send: Send, status: int, value: Any) -> None:
    """Send a value as a JSON answer."""
    body = json.dumps(value, ensure_ascii=True).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
