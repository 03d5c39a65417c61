"""Deadlines that do not depend on how busy this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from headgate.outage import breaker
from headgate.stores.remote import batching
from headgate.stores.remote._async import gate as async_gate
from headgate.stores.remote._sync import gate
from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import RedisServer

PATIENCE = 60.0
"""Seconds for which a call waits that must be answered."""


class Deadlines:
    """Makes deadlines of calls count only while a server is paused; otherwise each is a minute longer.

    Nothing else times out early either: late calls and probes get a minute, too.

    Attributes:
        count: Whether the deadlines of new calls count. A test may set it if a call hangs without a pause.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = False
        for module in (gate, async_gate):
            monkeypatch.setattr(module, "monotonic", self._monotonic)
        monkeypatch.setattr(batching, "LATE", PATIENCE)
        monkeypatch.setattr(breaker, "GRACE", PATIENCE)
        for server in (PostgresServer, RedisServer):
            monkeypatch.setattr(server, "pause", self._counting(server.pause, True))
            monkeypatch.setattr(server, "resume", self._counting(server.resume, False))

    def _monotonic(self) -> float:
        return time.monotonic() + (0 if self.count else PATIENCE)

    def _counting(self, usual: Callable[[Any], None], count: bool) -> Callable[[Any], None]:
        def change(server: Any) -> None:
            self.count = self.count or count  # before a pause: a call made during it would have its minute
            usual(server)
            self.count = count

        return change
