"""Authentication by API key, before the limiter.

Nothing is refused here: a request with a wrong key is anonymous, so that guessing keys is limited by address. The 401 is
sent after the limiter.
"""

from __future__ import annotations

import logging
from typing import Literal

from sqlalchemy.exc import SQLAlchemyError

from headgate.http.asgi import App, Receive, Scope, Send
from headgate_services.common.guards import api_key_of
from headgate_services.tiers.keys import KeyTable, User
from headgate_services.tiers.log import LimitedLog

Credentials = Literal["none", "good", "wrong", "unchecked"]


class ApiKeyAuthentication:
    """Middleware that sets `request.state.user`, and the result of the lookup in `request.state.credentials`.

    The key is read from `X-API-Key`, then from `Authorization: Bearer`.
    """

    def __init__(self, app: App, keys: KeyTable) -> None:
        self.app = app
        self._keys = keys
        self._complain = LimitedLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            user, credentials = await self._authenticate(scope)
            scope.setdefault("state", {}).update(user=user, credentials=credentials)
        await self.app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> tuple[User | None, Credentials]:
        key = api_key_of(scope)
        if key is None:
            return None, "none"
        try:
            user = await self._keys.find(key.decode("latin-1"))
        except (SQLAlchemyError, OSError) as error:
            self._complain(logging.ERROR, "API keys cannot be looked up: %s", error)
            return None, "unchecked"
        return user, "wrong" if user is None else "good"
