"""Who a request is from, found out before the limiter runs.

Nothing is refused here: a key that is wrong leaves the request anonymous, so that guessing keys is limited by address. The
401 comes from behind the limiter.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from sqlalchemy.exc import SQLAlchemyError

from headgate.http.asgi import App, Receive, Scope, Send
from headgate_services.common.guards import api_key_of
from headgate_services.tiers.keys import User
from headgate_services.tiers.log import LimitedLog

Credentials = Literal["none", "good", "wrong", "unchecked"]


class KeyLookup(Protocol):
    """Where keys are looked up."""

    async def find(self, key: str) -> User | None: ...


class ApiKeyAuthentication:
    """Puts the user of an API key into `request.state.user`, and what became of the key into `request.state.credentials`.

    `X-API-Key` is looked at first, then `Authorization: Bearer`.
    """

    def __init__(self, app: App, keys: KeyLookup) -> None:
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
