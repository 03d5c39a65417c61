"""The script by itself: called by hand on real servers, and against the library's own token bucket."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from functools import cache
from math import ceil, floor
from typing import Any, NamedTuple

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate import Limiter, Quota, token_bucket
from headgate.testing import FakeClock
from headgate_services.tiers.backends import read_script
from headgate_services.tiers.bucket import PARTS, Bucket, Contents

PAST = 1_700_000_000_000_000
"""A time that no clock shows any more, in microseconds."""


class Reply(NamedTuple):
    """The reply of the script."""

    allowed: int
    retry_after: int
    remaining: str


@cache
def connection(url: str) -> tuple[redis.Redis, str]:
    """Return a client of a server, and the script's digest there."""
    client = redis.Redis.from_url(url, decode_responses=True)
    return client, client.script_load(read_script())


@pytest.fixture(scope="module", autouse=True)
def _close_connections() -> Iterator[None]:
    yield
    for url in list(_urls):
        connection(url)[0].close()
    connection.cache_clear()


_urls: set[str] = set()


class Hand:
    """Calls the script as somebody at `redis-cli` would, on one bucket."""

    def __init__(self, url: str) -> None:
        _urls.add(url)
        self.client, self.sha = connection(url)
        self.keys = [f"hand:{secrets.token_hex(8)}:{name}" for name in ("tokens", "time")]

    def __call__(self, capacity: Any, refill_rate: Any, cost: Any, now: Any, ttl: Any = 100) -> Reply:
        arguments = (capacity, refill_rate, cost, now, ttl)
        return Reply(*self.client.evalsha(self.sha, 2, *self.keys, *map(str, arguments)))

    def at(self, bucket: Bucket, cost: int, now_us: int) -> Reply:
        """Call it at a time in microseconds, as the service would."""
        return self(bucket.capacity, repr(bucket.refill_rate), cost, f"{now_us / 1e6:.6f}", bucket.ttl)


@pytest.fixture
def hand(any_url: str) -> Hand:
    return Hand(any_url)


@pytest.mark.requirement("S-20")
def test_s20_the_script_is_a_file_of_the_package() -> None:
    assert "ARGV  1  capacity" in read_script()


@pytest.mark.requirement("S-23", "S-25")
def test_s25_three_values_and_the_third_keeps_its_fraction(hand: Hand) -> None:
    assert hand(5, 0.5, 1, "1700000000.25") == (1, 0, "4")
    assert hand(5, 0.5, 1, "1700000000.45") == (1, 0, "3.1000000000000001")
    assert hand(5, 0.5, 3, "1700000000.45") == (1, 0, "0.10000000000000001")
    assert hand(5, 0.5, 1, "1700000001.25") == (0, 1, "0.5")  # 1 s for the other half
    assert hand(5, 0.5, 2, "1700000001.25") == (0, 3, "0.5")
    assert hand.client.mget(hand.keys) == ["0.10000000000000001", "1700000000.450000"]


@pytest.mark.requirement("S-23")
def test_capacity_and_cost_may_have_fractions_too(hand: Hand) -> None:
    assert hand(2.5, 1, 0.75, 1_600_000_000) == (1, 0, "1.75")
    assert hand(2.5, 1, 2, 1_600_000_000) == (0, 1, "1.75")
    assert hand(2.5, 1, 0, 1_600_000_000.5) == (1, 0, "2.25")


@pytest.mark.requirement("S-24")
def test_s24_both_keys_live_for_the_ttl_that_was_given(hand: Hand) -> None:
    hand(5, 0.5, 1, 1_700_000_000, 20)
    assert [hand.client.ttl(key) for key in hand.keys] == [20, 20]
    assert {Bucket(5, 5 / 60).ttl, Bucket(50, 5).ttl, Bucket(1, 1000).ttl} == {120, 20, 1}


def test_a_refusal_writes_nothing(hand: Hand) -> None:
    hand(1, 0.5, 1, 1_700_000_000, 20)
    before = hand.client.mget(hand.keys)
    hand.client.expire(hand.keys[0], 7)
    assert hand(1, 0.5, 1, 1_700_000_001, 20).allowed == 0
    assert hand.client.mget(hand.keys) == before
    assert hand.client.ttl(hand.keys[0]) <= 7


def test_half_a_bucket_is_none(hand: Hand) -> None:
    hand(5, 0.5, 5, 1_700_000_000)
    hand.client.delete(hand.keys[1])
    assert hand(5, 0.5, 1, 1_700_000_000) == (1, 0, "4")


# --- Clocks (SL-2 overcome) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [5, 3600, 10**6, -5, -55])
def test_a_clock_that_is_wrong_gains_nothing(hand: Hand, skew: int) -> None:
    """An hour is worth 300 tokens here, 5 seconds are worth less than one: both would fill the bucket or be refused."""
    rate = 1.0
    for first, second in ((0, skew), (skew, 0)):
        hand.client.delete(*hand.keys)
        assert hand(1000, rate, 1000, time.time() + first, 10_000).allowed == 1
        second_try = hand(1000, rate, 1000, time.time() + second, 10_000)
        assert second_try.allowed == 0
        assert float(second_try.remaining) < 4  # what really passed between the two calls


# --- Against the library ---------------------------------------------------------------------------------------------

Step = tuple[str, int]
LIMITS = (1, 5, 7, 10, 60, 61, 300, 999, 100_000)
MOMENTS = st.sampled_from(["retry", "just before retry", "just after retry", "full", "just before full"])
STEPS = (
    st.tuples(MOMENTS, st.just(0))
    | st.tuples(st.just("wait"), st.integers(0, 200_000_000) | st.integers(0, 50))
    | st.tuples(st.just("back"), st.integers(1, 5_000_000))
)


