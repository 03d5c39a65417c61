"""Fixtures of all integration tests. Deadlines are long, so that a busy machine does not look like an outage."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.client import ServerStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.integration.deadlines import PATIENCE, Deadlines
from tests.unit.flavours import Flavour


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


@pytest.fixture
def name() -> str:
    """A unique name for a limiter or a table."""
    return f"n{secrets.token_hex(8)}"


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["threads", "tasks"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """The class of the limiters."""
    kind: Flavour = request.param
    return kind
