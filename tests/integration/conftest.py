"""Long deadlines for these tests, so that a busy machine does not look like an outage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.client import ServerStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.integration.deadlines import PATIENCE, Deadlines


@pytest.fixture(autouse=True)
def _patient_stores() -> Iterator[None]:
    """Give stores a long deadline, unless a test sets one."""
    with pytest.MonkeyPatch.context() as patches:
        for kind in (PostgresStore, RedisStore, ServerStore):
            patches.setitem(kind.__init__.__kwdefaults__, "deadline", PATIENCE)
        yield


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    """Deadlines that count only while a server hangs."""
    with pytest.MonkeyPatch.context() as patches:  # a test may undo its own
        yield Deadlines(patches)
