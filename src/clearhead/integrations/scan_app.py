"""`POST /scan`: an instruction and texts in, a finding and a decision out. No text is kept."""

from __future__ import annotations

from typing import Any

from clearhead.errors import ArgumentError, MissingExtraError
from clearhead.guard.policy import Guarded
from clearhead.integrations.bodies import BODY_LIMIT, BadBodyError, parse, read

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise MissingExtraError("the scan service needs FastAPI: pip install 'clearhead[fastapi]'") from error

_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["instruction", "sources"],
                "properties": {
                    "instruction": {"type": "string"},
                    "sources": {
                        "oneOf": [
                            {"type": "string"},
                            {"type": "object", "additionalProperties": {"type": "string"}},
                        ]
                    },
                },
            }
        }
    },
}


def scan_app(guarded: Guarded, *, body_limit: int = BODY_LIMIT) -> FastAPI:
    """Return an application with `POST /scan` and `GET /health`.

    The request is {"instruction": str, "sources": str or {name: str}}, at most body_limit bytes. The answer
    (200, whatever the verdict) is {"action", "texts", "finding"}: what to do, what may be passed on, and the
    `Finding`. 400 for another body, 413 for a longer one, 503 with the same answer for a text that could not
    be judged under on_error="closed". It asks for no
    password: who can reach it may use it.
    """
    app = FastAPI(title="clearhead guard", openapi_url="/openapi.json", docs_url=None, redoc_url=None)

    @app.post("/scan", openapi_extra={"requestBody": _BODY})
    async def scan(request: Request) -> JSONResponse:
        try:
            value = parse(await read(request.receive, body_limit))
            if not isinstance(value, dict) or value.keys() != {"instruction", "sources"}:
                raise BadBodyError(400, "the body must be an object with instruction and sources")
            decision = await guarded.adecide(value["instruction"], value["sources"])
        except BadBodyError as error:
            return _said(error.status, error.message)
        except ArgumentError as error:
            return _said(400, str(error))
        answer = {
            "action": decision.action,
            "texts": decision.texts,
            "finding": decision.finding.to_dict(),
        }
        failed = decision.unjudged and decision.action == "refuse"
        return JSONResponse(answer, 503 if failed else 200)

    @app.get("/health")
    async def health() -> dict[str, str]:
        calibration = getattr(getattr(guarded.scanner, "calibration", None), "id", "")
        return {"status": "ok", "mode": guarded.mode, "calibration": str(calibration)}

    return app


def _said(status: int, message: str) -> JSONResponse:
    error: dict[str, Any] = {"type": "bad_body", "message": message}
    return JSONResponse({"error": error}, status)
