"""Time for the servers of these tests: a busy machine is no outage."""

from __future__ import annotations

import pytest

from headgate.client import ServerStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.integration.deadlines import PATIENCE, Deadlines


@pytest.fixture(autouse=True)
def _patient_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores wait for long, unless a test says for how long."""
    for kind in (PostgresStore, RedisStore, ServerStore):
        monkeypatch.setitem(kind.__init__.__kwdefaults__, "deadline", PATIENCE)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    """Deadlines that count only while a server hangs."""
    return Deadlines(monkeypatch)
