"""The public methods of `Limiter` and `AsyncLimiter`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Limiter,
    MemoryStore,
    Rule,
    SQLiteStore,
    StoreUnavailable,
    fixed_window,
    sliding_window,
    token_bucket,
)
from headgate.decision import UNLIMITED
from headgate.quota import MAX_UNITS
from headgate.testing import FakeClock
from tests.unit.flavours import close, done, entered
from tests.unit.processes import forking, in_child

pytestmark = forking

Flavour = type[Limiter] | type[AsyncLimiter]


# --- Hit, check, record, reset ---------------------------------------------------------------------------------------


async def test_hit_charges_units_until_none_remain(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    assert [(await done(limiter.hit("ada"))).remaining for _ in range(5)] == [4, 3, 2, 1, 0]
    refused = await done(limiter.hit("ada"))
    assert (refused.allowed, refused.remaining, refused.denied_by) == (False, 0, "per-minute")
    assert (await done(limiter.hit("bob", 5))).allowed


async def test_check_returns_the_decision_of_a_hit_and_charges_nothing(
    flavour: Flavour, clock: FakeClock
) -> None:
    limiter = flavour("5/minute", clock=clock)
    for cost in (5, 1):
        looked = await done(limiter.check("ada", cost))
        assert looked == await done(limiter.check("ada", cost))
        assert looked == await done(limiter.hit("ada", cost))


async def test_recorded_units_count_even_beyond_the_limit(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    await done(limiter.record("ada"))
    assert (await done(limiter.check("ada", 0))).remaining == 4
    await done(limiter.record("ada", 100))
    assert (await done(limiter.check("ada", 0))).remaining == 0
    refused = await done(limiter.hit("ada"))
    assert refused.retry_after == 61.0


async def test_reset_clears_a_key_in_every_rule(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", fixed_window("5/hour"), token_bucket("5/day"), clock=clock)
    await done(limiter.hit("ada", 5))
    await done(limiter.hit("bob", 5))
    await done(limiter.reset("ada"))
    assert [r.remaining for r in (await done(limiter.check("ada", 0))).results] == [5, 5, 5]
    assert not await done(limiter.hit("bob"))
    await done(limiter.reset("nobody"))


async def test_reset_of_a_shared_counter_applies_to_all_keys(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(
        sliding_window("5/minute", scope="*"), sliding_window("9/minute", name="own"), clock=clock
    )
    await done(limiter.hit("ada", 5))
    await done(limiter.reset("bob"))
    assert [r.remaining for r in (await done(limiter.check("ada", 0))).results] == [5, 4]


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


@pytest.mark.parametrize(
    "rule", [fixed_window("5/minute"), sliding_window("5/minute"), token_bucket("5/minute")], ids=str
)
async def test_counts_cannot_exceed_the_exact_range(flavour: Flavour, rule: Rule, clock: FakeClock) -> None:
    limiter = flavour(rule, clock=clock)
    parts = 12_000_000 if rule.kind == "token_bucket" else 1
    await done(limiter.record("ada", MAX_UNITS // parts - 2))
    with pytest.raises(CostTooHigh) as caught:
        await done(limiter.record("ada", 3))
    assert (caught.value.cost, caught.value.capacity) == (3, 2)
    await done(limiter.record("ada", 2))
    assert not await done(limiter.hit("ada"))


@pytest.mark.parametrize("cost", [-1, 1.0, True, "1", None, MAX_UNITS + 1])
async def test_cost_must_be_a_whole_number(flavour: Flavour, cost: Any) -> None:
    limiter = flavour("5/minute")
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record, limiter.wait):
        with pytest.raises(ConfigError, match="a cost is a whole number"):
            await done(call("ada", cost))


async def test_a_cost_above_the_capacity_is_an_error_and_not_a_refusal(flavour: Flavour) -> None:
    limiter = flavour("5/minute", token_bucket("9/minute", burst=3), clock=FakeClock())
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.wait):
        with pytest.raises(CostTooHigh) as caught:
            await done(call("ada", 4))
        assert (caught.value.cost, caught.value.capacity, caught.value.rule) == (
            4,
            3,
            "per-minute-token-bucket",
        )
    assert (await done(limiter.check("ada", 3))).remaining == 0


async def test_cost_is_checked_against_the_quota_of_the_tier(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_window("5/minute", tiers={"pro": "50/minute", "off": "0/minute"}), clock=clock)
    assert await done(limiter.hit("ada", 50, tier="pro"))
    for tier in (None, "unheard of"):
        with pytest.raises(CostTooHigh):
            await done(limiter.hit("ada", 6, tier=tier))
    refused = await done(limiter.hit("ada", 500, tier="off"))
    assert (refused.allowed, refused.limit, refused.retry_after) == (False, 0, None)


async def test_tiers_share_one_state(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_window("5/minute", tiers={"pro": "8/minute"}), clock=clock)
    assert await done(limiter.hit("ada", 5))
    assert not await done(limiter.hit("ada"))
    assert (await done(limiter.hit("ada", 2, tier="pro"))).remaining == 1
    assert not await done(limiter.hit("ada", tier="unheard of"))


async def test_zero_limit_refuses_without_a_retry_time(flavour: Flavour, clock: FakeClock) -> None:
    for rule in (fixed_window("0/minute"), sliding_window("0/minute"), token_bucket("0/minute")):
        limiter = flavour(rule, clock=clock)
        refused = await done(limiter.hit("ada", 7))
        assert (refused.allowed, refused.limit, refused.remaining, refused.retry_after) == (False, 0, 0, None)
        assert await done(limiter.hit("ada", 0))
        await done(limiter.record("ada", 3))
        assert not await done(limiter.hold("ada"))


async def test_several_rules_are_charged_together(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("2/second; 3/minute", clock=clock)
    assert await done(limiter.hit("ada", 2))
    clock.advance(2)
    refused = await done(limiter.hit("ada", 2))
    assert (refused.allowed, refused.denied_by) == (False, "per-minute")
    assert [r.remaining for r in refused.results] == [2, 1]
    assert (await done(limiter.hit("ada"))).rule == "per-minute"


async def test_scoped_rules_count_by_their_entry_of_the_key(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(
        sliding_window("1/minute", scope="user"), sliding_window("2/minute", scope="realm"), clock=clock
    )
    keys: list[Mapping[str, str]] = [{"user": u, "realm": "north"} for u in ("ada", "bob", "cyd")]
    decisions = [await done(limiter.hit(key)) for key in keys]
    assert [bool(decision) for decision in decisions] == [True, True, False]
    assert decisions[2].denied_by == "per-minute-realm"
    assert await done(limiter.hit({"user": "cyd", "realm": "south"}))


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
        ({"quotas": getattr, "quotas_for": "60s"}, "quotas_for= is seconds, at least 0, not '60s'"),
        ({"quotas": getattr, "quotas_for": None}, "quotas_for= is seconds, at least 0, not None"),
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
