"""FastAPI, Starlette and any other ASGI application: a middleware that judges fields of JSON bodies."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from clearhead.errors import ArgumentError
from clearhead.guard.policy import Decision, Guarded
from clearhead.integrations.bodies import (
    BODY_LIMIT,
    BadBodyError,
    Receive,
    Scope,
    Send,
    answer,
    parse,
    read,
    texts,
)
from clearhead.integrations.chat import instruction as joined

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class GuardMiddleware:
    """For JSON fields: `app.add_middleware(GuardMiddleware, guarded=…, paths={"/ask": ["page.text"]})`

    paths: URL path → fields whose texts are judged (`bodies.texts`: dots, `*`). Other paths, and GET, HEAD
    and OPTIONS, pass untouched. question: field with what the user asks; instruction: of the operator, before
    it. body_limit: bytes.
    A guarded path takes JSON in UTF-8 only, at most body_limit bytes, not compressed: otherwise 413, 415 or
    400. A refused text is answered with 403, one that could not be judged (on_error="closed") with 503, both
    as JSON without a word of it. A redacted body goes on without the spans that pulled. The application finds
    the decision in `request.state.clearhead`. Raises ArgumentError for a limit below 1 and for no paths.
    """

    def __init__(
        self,
        app: App,
        *,
        guarded: Guarded,
        paths: Mapping[str, Sequence[str]],
        question: str | None = None,
        instruction: str = "",
        body_limit: int = BODY_LIMIT,
    ) -> None:
        if not paths or any(isinstance(fields, str) or not fields for fields in paths.values()):
            raise ArgumentError(f"paths must map URL paths to lists of fields, got {paths!r}")
        if type(body_limit) is not int or body_limit < 1:
            raise ArgumentError(f"body_limit must be a number of bytes, 1 or more, got {body_limit!r}")
        self.app, self.guarded, self.body_limit = app, guarded, body_limit
        self.paths = {path.rstrip("/"): tuple(fields) for path, fields in paths.items()}
        self.question, self.instruction = question, instruction

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Judge a request, then hand it on."""
        fields = self.paths.get(scope.get("path", "").rstrip("/")) if scope["type"] == "http" else None
        if fields is None or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self.app(scope, receive, send)
        try:
            _check_headers(scope)
            body = await read(receive, self.body_limit)
            decision, body = await self._judged(body, fields)
        except BadBodyError as error:
            return await answer(send, error.status, {"error": {"type": "bad_body", "message": error.message}})
        if decision.action == "refuse":
            kind, status = ("guard_unjudged", 503) if decision.unjudged else ("guard_refused", 403)
            return await answer(send, status, {"error": {"type": kind, **decision.summary()}})
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        state = {**scope.get("state", {}), "clearhead": decision}
        done = False

        async def again() -> Any:
            nonlocal done
            if done:
                return await receive()
            done = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app({**scope, "headers": headers, "state": state}, again, send)
        return None

    async def _judged(self, body: bytes, fields: Sequence[str]) -> tuple[Decision, bytes]:
        try:
            return await self._decided(parse(body), body, fields)
        except RecursionError as error:
            raise BadBodyError(400, "the body is nested too deeply") from error

    async def _decided(self, value: Any, body: bytes, fields: Sequence[str]) -> tuple[Decision, bytes]:
        found = {place: (text, put) for field in fields for place, text, put in texts(value, field)}
        asked = [text for _, text, _ in texts(value, self.question)] if self.question else []
        sources = {place: text for place, (text, _) in found.items()}
        decision = await self.guarded.adecide(joined(self.instruction, *asked), sources)
        if decision.action == "redact":
            for place, text in decision.texts.items():
                found[place][1](text)
            body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return decision, body


def _check_headers(scope: Scope) -> None:
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise BadBodyError(415, "this path takes application/json")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise BadBodyError(415, "this path takes no compressed bodies")