@given(
    limit=st.sampled_from(LIMITS),
    capacity=st.integers(1, 60),
    trace=st.lists(st.tuples(STEPS, st.integers(1, 5)), min_size=1, max_size=40),
)
@settings(max_examples=60)
def test_the_script_answers_like_the_librarys_token_bucket(
    any_url: str, limit: int, capacity: int, trace: list[tuple[Step, int]]
) -> None:
    """Equal, with no tolerance at all, for every rate that is a whole number per minute; also one microsecond to either side
    of the instants at which the answer changes, which random steps alone would never hit."""
    clock = FakeClock(PAST / 1e6)
    library = Limiter(token_bucket(Quota.of(limit, 60, burst=capacity)), clock=clock)
    bucket, hand = Bucket(capacity, limit / 60), Hand(any_url)
    retry_us = full_us = latest = 0
    for (move, amount), wanted in trace:
        cost = min(wanted, capacity)
        clock.advance_us(_advance(move, amount, retry_us, full_us))
        expected = library.hit("k", cost)
        reply = hand.at(bucket, cost, clock.now_us())
        assert bool(reply.allowed) is expected.allowed
        assert floor(float(reply.remaining)) == expected.remaining
        assert reply.retry_after == (
            0 if expected.retry_after_us is None else max(1, ceil(expected.retry_after_us / 1e6))
        )
        reset = bucket.outcome(True, 0, float(reply.remaining), clock.now_us(), "atomic").reset_after
        drained_us = expected.reset_after_us
        assert drained_us is not None
        latest = max(latest, clock.now_us())
        if clock.now_us() == latest:  # behind, the library also waits for the clock; the formula does not
            assert reset == ceil(drained_us / 1e6)
        retry_us, full_us = expected.retry_after_us or 0, drained_us


def _advance(move: str, amount: int, retry_us: int, full_us: int) -> int:
    moves: dict[str, Callable[[], int]] = {
        "retry": lambda: retry_us,
        "just before retry": lambda: max(0, retry_us - 1),
        "just after retry": lambda: retry_us + 1,
        "full": lambda: full_us,
        "just before full": lambda: max(0, full_us - 1),
        "wait": lambda: amount,
        "back": lambda: -amount,
    }
    return moves[move]()


@given(
    rate=st.floats(1e-4, 1e4),
    capacity=st.integers(1, 1000),
    trace=st.lists(st.tuples(st.integers(-1_000_000, 300_000_000), st.integers(0, 10)), max_size=25),
)
@example(rate=1 / 9, capacity=1, trace=[(0, 1), (9_000_000, 1)])  # depends on the slack of the refill
@example(rate=1 / 21, capacity=1, trace=[(0, 1), (0, 1)])  # and on that of the wait
@settings(max_examples=60)
def test_the_script_and_its_python_side_agree_bit_for_bit_at_any_rate(
    any_url: str, rate: float, capacity: int, trace: list[tuple[int, int]]
) -> None:
    """So a request may fall back from the script to the pipeline at any time."""
    bucket, hand = Bucket(capacity, rate), Hand(any_url)
    contents: Contents | None = None
    now = PAST
    for step, wanted in trace:
        now += step
        cost = min(wanted, capacity)
        after, outcome = bucket.take(contents, now, cost, "pipeline")
        contents = after or contents
        reply = hand.at(bucket, cost, now)
        assert (bool(reply.allowed), reply.retry_after) == (outcome.allowed, outcome.retry_after)
        assert float(reply.remaining) == outcome.remaining
        assert 0 <= outcome.remaining <= capacity


@given(rate=st.floats(1e-3, 1e3), capacity=st.integers(1, 50), taken_at=st.integers(0, 10**9))
@example(rate=1 / 9, capacity=1, taken_at=0)  # without slack, rounding loses the last part at 9 s
@example(rate=1 / 21, capacity=1, taken_at=0)  # without slack in the wait, it would be 22 s
@settings(max_examples=60)
def test_at_any_rate_waiting_retry_after_is_enough_and_a_second_less_is_not(
    any_url: str, rate: float, capacity: int, taken_at: int
) -> None:
    """Also at rates that are not whole per minute, which lose at most one part of a token per admission."""
    bucket, hand = Bucket(capacity, rate), Hand(any_url)
    now = PAST + taken_at
    assert hand.at(bucket, capacity, now).allowed == 1
    refused = hand.at(bucket, 1, now)
    assert refused.allowed == 0
    if refused.retry_after > 1:
        assert hand.at(bucket, 1, now + (refused.retry_after - 1) * 1_000_000).allowed == 0
    assert hand.at(bucket, 1, now + refused.retry_after * 1_000_000).allowed == 1


@given(rate=st.floats(1e-3, 1e3), steps=st.lists(st.integers(0, 10**7), min_size=1, max_size=50))
def test_the_stated_tolerance_holds(rate: float, steps: list[int]) -> None:
    """One part of a token per admission, against exact arithmetic on the rate as it was given."""
    bucket = Bucket(1_000_000, rate)
    contents, now, expected = Contents(0.0, PAST), PAST, 0.0
    for step in steps:
        now += step
        expected = min(1_000_000, expected + step * rate / 1e6)
        after, _ = bucket.take(contents, now, 0, "pipeline")
        assert after is not None
        contents = after
    # On top of it, what doubles lose in the comparison itself.
    assert abs(contents.tokens - expected) <= (len(steps) + 1) / PARTS + 1e-9 * expected
