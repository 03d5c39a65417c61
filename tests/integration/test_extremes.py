"""With the largest allowed numbers, near 2^53, Lua and SQL decide like the Python functions."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis

from headgate import (
    CostTooHigh,
    Limiter,
    Quota,
    Rule,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.quota import MAX_PERIOD_US, MAX_UNITS
from headgate.stores.postgres import PostgresStore, migrate
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock, ReferenceStore
from headgate.testing.postgres_server import new_database
from tests.searching import SEEDS

LAST_US = 2**53 - 1
"""The last supported microsecond, in the year 2255."""


class Twins:
    """A limiter on the server and one in memory, called with the same arguments at the same time."""

    def __init__(self, url: str, name: str, *rules: Rule) -> None:
        self.clock, self.name = FakeClock(), name
        on_redis = url.startswith("redis")
        self.server: Any = redis.Redis.from_url(url) if on_redis else psycopg.connect(url, autocommit=True)
        self.store = (RedisStore if on_redis else PostgresStore)(url, deadline=30)
        self.reference = ReferenceStore(clock=self.clock)
        self.limiters = [
            Limiter(*rules, name=name, store=store, clock=self.clock, on_store_error="raise")
            for store in (self.store, self.reference)
        ]

    def both(self, operation: str, *args: Any, **options: Any) -> Any:
        """Return the result of both, which must be equal."""
        ours, pure = (_answer(getattr(limiter, operation), args, options) for limiter in self.limiters)
        assert getattr(ours, "decision", ours) == getattr(pure, "decision", pure)
        return Pair(self, ours, pure) if operation == "hold" else ours

    def agree(self) -> None:
        """Check that all checks of both are equal."""
        for cost in (0, 1):
            for tier in (None, "other"):
                self.both("check", "alice", cost, tier=tier)

    def stored(self) -> list[list[int]]:
        """Return the numbers of all states of the limiter on the server."""
        if isinstance(self.server, redis.Redis):
            values: list[Any] = [self.server.get(key) for key in self.server.keys(f"*{self.name}*")]
            return [[int(number) for (number,) in struct.iter_unpack("<d", value)] for value in values]
        query = "SELECT state FROM headgate_states WHERE encode(key, 'escape') LIKE %s"
        return [state for (state,) in self.server.execute(query, (f"%{self.name}%",))]

    def states_agree(self) -> None:
        """Check that the stored numbers are equal, except the births."""
        states = [list(state[1:]) for state, _ in self.reference.states.values()]
        assert [state[1:] for state in self.stored()] == states

    def close(self) -> None:
        self.store.close()
        self.server.close()


class Pair:
    """The two holds of a pair of limiters."""

    def __init__(self, twins: Twins, ours: Any, pure: Any) -> None:
        self.twins, self.ours, self.pure = twins, ours, pure

    def settle(self, cost: int) -> None:
        assert self.ours.settle(cost) == self.pure.settle(cost)
        self.twins.agree()

    def confirm(self, cost: int) -> Any:
        """Return the result of both."""
        answer = _answer(self.ours.confirm, (cost,), {})
        assert answer == _answer(self.pure.confirm, (cost,), {})
        return answer


def _answer(call: Any, args: Any, options: Any) -> Any:
    try:
        return call(*args, **options)
    except CostTooHigh as error:
        return "too high", error.cost, error.capacity, error.rule


@pytest.fixture(scope="module")
def postgres(headgate_postgres_server: str) -> Iterator[str]:
    """A database without the states of other tests, because every look at states reads them all."""
    with new_database(headgate_postgres_server) as url:
        migrate(url)
        yield url


@pytest.fixture(params=["headgate_redis_url", "postgres"], ids=["redis", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def twins(url: str, name: str) -> Iterator[Any]:
    made: list[Twins] = []

    def make(*rules: Rule) -> Twins:
        made.append(Twins(url, name, *rules))
        return made[-1]

    yield make
    for twins in made:
        twins.close()


LARGEST = {
    "fixed_window": fixed_window(Quota(MAX_UNITS, MAX_PERIOD_US)),
    "sliding_window": sliding_window(Quota(MAX_UNITS, MAX_PERIOD_US), buckets=3),
    "sliding_log": sliding_log(Quota(MAX_UNITS, MAX_PERIOD_US)),
    "token_bucket": token_bucket(Quota(MAX_UNITS, 3_600_000_000), burst=2_501_999),
    "calendar": calendar(f"{MAX_UNITS}/year"),
}


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("start_us", [0, 1_700_000_000_000_000, LAST_US - 2_000])
def test_largest_limits_match_the_reference(twins: Any, kind: str, start_us: int) -> None:
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


def test_wait_beyond_double_precision_is_exact(twins: Any) -> None:
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


BUCKETS = {
    "usual": (Quota(100, 60_000_000, 20), Quota(1_000, 60_000_000, 200)),
    "coarse": (Quota(7, MAX_PERIOD_US, 284_000), Quota(1, MAX_PERIOD_US, 200_000)),
    "primes": (Quota(999_983, MAX_PERIOD_US, 284_000), Quota(31, MAX_PERIOD_US, 284_001)),
    "full": (Quota(7, 3_599_999_000, 2_502_000), Quota(11, 3_599_999_000, 2_500_000)),
    "fast": (Quota(MAX_UNITS, 3_600_000_000, 2_501_999), Quota(1, 3_600_000_000, 2_501_999)),
    "grows": (Quota(10**9, 1_000, 5), Quota(3, 1_000, 2**43)),
}
"""Quotas of two tiers, most of them with bursts near 2^53 small parts; the last grow beyond it when converted."""


WINDOW, OTHER = Quota(20, 60_000_000), {"other": Quota(31, 60_000_000)}
RULES = {
    **{name: token_bucket(own, tiers={"other": other}) for name, (own, other) in BUCKETS.items()},
    "fixed window": fixed_window(WINDOW, tiers=OTHER),
    "sliding window": sliding_window(WINDOW, buckets=7, tiers=OTHER),
    "loose window": sliding_window(WINDOW, buckets=3, strict=False, tiers=OTHER),
    "sliding log": sliding_log(WINDOW, tiers=OTHER),
    "calendar": calendar("20/day", tiers={"other": "31/day"}),
}

STEPS = [*["hit"] * 2, *["hold", "time"] * 3, *["settle", "confirm"] * 2, "record", "tier"]
"""Operations, repeated by weight."""


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps_match_the_reference_exactly(twins: Any, kind: str, seed: int) -> None:
    """Holds released early, late and in any order, a clock that goes back, and from time to time another tier."""
    rule = RULES[kind]
    both = twins(rule)
    choose = random.Random(seed)
    tier: str | None = None
    holds: list[tuple[Pair, int]] = []
    for _ in range(250):
        quota = rule.quota_for(tier)
        most = quota.burst or quota.limit
        cost = choose.choice([1, 3, most // 5, most // 3, most])
        drains_us = quota.period_us * cost // quota.limit + 1
        match choose.choice(STEPS):
            case "hit":
                both.both("hit", "alice", cost, tier=tier)
            case "hold":
                hold = both.both("hold", "alice", cost, tier=tier)
                if hold.ours:
                    holds.append((hold, cost))
            case "settle" if holds:
                hold, held = holds.pop(choose.randrange(len(holds)))
                hold.settle(choose.choice([0, 0, held // 2, held - 1]))
            case "confirm" if holds:
                place = choose.randrange(len(holds))
                hold, held = holds[place]
                if getattr(hold.confirm(choose.choice([0, 1, held // 2, held, 2 * held])), "allowed", False):
                    del holds[place]
            case "time":
                step = choose.choice([1, 999, drains_us // 7, drains_us // 2, drains_us])
                at = both.clock.now_us() + choose.choice([step, step, -step])
                both.clock.set_us(min(max(at, 0), LAST_US))
            case "record":
                both.both("record", "alice", choose.choice([1, cost, MAX_UNITS]), tier=tier)
            case "tier":
                tier = choose.choice([None, "other"])
        both.agree()
        both.states_agree()


@pytest.mark.parametrize("kind", ["usual", *(kind for kind in RULES if kind not in BUCKETS)])
def test_excessive_refunds_match_the_reference(twins: Any, kind: str) -> None:
    """A refund that is repeated, or greater than the hold, as a broken client may send it."""
    both = twins(RULES[kind])
    both.both("hit", "alice", 2)
    hold, _ = [both.both("hold", "alice", 4) for _ in range(2)]
    for units in (9, 4, 4, 4):
        for limiter, one in zip(both.limiters, (hold.ours, hold.pure), strict=True):
            limiter.gate.refund(one.receipts, units, None)
        both.agree()
        if kind in BUCKETS:
            both.states_agree()
        if units == 4:
            both.clock.advance(10)
            both.both("hit", "alice")


@pytest.mark.parametrize("held_at", [0, 1])
@pytest.mark.parametrize("others", [0, 2])
def test_confirmation_before_the_window_in_use_matches_the_reference(
    twins: Any, held_at: int, others: int
) -> None:
    """The hold is of that window or of the one before, alone or not, and the clock has gone back."""
    both = twins(calendar("9/day"))
    both.clock.advance(held_at * 86_400)
    hold = both.both("hold", "alice", 4)
    both.clock.advance((1 - held_at) * 86_400)
    both.both("hit", "alice", others)
    both.clock.advance(-86_400)
    hold.confirm(7)
    both.agree()
    both.clock.advance(86_400)
    both.agree()


def test_a_release_stays_in_the_exact_range(twins: Any) -> None:
    """At the time before the hold the bucket was full; with the later hit it would exceed its capacity."""
    both = twins(token_bucket(BUCKETS["full"][0]))
    both.both("hit", "alice", 2_502_000)
    both.clock.advance(3_600)
    hold = both.both("hold", "alice", 3)
    both.both("hit", "alice", 3)
    hold.settle(0)
    [(state, _)] = both.reference.states.values()
    [(_, *numbers)] = both.stored()
    assert tuple(numbers) == state[1:]


def test_refund_total_stays_in_the_exact_range(twins: Any) -> None:
    """Before that, the state is reset, so that an old hold gives back nothing."""
    both = twins(token_bucket(Quota(1, 86_400_000_000, 100_000_000)))
    both.both("hit", "alice", 5)
    old = both.both("hold", "alice", 3)
    for _ in range(3):
        hold = both.both("hold", "alice", 90_000_000)
        both.both("hit", "alice")  # without a hit in between, a release would only undo the hold
        hold.settle(0)
    before = both.both("check", "alice", 0)
    old.settle(0)
    assert both.both("check", "alice", 0) == before
    [(_, _, _, refunded, *_)] = both.stored()
    assert refunded <= MAX_UNITS


def test_many_leases_match_the_reference_exactly(twins: Any) -> None:
    """Leases of two lengths, ended in any order, by a clock that also goes back."""
    both = twins(concurrent(500, lease="60s", tiers={"other": 300}))
    shorter = concurrent(500, lease="7s", tiers={"other": 300})
    versions = [
        both.limiters,
        [
            Limiter(shorter, name=both.name, store=store, clock=both.clock, on_store_error="raise")
            for store in (both.store, both.reference)
        ],
    ]
    choose = random.Random(0)
    most = 0
    holds: list[Pair] = []
    for number in range(1_500):
        both.limiters = choose.choice(versions)
        match choose.choice(["hold", "hold", "hold", "renew", "release", "time"]):
            case "hold":
                cost = choose.choice([1] * 20 + [2, 30])
                hold = both.both("hold", "alice", cost, tier=choose.choice([None, "other"]))
                if hold.ours:
                    holds.append(hold)
            case "renew" if holds:
                hold = choose.choice(holds)
                assert hold.ours.renew() == hold.pure.renew()
            case "release" if holds:
                hold = holds.pop(choose.randrange(len(holds)))
                hold.settle(0)
            case "time":
                both.clock.advance_us(choose.choice([1, 1_000, 100_000, -50_000]))
        if number % 10:
            continue
        both.agree()
        most = max(most, *(len(state) for state, _ in both.reference.states.values()), 0)
        expected = [_as_kept(state) for state, _ in both.reference.states.values()]
        assert [kept[1:] for kept in _leases(both)] == expected
    assert most > 3 * 200


def _as_kept(state: tuple[int, ...]) -> list[int]:
    """Return leases as they are on the server, without the births that differ: the units of all come first."""
    _, latest, *leases = state
    ends_and_units = [number for i, number in enumerate(leases) if i % 3 != 1]
    return [latest, sum(leases[2::3]), *ends_and_units]


def _leases(both: Twins) -> list[list[int]]:
    return [row[:3] + [number for i, number in enumerate(row[3:]) if i % 3 != 1] for row in both.stored()]
