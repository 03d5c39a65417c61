"""Logs and windows of thousands of entries, which are changed in place: the same answers, at the price of a small one."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from headgate import AsyncLimiter, Limiter, Rule, StoreConflict, fixed_window, sliding_log, sliding_window
from headgate.algorithms import State
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock, ReferenceStore
from headgate.testing.servers import RedisServer
from tests.searching import SEEDS

LONG = 4088
"""The size from which on a window is changed in place."""


class Twins:
    """A limiter on the server and one of the pure functions, asked the same at the same time."""

    def __init__(self, url: str, client: redis.Redis, name: str, rule: Rule) -> None:
        self.client, self.name = client, name
        self.clock = FakeClock()
        self.store, self.reference = RedisStore(url, deadline=30), ReferenceStore(clock=self.clock)
        self.limiters = [
            Limiter(rule, name=name, store=store, clock=self.clock, on_store_error="raise")
            for store in (self.store, self.reference)
        ]

    def both(self, operation: str, *args: Any) -> Any:
        """Return the answer of both, which must be one; of a hold both answers."""
        ours, pure = (getattr(limiter, operation)(*args) for limiter in self.limiters)
        assert getattr(ours, "decision", ours) == getattr(pure, "decision", pure)
        return (ours, pure) if operation == "hold" else ours

    def fill(self, entries: int, apart_us: int) -> None:
        """Count one unit each, so long apart."""
        for _ in range(entries):
            self.both("record", "alice", 1)
            self.clock.advance_us(apart_us)

    def agree(self) -> None:
        """Check that both see the same and keep the same."""
        for cost in (0, 1, 700):
            self.both("check", "alice", cost)
        kept = self.pure_state()
        assert self.state() == kept[1:]
        if len(self.value()) >= LONG:
            assert len(self.value()) < 1.4 * 8 * len(kept) + 100, "most of it is of no use"

    def key(self) -> bytes:
        keys: Any = self.client.keys(f"*{self.name}*")
        key: bytes = keys[0]
        return key

    def value(self) -> bytes:
        """Return what is kept on the server."""
        keys: Any = self.client.keys(f"*{self.name}*")
        value: Any = self.client.get(keys[0]) if keys else b""
        return bytes(value)

    def state(self) -> State:
        """Return the buckets on the server as the pure functions keep them, without the birth."""
        return buckets_of(self.value())

    def pure_state(self) -> State:
        return next((state for state, _ in self.reference.states.values()), ())


def buckets_of(value: bytes) -> State:
    """Return index and units of the buckets in a state."""
    if not value:
        return ()
    birth, count = struct.unpack_from("<dd", value)
    start, end = 16, len(value)
    if birth < 0:
        _, _, start, last, newest, newest_units, _ = map(int, struct.unpack_from("<7d", value))
        end = last + 16
        assert struct.unpack_from("<dd", value, last) == (newest, newest_units)
        assert newest_units > 0
    pairs = struct.iter_unpack("<dd", value[start:end])
    buckets = [(int(index), int(units)) for index, units in pairs if units]
    assert count == sum(units for _, units in buckets)
    return tuple(number for bucket in buckets for number in bucket)


@pytest.fixture
def twins(url: str, client: redis.Redis, name: str) -> Iterator[Any]:
    made: list[Twins] = []

    def make(rule: Rule) -> Twins:
        made.append(Twins(url, client, name, rule))
        return made[-1]

    yield make
    for twins in made:
        twins.store.close()


RULES = {
    "log": sliding_log("4000/minute"),
    "window": sliding_window("6000/minute", buckets=5_000),
    "lenient": sliding_window("6000/minute", buckets=5_000, strict=False),
}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_long_windows_are_replayed_to_the_last_bucket(twins: Any, kind: str, seed: int) -> None:
    """Holds given back first, last and in between, pauses, and a clock that goes back."""
    both = twins(RULES[kind])
    choose = random.Random(seed)
    both.fill(2_000, 15_000)
    holds: list[tuple[Any, Any]] = []
    for number in range(2_500):
        match choose.choice(STEPS):
            case "hit":
                both.both("hit", "alice", choose.choice([1, 1, 1, 2, 900]))
            case "hold":
                ours, pure = both.both("hold", "alice", choose.choice([1, 2]))
                if ours:
                    holds.append((ours, pure))
            case "settle" | "confirm" as how if holds:
                ours, pure = holds.pop(choose.choice([-1, 0, choose.randrange(len(holds))]))
                cost = choose.choice([0, 0, 1] if how == "settle" else [0, 1, 1, 3, 900])
                assert getattr(ours, how)(cost) == getattr(pure, how)(cost)
                if ours.final is None:
                    holds.append((ours, pure))
            case "release all" if choose.random() < 0.3:
                while holds:
                    ours, pure = holds.pop()
                    assert ours.release() == pure.release()
            case "back":
                both.clock.advance_us(-choose.choice([1, 20_000, 1_000_000, 40_000_000]))
            case "pause":
                both.clock.advance_us(choose.choice([1_000_000, 10_000_000, 30_000_000, 61_000_000]))
        both.clock.advance_us(choose.choice([0, 1, 9_000, 12_000, 15_000]))
        if number % 25 == 0:
            both.agree()
    both.agree()


STEPS = [
    *["hit"] * 30,
    *["hold"] * 70,
    *["settle"] * 40,
    *["confirm"] * 30,
    "release all",
    "back",
    "back",
    "pause",
]
"""What is done, as often as it is to be done."""


def test_a_window_grows_long_and_short_again(twins: Any) -> None:
    both = twins(RULES["log"])
    both.fill(254, 10_000)
    assert len(both.value()) == 16 + 254 * 16
    both.fill(1, 10_000)
    assert len(both.value()) == 56 + 255 * 16
    both.clock.advance(58)
    both.both("hit", "alice")
    both.agree()
    assert len(both.value()) < LONG


def test_what_was_only_skipped_counts_again_when_time_goes_back(twins: Any) -> None:
    """What a write has dropped does not."""
    both = twins(RULES["log"])
    both.fill(1_000, 10_000)
    both.clock.advance(55)
    before = both.value()
    both.agree()
    both.clock.advance(-5)
    both.agree()
    assert both.value() == before
    both.clock.advance(5)
    both.both("hit", "alice")
    both.clock.advance(-5)
    both.agree()


def test_what_is_given_back_in_the_middle_leaves_nothing_behind(twins: Any) -> None:
    both = twins(RULES["log"])
    holds = []
    for _ in range(1_200):
        both.clock.advance_us(1_000)
        holds.append(both.both("hold", "alice", 2))
    both.both("hit", "alice")
    random.Random(0).shuffle(holds)
    for number, (ours, pure) in enumerate(holds):
        assert ours.release() == pure.release()
        if number % 100 == 0:
            both.agree()
    both.agree()
    assert len(both.value()) == 32
    assert both.both("hit", "alice")
    both.agree()


def test_the_last_ones_given_back_leave_nothing_behind(twins: Any) -> None:
    both = twins(RULES["log"])
    both.both("hit", "alice")
    holds = []
    for _ in range(1_200):
        both.clock.advance_us(1_000)
        holds.append(both.both("hold", "alice", 1))
    for ours, pure in reversed(holds):
        assert ours.release() == pure.release()
    both.agree()
    assert len(both.value()) < LONG


def test_a_window_of_an_earlier_version_goes_on_to_count(twins: Any) -> None:
    """It was a row of buckets after birth and units, however long; the next write changes its head."""
    both = twins(RULES["log"])
    holds = [both.both("hold", "alice", 2)]
    for _ in range(1_999):
        both.clock.advance_us(15_000)
        holds.append(both.both("hold", "alice", 1))
    value = both.value()
    birth, count = struct.unpack_from("<dd", value)
    earlier = struct.pack("<dd", -birth, count) + value[56:]

    def put_back() -> None:
        both.client.set(both.key(), earlier, keepttl=True)

    put_back()
    both.agree()
    assert both.value() == earlier
    ours, pure = holds[1_000]
    assert ours.release() == pure.release()
    both.agree()
    assert len(both.value()) == 56 + 1_999 * 16
    both.reference.states.update(
        {
            place: ((state[0], *buckets_of(earlier)), at)
            for place, (state, at) in both.reference.states.items()
        }
    )
    put_back()
    both.clock.advance(31)
    both.both("hit", "alice")
    both.agree()
    assert len(both.value()) > LONG


def test_an_earlier_version_takes_a_long_window_for_something_in_the_way(twins: Any) -> None:
    """It checks that what it finds is as long as some number of buckets, rather than count what it does not know."""
    both = twins(RULES["log"])
    both.fill(300, 1)
    assert len(both.value()) % 16 == 8


def test_a_long_window_is_charged_together_with_other_rules(url: str, name: str) -> None:
    clock = FakeClock()
    rules = (sliding_log("700/minute"), fixed_window("20/s"), sliding_window("600/minute", buckets=600))
    with RedisStore(url) as store:
        ours, pure = (
            Limiter(*rules, name=name, store=each, clock=clock, on_store_error="raise")
            for each in (store, ReferenceStore())
        )
        outcomes = set()
        for number in range(1_500):
            clock.advance_us(37_000)
            one, other = ours.hold("alice"), pure.hold("alice")
            assert one.decision == other.decision
            assert one.decision.results == other.decision.results
            outcomes.add(one.decision.denied_by)
            if number % 7 == 0:
                assert one.release() == other.release()
            elif number % 3 == 0:
                ours.record("alice", 2)
                pure.record("alice", 2)
        assert len(outcomes) > 2


async def test_tasks_that_share_a_call_count_in_one_long_log(url: str, name: str) -> None:
    async with AsyncLimiter(
        sliding_log("500/minute"), name=name, store=url, deadline=30, on_store_error="raise"
    ) as limiter:
        decisions = await asyncio.gather(*(limiter.hit("alice") for _ in range(600)))
        assert sum(map(bool, decisions)) == 500
        assert {decision.remaining for decision in decisions} == set(range(500))


@pytest.mark.parametrize("text", [b"-" * 5_000, b"\xc0" * 5_000, b"\x00" * 5_000])
def test_a_long_text_in_the_way_is_a_conflict(twins: Any, text: bytes) -> None:
    both = twins(RULES["log"])
    both.both("hit", "alice")
    both.client.set(both.key(), text)
    for operation in ("hit", "check", "record", "hold"):
        with pytest.raises(StoreConflict, match="under a key of ours"):
            getattr(both.limiters[0], operation)("alice")
    assert both.value() == text


def test_a_long_window_is_kept_until_it_is_fresh(url: str, client: redis.Redis, name: str) -> None:
    with RedisStore(url) as store:
        limiter = Limiter(sliding_log("4000/minute"), name=name, store=store)
        for _ in range(300):
            limiter.hit("alice")
        hold = limiter.hold("alice")
        keys: Any = client.keys(f"*{name}*")
        for _ in range(2):
            milliseconds: Any = client.pttl(keys[0])
            assert 30_000 < milliseconds <= 60_001
            client.persist(keys[0])
            hold.release()


def test_a_confirmation_changes_a_long_log_in_place(server: RedisServer, name: str) -> None:
    """Wherever the hold is in it; and a refused one writes nothing."""
    clock = FakeClock()
    with (
        redis.Redis.from_url(server.url) as client,
        Limiter(sliding_log("2000/minute"), name=name, store=server.url, clock=clock) as limiter,
    ):
        early = limiter.hold("alice")
        clock.advance_us(1)
        for _ in range(1_000):
            limiter.hit("alice")
            clock.advance_us(1_000)
        late = limiter.hold("alice")
        limiter.hit("alice", 998)
        clock.advance_us(1)
        client.config_resetstat()
        assert not early.confirm(2)
        stats: Any = client.info("commandstats")
        assert not {"cmdstat_set", "cmdstat_setrange", "cmdstat_get"} & stats.keys()
        assert early.confirm(1)
        assert late.confirm(1)
        stats = client.info("commandstats")
        assert not {"cmdstat_set", "cmdstat_get"} & stats.keys()
        assert stats["cmdstat_setrange"]["calls"] == 6
        assert limiter.check("alice", 0).remaining == 0


def test_a_hit_rewrites_a_long_log_only_now_and_then(server: RedisServer, name: str) -> None:
    """And looking, or being refused, writes nothing."""
    clock = FakeClock()
    with (
        redis.Redis.from_url(server.url) as client,
        Limiter(sliding_log("2000/minute"), name=name, store=server.url, clock=clock) as limiter,
    ):
        for _ in range(2_000):
            limiter.hit("alice")
            clock.advance_us(30_000)
        client.config_resetstat()
        for _ in range(3_000):
            assert limiter.hit("alice")
            assert not limiter.hit("alice")
            assert not limiter.check("alice")
            clock.advance_us(30_000)
        stats: Any = client.info("commandstats")
        assert stats["cmdstat_setrange"]["calls"] == 2 * 3_000
        assert stats["cmdstat_set"]["calls"] <= 6
        assert "cmdstat_get" not in stats
