"""What stands between the network and the routes: the API key and the size of a request."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Open as ever: the id of an attachment cannot be guessed, and browsers send no keys when they follow a link.
_OPEN = re.compile(r"/v1/attachments/[^/]+/content")


class ApiKeyGuard:
    """Asks for the API key on every path under /v1.

    `X-API-Key` is looked at first, then `Authorization: Bearer`. OPTIONS is let through, since browsers ask by it, without
    a key, whether they may send one.
    """

    def __init__(self, app: App, key: str) -> None:
        self.app = app
        self.key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._needs_key(scope) and not self._has_key(scope):
            refusal = JSONResponse(
                {"detail": "Missing or invalid API key"}, 401, {"WWW-Authenticate": "Bearer"}
            )
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        path = scope["path"]
        under_v1 = path == "/v1" or path.startswith("/v1/")
        return under_v1 and scope["method"] != "OPTIONS" and not _OPEN.fullmatch(path)

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key")
        if given is None:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            given = token.strip() if scheme.lower() == b"bearer" else b""
        return hmac.compare_digest(given, self.key)


class SizeGuard:
    """Answers 413 to a request above a size, without reading more of it than that."""

    def __init__(self, app: App, most_bytes: int) -> None:
        self.app = app
        self.most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most_bytes:  # FastAPI, which is reading, makes the answer of it
                raise HTTPException(413, f"Request body is above {self.most_bytes} bytes")
            return message

        await self.app(scope, counted if scope["type"] == "http" else receive, send)
