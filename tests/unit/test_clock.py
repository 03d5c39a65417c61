"""Clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import AsyncLimiter, ConfigError, Limiter, MemoryStore, SQLiteStore
from headgate.clock import MAX_INSTANT, SteadyClock, WallClock, instant, to_microseconds
from headgate.http.client import OutboundOptions
from headgate.http.testing import fresh_limits
from headgate.policy import LivePolicy, Policy
from headgate.stores.kv import KVStore, MemoryKV
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock


@given(st.integers(0, 2**53 - 1))
def test_microseconds_survive_conversion_to_seconds_and_back(microseconds: int) -> None:
    """Up to the year 2255: above 2^52, seconds as a double have an error of half a microsecond at most."""
    assert abs(to_microseconds(microseconds / 1_000_000) - microseconds) <= (microseconds > 2**52)


def test_seconds_are_rounded_and_not_truncated() -> None:
    assert to_microseconds(1.001) == 1_001_000
    assert to_microseconds(1_700_000_000.000001) == 1_700_000_000_000_001


@pytest.mark.parametrize(
    "now", [-1e-9, -1, float("nan"), float("inf"), MAX_INSTANT, 1.7e12, datetime.now(UTC)]
)
def test_a_time_that_stores_cannot_count_is_refused(now: Any) -> None:
    with pytest.raises(ConfigError, match="seconds since the epoch, from 0 to the year 2255"):
        instant(now)
    for call in (Limiter("5/minute").hit, Limiter("5/minute").check, Limiter("5/minute").record):
        with pytest.raises(ConfigError):
            call("ada", now=now)


def test_explicit_time_is_rounded_to_the_nearest_microsecond() -> None:
    assert instant(None) is None
    assert instant(0) == 0
    assert instant(1.001) == 1_001_000
    assert instant(MAX_INSTANT - 1) == (MAX_INSTANT - 1) * 1_000_000


def test_wall_clock_step_does_not_change_the_steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    elapsed_ns = 5_000_000_000
    clock = SteadyClock(lambda: elapsed_ns)
    start_us = clock.now_us()
    for step_ns in (-(10**18), 10**18):
        monkeypatch.setattr(time, "time_ns", lambda step=step_ns: 1_700_000_000_000_000_000 + step)
        assert clock.now_us() == start_us
    elapsed_ns += 1_999
    assert clock.now_us() - start_us in (1, 2)


def test_wall_clock_step_does_not_affect_a_memory_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limiter = Limiter("1/hour")
    assert limiter.hit("ada")
    for step_ns in (10**15, -(10**15)):
        monkeypatch.setattr(time, "time_ns", lambda step=step_ns: time.monotonic_ns() + step)
        refused = limiter.hit("ada")
        assert not refused
        assert refused.retry_after is not None
        assert 0 < refused.retry_after <= 3_660


def test_both_real_clocks_return_the_time_since_the_epoch() -> None:
    before = time.time_ns() // 1000
    readings = [WallClock().now_us(), SteadyClock().now_us()]
    after = time.time_ns() // 1000
    # The steady clock is exact to the millisecond.
    assert all(before - 1_001 <= reading <= after + 1 for reading in readings)


async def test_both_real_clocks_sleep() -> None:
    """Sleep for 0 seconds: the test checks only that threads block and tasks await."""
    for clock in (WallClock(), SteadyClock()):
        clock.sleep(0)
        await clock.asleep(0)


async def test_fake_clock_moves_only_when_advanced(clock: FakeClock) -> None:
    start = clock.now_us()
    assert start == 1_700_000_000_000_000
    clock.advance(1.5)
    clock.advance_us(1)
    clock.sleep(2)
    await clock.asleep(0.25)
    assert clock.now_us() - start == 3_750_001
    assert clock.now == 1_700_000_003.750001
    clock.advance(-10)
    assert clock.now_us() < start
    clock.set(5.0)
    assert clock.now_us() == 5_000_000


MADE_WITH_A_CLOCK: dict[str, Callable[..., Any]] = {
    "a limiter": partial(Limiter, "5/minute"),
    "a limiter without rules": Limiter,
    "a limiter on a store": partial(Limiter, "5/minute", name="x", store=MemoryStore()),
    "an async limiter on a store": partial(AsyncLimiter, "5/minute", name="x", store=MemoryStore()),
    "memory": MemoryStore,
    "SQLite": partial(SQLiteStore, ":memory:"),
    "Redis": partial(RedisStore, "redis://localhost"),
    "PostgreSQL": partial(PostgresStore, "postgresql://localhost"),
    "a key-value store": partial(KVStore, MemoryKV()),
    "memory by key and value": MemoryKV,
    "Cloudflare": partial(CloudflareKV, "account", "namespace", "token"),
    "a policy": partial(LivePolicy, Policy({})),
    "a client": partial(OutboundOptions, Limiter, None),
    "a client with a limiter": partial(OutboundOptions, Limiter, Limiter("5/minute")),
    "fresh limits": lambda clock: fresh_limits(clock=clock).__enter__(),
}


@pytest.mark.parametrize("clock", [time.time, FakeClock, 0, "now", MemoryStore()], ids=repr)
@pytest.mark.parametrize("make", MADE_WITH_A_CLOCK.values(), ids=MADE_WITH_A_CLOCK.keys())
def test_invalid_clock_is_refused_by_the_constructor(make: Callable[..., Any], clock: Any) -> None:
    """Also an object with a false truth value, like an empty memory store."""
    with pytest.raises(
        ConfigError, match=r"clock= is an object .* like headgate.testing.FakeClock\(\), not "
    ) as caught:
        make(clock=clock)
    assert repr(clock) in str(caught.value)
