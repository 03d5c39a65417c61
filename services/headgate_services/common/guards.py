"""Request checks before the routes: body size, API key, validation errors."""

from __future__ import annotations

import json

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError

from headgate.http.asgi import App, Message, Receive, Scope, Send


class SizeGuard:
    """Middleware that answers 413 to a request body above `max_bytes`, without reading the rest of it."""

    def __init__(self, app: App, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:  # FastAPI turns the exception into the response
                raise HTTPException(413, f"Request body is above {self.max_bytes} bytes")
            return message

        await self.app(scope, counted if scope["type"] == "http" else receive, send)


def api_key_of(scope: Scope) -> bytes | None:
    """Return the API key of a request, from `X-API-Key` or else `Authorization: Bearer`; `None` without either."""
    fields = dict(scope["headers"])
    given: bytes | None = fields.get(b"x-api-key")
    if given is not None:
        return given
    scheme, _, token = fields.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


async def answer_invalid(request: Request, error: Exception) -> Response:
    """Answer 422 like FastAPI, but without the input, which may be large or impossible to encode as UTF-8."""
    assert isinstance(error, RequestValidationError)
    problems = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in error.errors()]
    return Response(json.dumps({"detail": problems}), 422, media_type="application/json")
