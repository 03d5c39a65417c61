"""The public methods of `Limiter` and `AsyncLimiter`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Limiter,
    MemoryStore,
    SQLiteStore,
    StoreUnavailable,
    fixed_window,
    sliding_window,
    token_bucket,
)
from headgate.decision import UNLIMITED
from headgate.testing import FakeClock
from tests.unit.flavours import close, done, entered
from tests.unit.processes import forking, in_child

pytestmark = forking

Flavour = type[Limiter] | type[AsyncLimiter]


# --- Hit, check, record, reset ---------------------------------------------------------------------------------------


async def test_every_operation_accepts_an_explicit_time(flavour: Flavour) -> None:
    limiter = flavour("1/minute")
    assert await done(limiter.hit("ada", now=1000.0))
    assert not await done(limiter.check("ada", now=1060.0))
    hold = await done(limiter.hold("ada", now=1061.0))
    assert hold
    await done(hold.settle(3, now=1100.0))
    assert not await done(limiter.hit("ada", now=1160.0))
    await done(limiter.record("ada", now=1161.0))
    assert not await done(limiter.hit("ada", now=1221.999999))
    assert await done(limiter.hit("ada", now=1222.0))


async def test_limiter_uses_its_clock_with_a_given_store(flavour: Flavour, clock: FakeClock) -> None:
    store = MemoryStore()
    limiter = flavour("1/minute", name="x", store=store, clock=clock)
    assert await done(limiter.hit("ada"))
    assert not await done(limiter.check("ada"))
    clock.advance(61)
    assert await done(limiter.check("ada"))
    hold = await done(limiter.hold("ada"))
    await done(hold.release())
    await done(limiter.record("ada"))
    assert not await done(limiter.hit("ada"))
    await done(limiter.reset("ada"))
    assert await done(limiter.hit("ada"))
    for call in (limiter.hit, limiter.check, limiter.hold):
        assert not await done(call("ada", now=clock.now + 1))
        assert await done(call("ada", now=clock.now + 61 * 60)), (
            "a time of the caller's own comes before the clock's"
        )
        await done(limiter.reset("ada"))
        await done(limiter.record("ada", now=clock.now))


async def test_hold_is_released_at_the_time_of_the_limiter_clock(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(token_bucket("60/minute burst 10"), name="x", store=MemoryStore(), clock=clock)
    await done(limiter.hit("ada", 5))
    hold = await done(limiter.hold("ada", 5))
    clock.advance(2)
    await done(hold.release())
    assert (await done(limiter.check("ada", 0))).remaining == 7


async def test_cost_is_checked_against_the_quota_of_the_tier(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_window("5/minute", tiers={"pro": "50/minute", "off": "0/minute"}), clock=clock)
    assert await done(limiter.hit("ada", 50, tier="pro"))
    for tier in (None, "unheard of"):
        with pytest.raises(CostTooHigh):
            await done(limiter.hit("ada", 6, tier=tier))
    refused = await done(limiter.hit("ada", 500, tier="off"))
    assert (refused.allowed, refused.limit, refused.retry_after) == (False, 0, None)


# --- Without rules ---------------------------------------------------------------------------------------------------


async def test_without_rules_everything_is_admitted_and_nothing_counted(flavour: Flavour) -> None:
    store = MemoryStore()
    limiter = flavour(name="x", store=store)
    for key in ("ada", None, {"user": "ada"}):
        assert await done(limiter.hit(key, 10**9)) is UNLIMITED
        assert await done(limiter.check(key)) is UNLIMITED
        assert await done(limiter.wait(key, timeout=0)) is UNLIMITED
        await done(limiter.record(key))
        await done(limiter.reset(key))
        hold = await done(limiter.hold(key, 5))
        assert await done(hold.settle(9)) == 9
        async with entered(limiter.hold(key, 5)) as hold:
            await done(hold.release())
    assert len(store) == 0


# --- Constructor -----------------------------------------------------------------------------------------------------


def test_a_limiter_on_a_given_store_needs_a_name(flavour: Flavour) -> None:
    stores: list[Any] = [MemoryStore(), "memory://", "sqlite:///:memory:"]
    for store in stores:
        with pytest.raises(ConfigError, match="needs a name="):
            flavour("5/minute", store=store)
        with pytest.raises(ConfigError, match="needs a name="):
            flavour("5/minute", name="", store=store)


@pytest.mark.parametrize("wrong", [5, object(), {}, MemoryStore])
def test_invalid_store_is_refused(flavour: Flavour, wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{flavour.__name__} takes a URL or a store for it, like RedisStore\(…\), not "
    ):
        flavour("5/minute", name="x", store=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": 5}, "a limiter's name is text, not 5"),
        ({"name": b"login"}, "a limiter's name is text, not b'login'"),
        ({"name": ["login"], "store": MemoryStore()}, "a limiter's name is text, not ['login']"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(flavour: Flavour, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flavour("5/minute", **options)
    assert str(caught.value) == message


async def test_limiters_without_a_store_count_separately(flavour: Flavour, clock: FakeClock) -> None:
    one, other = flavour("1/minute", name="x", clock=clock), flavour("1/minute", name="x", clock=clock)
    assert await done(one.hit("ada"))
    assert await done(other.hit("ada"))


def test_limiter_has_a_readable_repr(flavour: Flavour) -> None:
    limiter = flavour("5/minute", fixed_window("9/day", name="daily"), name="submit")
    assert repr(limiter) == f"<{flavour.__name__} submit: per-minute (5/minute), daily (9/day)>"
    assert repr(flavour()) == f"<{flavour.__name__} unnamed: unlimited>"
    assert [rule.name for rule in limiter.rules] == ["per-minute", "daily"]


# --- Closing ---------------------------------------------------------------------------------------------------------


async def test_a_limiter_closes_the_store_it_opened(flavour: Flavour, tmp_path: Path) -> None:
    limiter = flavour("5/minute", name="x", store=f"sqlite:///{tmp_path}/limits.db")
    async with entered(limiter) as same:
        assert same is limiter
        await done(limiter.hit("ada"))
    with pytest.raises(StoreUnavailable):
        await done(limiter.hit("ada"))
    await close(limiter)


async def test_close_clears_the_private_memory_store_of_a_limiter(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("1/minute", clock=clock)
    async with entered(limiter):
        await done(limiter.hit("ada"))
        assert not await done(limiter.hit("ada"))
    assert await done(limiter.hit("ada"))


async def test_a_limiter_leaves_a_given_store_open(flavour: Flavour, clock: FakeClock) -> None:
    with SQLiteStore(":memory:", clock=clock) as store:
        async with entered(flavour("1/minute", name="x", store=store)) as limiter:
            await done(limiter.hit("ada"))
        assert not await done(limiter.hit("ada"))


# --- Forks and event loops -------------------------------------------------------------------------------------------


def test_async_limiter_works_in_successive_event_loops(clock: FakeClock) -> None:
    limiter = AsyncLimiter("2/minute", clock=clock)

    async def use() -> bool:
        async with limiter.hold("ada") as hold:
            await hold.settle(1)
        return bool(await limiter.check("ada"))

    assert [asyncio.run(use()) for _ in range(2)] == [True, False]
    start = clock.now
    assert asyncio.run(limiter.wait("ada")).remaining == 1
    assert asyncio.run(limiter.wait("ada", timeout=120)).remaining == 0
    assert clock.now - start == 61.0


def test_limiters_made_before_a_fork_work_after_it(clock: FakeClock) -> None:
    limiter, other = Limiter("3/minute", clock=clock), AsyncLimiter("3/minute", clock=clock)

    def work() -> bool:
        with limiter.hold("ada") as hold:
            hold.release()
        waited = limiter.wait("ada", 3).allowed and limiter.wait("ada").allowed
        return waited and asyncio.run(other.wait("ada", 3)).allowed and asyncio.run(other.wait("ada")).allowed

    assert in_child(work)
    assert limiter.hit("ada", 3), "the child counted for itself"
