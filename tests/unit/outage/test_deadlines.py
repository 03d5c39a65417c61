"""Every store validates deadlines in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate import ConfigError
from headgate.client import ServerStore
from headgate.rules import fixed_window
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore

STORES: dict[str, Callable[..., Any]] = {
    "redis": lambda **options: RedisStore("redis://localhost", **options),
    "postgres": lambda **options: PostgresStore("postgresql://localhost/limits", **options),
    "server": lambda **options: ServerStore("http://localhost:8080", **options),
}
MESSAGE = "a deadline is a number of seconds above 0 and at most 3600, not"


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
@pytest.mark.parametrize("deadline", [0, -1, 3600.1, 7200, float("nan"), float("inf"), True, "1"])
def test_every_store_refuses_invalid_deadlines_with_the_same_message(
    make: Callable[..., Any], deadline: Any
) -> None:
    with pytest.raises(ConfigError, match=MESSAGE):
        make(deadline=deadline)
    store = make()
    for bind in (store.bind, store.bind_async):
        with pytest.raises(ConfigError, match=MESSAGE):
            bind("x", (fixed_window("5/minute"),), deadline=deadline)


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
@pytest.mark.parametrize("deadline", [1e-6, 1, 3600])
def test_every_store_takes_the_same_deadlines(make: Callable[..., Any], deadline: float) -> None:
    assert make(deadline=deadline).deadline == deadline
    make().bind("x", (fixed_window("5/minute"),), deadline=deadline)
