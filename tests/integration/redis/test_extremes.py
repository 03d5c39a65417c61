"""Where doubles end: the script answers like the pure functions with the largest numbers that can be written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from headgate import (
    CostTooHigh,
    Limiter,
    Quota,
    Rule,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.quota import MAX_PERIOD_US, MAX_UNITS
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock, ReferenceStore

LAST_US = 2**53 - 1
"""The last microsecond that can be written, in the year 2255."""


class Twins:
    """A limiter on the server and one of the pure functions, asked the same at the same time."""

    def __init__(self, url: str, name: str, *rules: Rule) -> None:
        self.clock = FakeClock()
        self.store = RedisStore(url)
        self.limiters = [
            Limiter(*rules, name=name, store=store, clock=self.clock, on_store_error="raise")
            for store in (self.store, ReferenceStore(clock=self.clock))
        ]

    def both(self, operation: str, *args: Any, **options: Any) -> Any:
        """Return the answer of both, which must be one."""
        ours, pure = (_answer(getattr(limiter, operation), args, options) for limiter in self.limiters)
        assert getattr(ours, "decision", ours) == getattr(pure, "decision", pure)
        return Pair(self, ours, pure) if operation == "hold" else ours

    def agree(self) -> None:
        """Check that both see the same in every way that can be asked."""
        for cost in (0, 1):
            for tier in (None, "other"):
                self.both("check", "alice", cost, tier=tier)


class Pair:
    """The two holds of a pair of limiters."""

    def __init__(self, twins: Twins, ours: Any, pure: Any) -> None:
        self.twins, self.ours, self.pure = twins, ours, pure

    def settle(self, cost: int) -> None:
        assert self.ours.settle(cost) == self.pure.settle(cost)
        self.twins.agree()


def _answer(call: Any, args: Any, options: Any) -> Any:
    try:
        return call(*args, **options)
    except CostTooHigh as error:
        return "too high", error.cost, error.capacity, error.rule


@pytest.fixture
def twins(url: str, name: str) -> Iterator[Any]:
    made: list[Twins] = []

    def make(*rules: Rule) -> Twins:
        made.append(Twins(url, name, *rules))
        return made[-1]

    yield make
    for twins in made:
        twins.store.close()


LARGEST = {
    "fixed_window": fixed_window(Quota(MAX_UNITS, MAX_PERIOD_US)),
    "sliding_window": sliding_window(Quota(MAX_UNITS, MAX_PERIOD_US), buckets=3),
    "sliding_log": sliding_log(Quota(MAX_UNITS, MAX_PERIOD_US)),
    "token_bucket": token_bucket(Quota(MAX_UNITS, 3_600_000_000), burst=2_501_999),
}


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("start_us", [0, 1_700_000_000_000_000, LAST_US - 2_000])
def test_the_largest_limits(twins: Any, kind: str, start_us: int) -> None:
    both = twins(LARGEST[kind])
    both.clock.set_us(start_us)
    for cost in (1, MAX_UNITS, MAX_UNITS - 1, 2_501_998, 1, 0):
        both.both("hit", "alice", cost)
        both.clock.advance_us(1)
    for cost in (MAX_UNITS, MAX_UNITS - 3, 2**52, 2**52, 1):
        both.both("record", "alice", cost)
        both.agree()
    both.clock.advance_us(1_000)
    both.agree()


def test_waiting_for_longer_than_doubles_can_say(twins: Any) -> None:
    """A quarter of a million units at one a year: times of 2^53 milliseconds, counted in microseconds."""
    both = twins(token_bucket(Quota(1, MAX_PERIOD_US, 284_000)))
    for cost in (284_000, 1, 0):
        both.both("hit", "alice", cost)
        both.clock.advance_us(999)
    both.both("record", "alice", 800)
    refused = both.both("hit", "alice", 284_000)
    assert refused.retry_after_us > 2**53 * 900


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (Quota(1, MAX_PERIOD_US, 200_000), Quota(7, MAX_PERIOD_US, 284_000)),
        (Quota(999_983, MAX_PERIOD_US, 284_000), Quota(31, MAX_PERIOD_US, 284_001)),
        (Quota(7, 3_599_999_000, 2_000_000), Quota(11, 3_599_999_000, 2_500_000)),
        (Quota(10**9, 1_000, 5), Quota(3, 1_000, 9)),
    ],
)
def test_levels_are_converted_exactly(twins: Any, own: Quota, other: Quota) -> None:
    """The product that is divided has up to 88 bits."""
    both = twins(token_bucket(own, tiers={"other": other}))
    for step in range(40):
        tier = "other" if step % 2 else None
        both.both("hit", "alice", (step * 7919) % 200_001 if step % 5 else 1, tier=tier)
        both.clock.advance_us(1_234_567_891 * (step % 4))
        both.agree()


def test_what_was_refunded_in_all_never_leaves_the_exact_range(
    twins: Any, client: redis.Redis, name: str
) -> None:
    """Before it would, the state begins anew, so that an old hold gives back nothing."""
    both = twins(token_bucket(Quota(1, 86_400_000_000, 100_000_000)))
    both.both("hit", "alice", 5)
    old = both.both("hold", "alice", 3)
    for _ in range(3):
        both.both("hold", "alice", 90_000_000).settle(0)
    before = both.both("check", "alice", 0)
    old.settle(0)
    assert both.both("check", "alice", 0) == before
    [key] = client.keys(f"*{name}*")  # type: ignore[union-attr,misc]
    value: Any = client.get(key)
    _, _, _, refunded, *_ = struct.unpack("<7d", value)
    assert refunded <= MAX_UNITS


def test_a_long_log_is_counted_to_the_last_entry(twins: Any) -> None:
    both = twins(sliding_log("3000/minute"))
    for _ in range(3_000):
        both.both("hit", "alice")
        both.clock.advance_us(1_000)
    assert not both.both("hit", "alice")
    both.both("hit", "alice", 1_500)
    both.clock.advance(58)
    assert both.both("hit", "alice", 999)
    holds = [both.both("hold", "alice", 1) for _ in range(2)]
    both.clock.advance(30)
    for hold in holds:
        hold.settle(0)
