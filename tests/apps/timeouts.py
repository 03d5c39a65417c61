"""Time that databases have, however busy this machine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.testing.postgres_server import PostgresServer
from headgate_services.common.databases import SqlDatabase
from headgate_services.petitions.infrastructure.adapters.persistence import Database

PATIENCE = 60.0
"""Seconds that a database has which must answer."""
SHORT = 0.5
"""Seconds after which a database that does not answer is given up."""


class Timeouts:
    """Gives all databases little time while a server is paused or gone, and much of it otherwise.

    Attributes:
        seconds: How much it is. A test may set it, for what takes too long without a pause.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = PATIENCE
        for database in (Database, SqlDatabase):
            timeout = property(lambda _: self.seconds, lambda _, given: None)
            monkeypatch.setattr(database, "_timeout", timeout, raising=False)
        for change, seconds in (("pause", SHORT), ("kill", SHORT), ("resume", PATIENCE), ("start", PATIENCE)):
            usual = getattr(PostgresServer, change)
            monkeypatch.setattr(PostgresServer, change, self._changing(usual, seconds))

    def _changing(self, usual: Callable[[Any], Any], seconds: float) -> Callable[[Any], Any]:
        def change(server: Any) -> Any:
            result = usual(server)
            self.seconds = seconds
            return result

        return change
