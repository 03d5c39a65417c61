"""Holds: taken, then settled at their actual cost or released, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    RateLimited,
    Rule,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.testing import FakeClock
from tests.unit.flavours import AnyLimiter, done, entered

Flavour = type[Limiter] | type[AsyncLimiter]
KINDS = (fixed_window, sliding_window, sliding_log, token_bucket)
every_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)


async def left(limiter: AnyLimiter, key: str = "ada") -> int:
    remaining: int = (await done(limiter.check(key, 0))).remaining
    return remaining


async def test_hold_has_the_attributes_of_a_decision(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    hold = await done(limiter.hold("ada", 4))
    assert hold
    assert (hold.allowed, hold.cost, hold.retry_after, hold.decision.remaining) == (True, 4, None, 1)
    refused = await done(limiter.hold("ada", 2))
    assert not refused
    assert (refused.allowed, refused.retry_after) == (False, 61.0)
    assert await left(limiter) == 1


async def test_a_refused_hold_has_nothing_to_settle(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("2/minute", clock=clock)
    await done(limiter.hit("ada", 2))
    hold = await done(limiter.hold("ada"))
    assert await done(hold.settle(5)) == 0
    assert await done(hold.release()) == 0
    await done(limiter.reset("ada"))
    assert await left(limiter) == 2


async def test_zero_cost_hold_charges_nothing_and_can_be_settled_higher(
    flavour: Flavour, clock: FakeClock
) -> None:
    limiter = flavour("5/minute", clock=clock)
    hold = await done(limiter.hold("ada", 0))
    assert hold
    assert await left(limiter) == 5
    assert await done(hold.settle(2)) == 2
    assert await left(limiter) == 3


async def test_settle_with_an_invalid_time_leaves_the_hold_open(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    hold = await done(limiter.hold("ada", 3))
    with pytest.raises(ConfigError):
        await done(hold.release(now=float("nan")))
    await done(hold.release())
    assert await left(limiter) == 5


@every_kind
async def test_hold_with_an_explicit_time_is_settled_at_that_time(
    flavour: Flavour, make: Callable[..., Rule]
) -> None:
    """At the time of the store, decades later, everything would be expired, or units would be recorded there."""
    limiter = flavour(make("5/minute"))
    await done(limiter.hit("ada", 2, now=1000.0))
    with pytest.raises(ZeroDivisionError):
        async with entered(limiter.hold("ada", 2, now=1000.0)):
            raise ZeroDivisionError
    assert (await done(limiter.check("ada", 0, now=1000.0))).remaining == 3
    hold = await done(limiter.hold("ada", 1, now=1000.0))
    await done(hold.settle(2))
    assert (await done(limiter.check("ada", 0, now=1000.0))).remaining == 1
    assert (await done(limiter.check("ada", 0, now=1200.0))).remaining == 5


async def test_hold_of_a_tier_is_settled_higher_in_its_tier(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(token_bucket("6/minute", tiers={"pro": "60/minute"}), clock=clock)
    hold = await done(limiter.hold("ada", 10, tier="pro"))
    await done(hold.settle(20))
    assert (await done(limiter.check("ada", 0, tier="pro"))).remaining == 40


# --- As a context manager --------------------------------------------------------------------------------------------


async def test_block_that_succeeds_keeps_the_held_units(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    async with entered(limiter.hold("ada", 3)) as hold:
        assert hold.decision.remaining == 2
    assert await left(limiter) == 2
    assert await done(hold.release()) == 3, "settled by the end of the block"
    assert await left(limiter) == 2


async def test_a_block_can_settle_and_release(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    async with entered(limiter.hold("ada", 3)) as hold:
        await done(hold.settle(1))
    assert await left(limiter) == 4
    async with entered(limiter.hold("ada", 3)) as hold:
        await done(hold.release())
    assert await left(limiter) == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
async def test_block_that_raises_releases_the_hold_and_propagates_the_error(
    flavour: Flavour, clock: FakeClock, error: type[BaseException]
) -> None:
    limiter = flavour("5/minute", clock=clock)
    with pytest.raises(error):
        async with entered(limiter.hold("ada", 3)):
            raise error
    assert await left(limiter) == 5


async def test_settle_before_an_error_in_the_block_is_kept(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with entered(limiter.hold("ada", 3)) as hold:
            await done(hold.settle(2))
            raise ZeroDivisionError
    assert await left(limiter) == 3


async def test_entering_a_refused_hold_raises_and_the_block_is_not_run(
    flavour: Flavour, clock: FakeClock
) -> None:
    limiter = flavour("2/minute", clock=clock)
    await done(limiter.hit("ada", 2))
    with pytest.raises(RateLimited) as caught:
        async with entered(limiter.hold("ada")):
            pytest.fail("the block was run")
    assert caught.value.decision.retry_after == 61.0
    assert await left(limiter) == 0


async def test_existing_hold_can_be_entered(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    hold = await done(limiter.hold("ada", 3))
    async with entered(hold) as same:
        assert same is hold
    assert await left(limiter) == 2


async def test_repr_of_a_hold_shows_its_status(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour("5/minute", clock=clock)
    hold = await done(limiter.hold("ada", 3))
    name = "Hold" if flavour is Limiter else "AsyncHold"
    assert repr(hold) == f"<{name} of 3, open: allowed by per-minute: 2 of 5 left>"
    await done(hold.settle(1))
    assert repr(hold) == f"<{name} of 3, settled at 1: allowed by per-minute: 2 of 5 left>"
