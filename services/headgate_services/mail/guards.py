"""API key check before the routes."""

from __future__ import annotations

import hmac
import re

from fastapi.responses import JSONResponse

from headgate.http.asgi import App, Receive, Scope, Send
from headgate_services.common.guards import api_key_of

# Without a key, because browsers send none when they follow a link; the id of an attachment cannot be guessed.
_OPEN = re.compile(r"/v1/attachments/[^/]+/content")


class ApiKeyGuard:
    """Middleware that requires the API key on every path under /v1.

    The key is read from `X-API-Key`, then from `Authorization: Bearer`. OPTIONS needs no key, because browsers send
    CORS preflight requests without one.
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
        return hmac.compare_digest(api_key_of(scope) or b"", self.key)
