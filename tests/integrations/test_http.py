"""The middleware in FastAPI and Starlette applications, and the scan service."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from tests.integrations.fakes import ATTACK, FLAGGED, PLAIN, PLANTED, Fake

from clearhead.errors import ArgumentError
from clearhead.guard.policy import Guarded
from clearhead.integrations.asgi import GuardMiddleware
from clearhead.integrations.scan_app import scan_app

JSON = {"content-type": "application/json"}
FIELDS = {"/ask": ["documents.*.text", "mail"]}


async def ask(request: Request) -> JSONResponse:
    decision = getattr(request.state, "clearhead", None)
    body = await request.body()
    return JSONResponse(
        {"got": json.loads(body) if body else None, "verdict": decision and decision.finding.verdict}
    )


def fastapi_app(**options: Any) -> Any:
    app = FastAPI()

    @app.post("/ask")
    async def asked(request: Request) -> Any:
        return await ask(request)

    @app.post("/other")
    async def other(request: Request) -> Any:
        return await ask(request)

    app.add_middleware(GuardMiddleware, **options)
    return app


def starlette_app(**options: Any) -> Any:
    async def echo(socket: Any) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    routes = [
        Route("/ask", ask, methods=["GET", "POST"]),
        Route("/other", ask, methods=["POST"]),
        WebSocketRoute("/ask", echo),
    ]
    return Starlette(routes=routes, middleware=[Middleware(GuardMiddleware, **options)])


@pytest.fixture(params=[fastapi_app, starlette_app], ids=["fastapi", "starlette"])
def client(request: pytest.FixtureRequest) -> Any:
    def make(
        mode: str = "block", fake: Fake | None = None, on_error: str = "closed", **more: Any
    ) -> TestClient:
        guarded = Guarded(fake or Fake(), mode=mode, on_error=on_error)
        options = {"guarded": guarded, "paths": FIELDS, "question": "question", **more}
        return TestClient(request.param(**options))

    return make


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"question": "When does it open?", "documents": [{"text": PLAIN}, {"text": text}], **more}


def test_a_clean_request_reaches_the_application_unchanged_with_its_verdict(client: Any) -> None:
    fake = Fake()
    answer = client(fake=fake, instruction="Be brief.").post("/ask", json=body(PLAIN, mail=PLAIN, n=1))
    assert answer.json() == {"got": body(PLAIN, mail=PLAIN, n=1), "verdict": "allow"}
    sources = {"documents.0.text": PLAIN, "documents.1.text": PLAIN, "mail": PLAIN}
    assert fake.seen == [("Be brief.\n\nWhen does it open?", sources)]


def test_a_refused_request_gets_an_error_that_says_where_and_quotes_nothing(client: Any) -> None:
    answer = client().post("/ask", json=body(PLANTED))
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert (error["type"], error["verdict"], error["score"]) == ("guard_refused", "block", 0.97)
    assert error["spans"] == [{"source": "documents.1.text", "line": 1, "start": 24, "end": 61}]
    assert ATTACK not in answer.text


def test_a_redacted_request_goes_on_without_what_pulled(client: Any) -> None:
    answer = client("redact").post("/ask", json=body(PLANTED, other="ü"))
    left = "Open from nine to five. [removed by guard] Closed on Mondays."
    assert answer.json()["got"] == body(left, other="ü")


def test_a_flagged_request_goes_on_and_the_application_knows(client: Any) -> None:
    assert client("flag").post("/ask", json=body(FLAGGED)).json() == {"got": body(FLAGGED), "verdict": "flag"}


@pytest.mark.parametrize(("on_error", "status"), [("closed", 503), ("open", 200)])
def test_a_request_that_could_not_be_judged(client: Any, on_error: str, status: int) -> None:
    fake = Fake()
    fake.error = RuntimeError(PLANTED)
    answer = client(fake=fake, on_error=on_error).post("/ask", json=body(PLAIN))
    assert answer.status_code == status
    assert answer.json().get("error", {}).get("type") == ("guard_unjudged" if status == 503 else None)


def test_everything_below_a_field_is_judged(client: Any) -> None:
    nested = {"documents": [{"text": {"parts": [PLAIN, {"more": PLANTED}]}}]}
    answer = client().post("/ask", json=nested)
    assert answer.json()["error"]["spans"][0]["source"] == "documents.0.text.parts.1.more"


@pytest.mark.parametrize(
    "odd",
    [None, 3, [], "text", {"documents": "text"}, {"documents": {"text": 3}}, {"documents": [None, [3]]}],
)
def test_what_is_not_there_is_left_out(client: Any, odd: Any) -> None:
    assert client().post("/ask", content=json.dumps(odd), headers=JSON).status_code == 200


def test_other_paths_and_reading_pass_untouched(client: Any) -> None:
    fake = Fake()
    assert client(fake=fake).post("/other", content=b"[]").status_code == 200
    client(fake=fake).get("/ask")
    assert fake.seen == []


def test_a_slash_at_the_end_is_no_way_around() -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse("in")(scope, receive, send)

    app = GuardMiddleware(inner, guarded=Guarded(Fake(), mode="block", on_error="closed"), paths=FIELDS)
    assert TestClient(app).post("/ask/", json=body(PLANTED)).status_code == 403


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"mail": "a", "mail": "b"}', {}, 400),
        (b"[" * 100_000 + b"]" * 100_000, {}, 400),
        (b'{"mail":' * 400 + b'"a"' + b"}" * 400, {}, 200),
        (b'{"mail":' + b'{"a":' * 9000 + b'"a"' + b"}" * 9001, {}, 400),
        (b"", {}, 400),
        (b'{"mail": "a"}', {"content-type": "text/plain"}, 415),
        (b'{"mail": "a"}', {"content-encoding": "gzip"}, 415),
        (b'{"mail": "' + b"a" * 300_000 + b'"}', {}, 413),
        (b'{"mail": "a"}', {"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_bodies_that_could_be_read_otherwise_are_not_taken(
    client: Any, content: bytes, headers: dict[str, str], status: int
) -> None:
    given = {"content-type": "application/json", **headers}
    answer = client(body_limit=250_000).post("/ask", content=content, headers=given)
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["type"] == "bad_body"


def test_web_sockets_pass() -> None:
    app = starlette_app(guarded=Guarded(Fake(), mode="block", on_error="closed"), paths=FIELDS)
    with TestClient(app).websocket_connect("/ask") as socket:
        socket.send_text("hello")
        assert socket.receive_text() == "hello"


def test_a_client_that_leaves_is_not_judged() -> None:
    fake = Fake()
    app = GuardMiddleware(ask, guarded=Guarded(fake, mode="block", on_error="closed"), paths=FIELDS)  # type: ignore[arg-type]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/ask",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(app(scope, receive, send))
    assert (sent[0]["status"], fake.seen) == (400, [])


@pytest.mark.parametrize(
    "options", [{"paths": {}}, {"paths": {"/ask": "mail"}}, {"paths": {"/ask": []}}, {"body_limit": 0}]
)
def test_settings_that_would_guard_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        GuardMiddleware(
            ask, **{"guarded": Guarded(Fake(), mode="block", on_error="closed"), "paths": FIELDS, **options}
        )  # type: ignore[arg-type]


def service(
    fake: Fake | None = None, mode: str = "block", on_error: str = "closed", **more: Any
) -> TestClient:
    return TestClient(scan_app(Guarded(fake or Fake(), mode=mode, on_error=on_error), **more))


def test_scan_answers_with_action_texts_and_finding() -> None:
    answer = service().post("/scan", json={"instruction": "When?", "sources": {"page": PLANTED}})
    assert answer.status_code == 200
    told = answer.json()
    assert (told["action"], told["texts"], told["finding"]["verdict"]) == ("refuse", {}, "block")
    assert told["finding"]["spans"][0]["text"] == ATTACK
    assert service().post("/scan", json={"instruction": "When?", "sources": PLAIN}).json()["texts"] == {
        "text": PLAIN
    }


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"instruction": "When?"}, 400),
        ({"instruction": 3, "sources": "a"}, 400),
        ({"instruction": "When?", "sources": [PLAIN]}, 400),
        ({"instruction": "When?", "sources": {"a": None}}, 400),
        ({"instruction": "When?", "sources": "a", "mode": "observe"}, 400),
        ({"instruction": "When?", "sources": "a" * 2000}, 413),
        ([], 400),
    ],
)
def test_scan_takes_nothing_else(given: Any, status: int) -> None:
    answer = service(body_limit=1000).post("/scan", json=given)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "bad_body")


@pytest.mark.parametrize(("on_error", "status", "action"), [("closed", 503, "refuse"), ("open", 200, "pass")])
def test_scan_says_when_it_could_not_judge(on_error: str, status: int, action: str) -> None:
    fake = Fake()
    fake.error = RuntimeError()
    answer = service(fake, on_error=on_error).post("/scan", json={"instruction": "When?", "sources": PLAIN})
    assert (answer.status_code, answer.json()["action"]) == (status, action)
    assert answer.json()["finding"]["verdict"] == "unjudged"


def test_health_and_the_schema_answer() -> None:
    assert service().get("/health").json() == {"status": "ok", "mode": "block", "calibration": "fake-1"}
    assert "/scan" in service().get("/openapi.json").json()["paths"]
