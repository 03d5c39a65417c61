"""Time limits of databases that do not depend on the load of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.testing.postgres_server import PostgresServer
from headgate_services.common.databases import SqlDatabase
from headgate_services.petitions.infrastructure.adapters.persistence import Database
from tests.apps.processes import PATIENCE

SHORT = 0.5
"""Time limit for a database that does not reply, in seconds."""


class Timeouts:
    """Uses a short limit for all databases while a server is paused or gone, and a long one otherwise.

    Attributes:
        seconds: The current limit; tests may set it.
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
