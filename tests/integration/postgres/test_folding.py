"""Windows and logs with many buckets, whose older ones lie in chunks, count exactly like the reference."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from headgate import AsyncLimiter, Decision, Hold, Limiter, sliding_log, sliding_window
from headgate.keys import storage_key, storage_prefix
from headgate.rules import Rule
from headgate.stores.postgres import PostgresStore
from headgate.testing.reference import ReferenceStore
from tests.searching import SEEDS

PATIENT = 60.0
START = 1_000_000_000_000  # in microseconds, where seconds as floats are still exact enough
PERIOD = 3_000_000
SMALL = 96
"""The most buckets of a state that is not folded."""
CHUNK = 32


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore(url, deadline=PATIENT) as store:
        yield store


class Kept:
    """What is in the tables for one key."""

    def __init__(self, connection: psycopg.Connection, limiter: str, rule: Rule, key: str = "a") -> None:
        self._connection = connection
        self.key = storage_key(storage_prefix("headgate", limiter, rule), key)

    def row(self) -> list[int] | None:
        query = "SELECT state FROM headgate_states WHERE key = %b"
        found = self._connection.execute(query, (self.key,)).fetchone()
        return None if found is None else found[0]

    def chunks(self) -> list[tuple[int, list[int]]]:
        query = "SELECT newest, chunk FROM headgate_chunks WHERE key = %b ORDER BY newest"
        return self._connection.execute(query, (self.key,)).fetchall()

    def buckets(self) -> list[int]:
        """Return index and units of all buckets, after checking that what is kept fits together."""
        state, chunks = self.row(), self.chunks()
        if state is None or state[0] >= 0:
            assert not chunks
            buckets = [] if state is None else state[2:]
        else:
            birth, _, oldest, dropped, first, *youngest = state
            assert 0 < len(youngest) <= 2 * (8 + CHUNK)
            assert chunks
            assert chunks[0][0] == first
            buckets = []
            for place, (newest, chunk) in enumerate(chunks):
                assert chunk[0] == -1 - birth
                assert chunk[1] == sum(chunk[3::2])
                assert len(chunk) <= 2 + 2 * CHUNK
                assert max(chunk[2::2]) <= newest
                live = [n for pair in pairs(chunk[2:]) if pair[0] >= oldest for n in pair]
                assert chunk[1] - sum(live[1::2]) == (dropped if place == 0 else 0)
                assert live
                buckets += live
            buckets += youngest
        assert buckets[::2] == sorted(set(buckets[::2]))
        assert all(units > 0 for units in buckets[1::2])
        assert state is None or state[1] == sum(buckets[1::2])
        return buckets


def pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def figures(decision: Decision) -> tuple[object, ...]:
    return decision.allowed, decision.remaining, decision.retry_after_us, decision.reset_after_us


class Both:
    """One limiter on the database and one on the reference, which must agree."""

    def __init__(self, store: PostgresStore, connection: psycopg.Connection, name: str, rule: Rule) -> None:
        self._reference = ReferenceStore()
        self._limiters = [
            Limiter(rule, name=name, store=store, on_store_error="raise"),
            Limiter(rule, name=name, store=self._reference),
        ]
        self.kept = Kept(connection, name, rule)

    def hit(self, now: int, cost: int = 1, tier: str | None = None) -> bool:
        ours, theirs = (limiter.hit("a", cost, tier=tier, now=now / 1e6) for limiter in self._limiters)
        assert figures(ours) == figures(theirs)
        return ours.allowed

    def check(self, now: int, cost: int = 1, tier: str | None = None) -> Decision:
        ours, theirs = (limiter.check("a", cost, tier=tier, now=now / 1e6) for limiter in self._limiters)
        assert figures(ours) == figures(theirs)
        return ours

    def hold(self, now: int, cost: int = 1) -> list[Hold]:
        holds = [limiter.hold("a", cost, now=now / 1e6) for limiter in self._limiters]
        assert len({bool(hold) for hold in holds}) == 1
        return holds if holds[0] else []

    def confirm(self, holds: list[Hold], now: int, cost: int | None) -> bool:
        ours, theirs = (hold.confirm(cost, now=now / 1e6) for hold in holds)
        assert figures(ours) == figures(theirs)
        return ours.allowed

    def record(self, now: int, cost: int) -> None:
        for limiter in self._limiters:
            limiter.record("a", cost, now=now / 1e6)

    def reset(self) -> None:
        for limiter in self._limiters:
            limiter.reset("a")

    def compare(self) -> int:
        """Compare what is kept, and return how many buckets that are."""
        states = [list(state[1:]) for state, _ in self._reference.states.values()]
        buckets = self.kept.buckets()
        assert [buckets] == (states or [[]])
        return len(buckets) // 2


RULES = [
    pytest.param(sliding_log("4000/3s", tiers={"small": "1400/3s"}), id="log"),
    pytest.param(sliding_window("4000/3s", buckets=2000, tiers={"small": "1400/3s"}), id="strict window"),
    pytest.param(
        sliding_window("4000/3s", buckets=700, strict=False, tiers={"small": "1400/3s"}), id="lenient"
    ),
]


class Replay:
    """Random calls on a large window, while time goes on, jumps and goes back."""

    def __init__(self, both: Both, limit: int, seed: int) -> None:
        self._both = both
        self._limit = limit
        self._chance = random.Random(seed)
        self._now = START
        self._holds: list[list[Hold]] = []

    def fill(self) -> None:
        for _ in range(2000):
            self._now += 1400
            self._both.hit(self._now)

    def step(self) -> None:
        weights = {
            self._hit: 80,
            self._hold: 12,
            self._settle: 12,
            self._confirm: 8,
            self._look: 6,
            self._ask_too_much: 3,
            self._record: 0.5,
            self._go_back: 0.5,
            self._idle: 0.1,
            self._both.reset: 0.01,
        }
        self._chance.choices(list(weights), list(weights.values()))[0]()

    def _hit(self) -> None:
        self._now += self._chance.choice([0, 1, 300, 500, 700, 1000])
        self._both.hit(self._now, self._chance.choice([1, 1, 1, 1, 3]), self._chance.choice([None, "small"]))

    def _hold(self) -> None:
        self._now += self._chance.choice([0, 300, 1500])
        if holds := self._both.hold(self._now, self._chance.randint(1, 3)):
            self._holds.append(holds)

    def _settle(self) -> None:
        """Settle the youngest hold, one in the middle, or an old one, which may have expired."""
        if self._holds:
            count = len(self._holds)
            place = self._chance.choice([-1, count // 2, 0, self._chance.randrange(count)])
            used = self._chance.choice([0, 0, 1, 2])
            for hold in self._holds.pop(place):
                hold.settle(used, now=self._now / 1e6)

    def _confirm(self) -> None:
        """Confirm a hold, often when there is no room for it, so that it stays as it was."""
        if self._holds:
            place = self._chance.choice([-1, len(self._holds) // 2, 0])
            cost = self._chance.choice([None, None, 0, 1, 5])
            if self._chance.random() < 0.2:
                cost = min(self._limit, (self._both.check(self._now, 0).remaining or 0) + 4)
            if self._both.confirm(self._holds[place], self._now, cost):
                del self._holds[place]

    def _look(self) -> None:
        ahead = self._chance.choice([0, 1000, PERIOD // 2, PERIOD, 2 * PERIOD])
        self._both.check(self._now + ahead, self._chance.randint(0, 300))
        behind = self._chance.choice([0, 1000, PERIOD // 2])
        self._both.check(self._now - behind, 1, self._chance.choice([None, "small"]))

    def _ask_too_much(self) -> None:
        cost = (self._both.check(self._now, 0).remaining or 0) + self._chance.choice([1, 50, 1000])
        if cost <= self._limit:
            assert not self._both.hit(self._now, cost)

    def _record(self) -> None:
        self._both.record(self._now, self._chance.randint(1, 20))

    def _go_back(self) -> None:
        for _ in range(self._chance.randint(1, 20)):
            behind = self._chance.choice([1, 5000, PERIOD // 3, PERIOD])
            self._both.hit(self._now - behind, self._chance.choice([0, 1]))
        self._now -= self._chance.choice([0, 1000, PERIOD // 100])

    def _idle(self) -> None:
        self._now += PERIOD // self._chance.choice([20, 10, 3, 2, 1])


@pytest.mark.deep
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_replay_agrees_with_the_reference(
    store: PostgresStore, connection: psycopg.Connection, name: str, rule: Rule, seed: int
) -> None:
    both = Both(store, connection, name, rule)
    replay = Replay(both, rule.quota.limit, seed)
    replay.fill()
    assert both.compare() > 5 * CHUNK
    for _ in range(30):
        for _ in range(100):
            replay.step()
        both.compare()


def test_a_large_log_is_emptied_by_refunds_from_either_end_and_from_the_middle(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    both = Both(store, connection, name, sliding_log("1000/hour"))
    for seed in range(3):
        chance = random.Random(seed)
        holds = [both.hold(START + number, 2) for number in range(400)]
        if seed == 1:
            holds.reverse()
        if seed == 2:
            chance.shuffle(holds)
        for count, pair in enumerate(holds):
            used = chance.choice([0, 0, 1]) if seed < 2 else 0
            for hold in pair:
                hold.settle(used, now=START / 1e6)
            if count % 25 == 24:
                both.compare()
            both.check(START + 400, 900)
        both.compare()
        both.reset()


def test_the_holds_of_a_large_log_are_confirmed_from_either_end_and_from_the_middle(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    both = Both(store, connection, name, sliding_log("500/3s"))
    holds = [both.hold(START + number * 1000) for number in range(300)]
    end = START + 300_000
    for count, place in enumerate((0, -1, 150, 0, -1, CHUNK - 1, CHUNK, 100)):
        hold = holds.pop(place)
        assert not both.confirm(hold, end, 500 - 298 + count)
        both.compare()
        assert both.confirm(hold, end + count, 2 if count % 2 else None)
        assert both.compare() > 2 * CHUNK
    for hold in holds:
        assert both.confirm(hold, end + 10, 0)
    assert both.compare() == 8
    late = START + PERIOD + 100_000
    assert both.confirm(both.hold(late), late - PERIOD, 3)  # by a clock that has gone back
    both.compare()


def test_a_confirmation_that_another_rule_refuses_leaves_the_chunks_alone(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    wide, narrow = sliding_log("500/3s"), sliding_log("5/3s", name="narrow", scope="*")
    alone = Limiter(wide, name=name, store=store, on_store_error="raise")
    limiter = Limiter(wide, narrow, name=name, store=store, on_store_error="raise")
    hold = limiter.hold("a", 2, now=START / 1e6)
    for number in range(1, 201):
        assert alone.hit("a", now=(START + number) / 1e6)
    assert limiter.hold("b", 3, now=(START + 200) / 1e6)
    kept = Kept(connection, name, wide)
    before = kept.row(), kept.chunks()
    assert len(before[1]) > 1
    assert hold.confirm(3, now=(START + 201) / 1e6).denied_by == "narrow"
    assert (kept.row(), kept.chunks()) == before
    assert hold.confirm(1, now=(START + 201) / 1e6)
    assert sum(kept.buckets()[1::2]) == 201


def test_a_small_log_becomes_large_and_small_again(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    both = Both(store, connection, name, sliding_log("5000/3s"))
    now = START
    for _ in range(2):
        for _ in range(SMALL):
            now += 1000
            assert both.hit(now)
        assert both.kept.chunks() == []
        now += 1000
        assert both.hit(now)
        assert len(both.kept.chunks()) == (SMALL + 1 - 8) // CHUNK
        for _ in range(900):
            now += 1000
            assert both.hit(now)
        assert both.compare() == SMALL + 901
        now += PERIOD - 20_000
        assert both.hit(now)
        assert both.compare() == 21
        assert both.kept.chunks() == []
        now += 2 * PERIOD
        assert both.hit(now)
        assert both.compare() == 1
        both.reset()


def test_what_was_dropped_stays_dropped_and_what_was_skipped_counts_again(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    both = Both(store, connection, name, sliding_log("500/3s"))
    for number in range(500):
        assert both.hit(START + number * 1000)
    end = START + 499_000
    both.check(START + PERIOD + 300_000)  # looks past 300 of them
    both.check(end)
    assert not both.hit(end)
    assert both.hit(START + PERIOD + 300_000)  # drops them
    assert both.compare() == 500 - 301 + 1
    both.check(end)
    assert both.hit(end)
    both.compare()


def test_what_a_released_hold_has_dropped_stays_dropped(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    """Its release takes the newest entry away, so that the time goes back to the one before."""
    both = Both(store, connection, name, sliding_log("500/3s"))
    holds = [both.hold(START + number * 1000) for number in range(500)]
    end = START + 499_000
    last = both.hold(START + PERIOD + 15_000)  # drops half of a chunk
    for hold in last:
        hold.release(now=end / 1e6)
    assert both.compare() == 500 - 16
    for cost in (1, 16, 17, 200):
        both.check(end, cost)
    for number in (0, 15, 16, 31, 5):  # the first two have been dropped, and so has the last
        for hold in holds[number]:
            hold.release(now=end / 1e6)
        both.check(end, 100)
    assert both.compare() == 500 - 16 - 2
    for number in range(17, 31):  # nothing of the first chunk is left but what has been dropped
        for hold in holds[number]:
            hold.release(now=end / 1e6)
    assert both.compare() == 500 - CHUNK
    assert both.hit(end + 1000, 20)
    both.compare()
    assert both.hit(START + PERIOD + 100_000)
    both.compare()


def test_a_refusal_or_a_look_writes_nothing(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    both = Both(store, connection, name, sliding_log("300/3s"))
    for number in range(300):
        assert both.hit(START + number * 1000)
    rows = "SELECT xmin, xmax, ctid FROM {} WHERE key = %b"

    def versions() -> list[object]:
        return [
            connection.execute(rows.format(table).encode(), (both.kept.key,)).fetchall()
            for table in ("headgate_states", "headgate_chunks")
        ]

    before = versions()
    for cost in (1, CHUNK, CHUNK + 1, 150, 300):
        assert not both.hit(START + 299_000, cost)
        both.check(START + 299_000, cost)
        both.check(START + PERIOD + 150_000, cost)
        both.check(START + PERIOD + 299_000, cost)
    assert versions() == before


def test_a_state_of_an_earlier_version_is_folded_when_it_is_written(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    rule, count = sliding_log("6000/3s"), 5000
    kept = Kept(connection, name, rule)
    buckets = [number for place in range(count) for number in (START + place, 1)]
    connection.execute(
        "INSERT INTO headgate_states VALUES (%b, %s, %s)", (kept.key, [7, count, *buckets], 2**60)
    )
    limiter = Limiter(rule, name=name, store=store, on_store_error="raise")
    now = (START + count) / 1e6
    assert limiter.check("a", 0, now=now).remaining == 1000
    assert kept.chunks() == []
    assert limiter.hit("a", now=now).remaining == 999
    assert kept.buckets() == [*buckets, START + count, 1]
    assert len(kept.chunks()) == (count - 8) // CHUNK


def test_what_a_state_that_was_removed_by_hand_left_behind_does_not_count(
    store: PostgresStore, connection: psycopg.Connection, name: str
) -> None:
    rule = sliding_log("6000/3s")
    limiter, kept = (
        Limiter(rule, name=name, store=store, on_store_error="raise"),
        Kept(connection, name, rule),
    )
    for _ in range(2):
        for number in range(150):
            limiter.hit("a", now=(START + number) / 1e6)
        assert len(kept.buckets()) == 2 * 150
        connection.execute("DELETE FROM headgate_states WHERE key = %b", (kept.key,))
        assert kept.chunks()


def test_a_reset_leaves_no_chunks(store: PostgresStore, connection: psycopg.Connection, name: str) -> None:
    rule = sliding_log("500/3s")
    limiter, kept = (
        Limiter(rule, name=name, store=store, on_store_error="raise"),
        Kept(connection, name, rule),
    )
    for number in range(300):
        limiter.hit("a", now=(START + number) / 1e6)
        limiter.hit("b", now=(START + number) / 1e6)
    limiter.reset("a")
    assert (kept.row(), kept.chunks()) == (None, [])
    assert len(Kept(connection, name, rule, "b").buckets()) == 600
    assert limiter.check("a", now=START / 1e6).remaining == 499


def test_cleaning_leaves_no_chunks_and_takes_none_of_a_key_that_is_locked(empty_url: str, name: str) -> None:
    rule = sliding_log("500/3s")
    with (
        PostgresStore(empty_url, deadline=PATIENT) as store,
        psycopg.connect(empty_url, autocommit=True) as connection,
        psycopg.connect(empty_url) as holder,
    ):
        store.migrate()
        limiter = Limiter(rule, name=name, store=store, on_store_error="raise")
        for number in range(200):
            for key in "abc":
                limiter.hit(key, now=(START + number) / 1e6)
        a, b, c = (Kept(connection, name, rule, key) for key in "abc")
        connection.execute("UPDATE headgate_states SET expires = 0 WHERE key <> %b", (c.key,))
        holder.execute("SELECT pg_advisory_xact_lock(headgate_lock_number_v1(%b))", (b.key,))
        connection.execute("SELECT headgate_clean_v1('', 10)")
        assert (a.row(), a.chunks()) == (None, [])
        assert len(b.buckets()) == len(c.buckets()) == 400
        holder.commit()
        connection.execute("SELECT headgate_clean_v1('', 10)")
        assert (b.row(), b.chunks()) == (None, [])
        assert len(c.buckets()) == 400


def test_threads_that_race_for_a_large_log_get_exactly_its_limit(
    url: str, connection: psycopg.Connection, name: str
) -> None:
    """While others look at it, give units back and clean."""
    limit, rule = 1000, sliding_log("1000/day")

    def work(seed: int) -> int:
        chance, kept = random.Random(seed), 0
        with (
            PostgresStore(url, deadline=PATIENT) as store,
            psycopg.connect(url, autocommit=True) as cleaner,
        ):
            limiter = Limiter(rule, name=name, store=store, on_store_error="raise")
            for number in range(500):
                if number % 100 == 0:
                    cleaner.execute("SELECT headgate_clean_v1('', 1000)")
                if not (hold := limiter.hold("a")):
                    assert limiter.check("a", 0).remaining is not None
                elif chance.random() < 0.2:
                    hold.release()
                else:
                    kept += 1
        return kept

    with ThreadPoolExecutor(4) as pool:
        held = sum(pool.map(work, range(4)))
    kept = Kept(connection, name, rule)
    assert sum(kept.buckets()[1::2]) == held
    with PostgresStore(url, deadline=PATIENT) as store:
        limiter = Limiter(rule, name=name, store=store, on_store_error="raise")
        admitted = sum(bool(limiter.hit("a")) for _ in range(limit - held + 5))
    assert held + admitted == limit
    assert sum(kept.buckets()[1::2]) == limit


async def test_requests_of_one_batch_see_each_others_chunks(
    url: str, connection: psycopg.Connection, name: str
) -> None:
    rules = (sliding_log("700/3s"), sliding_log("900/3s", name="wide", scope="*"))
    async with PostgresStore(url, deadline=PATIENT) as store:
        limiter = AsyncLimiter(*rules, name=name, store=store, on_store_error="raise")
        for start in range(0, 900, 300):
            times = [(START + number * 100) / 1e6 for number in range(start, start + 300)]
            decisions = await asyncio.gather(*(limiter.hit("a", now=now) for now in times))
            looks = await asyncio.gather(*(limiter.check("a", now=times[-1]) for _ in range(20)))
            assert sum(map(bool, decisions)) == min(300, 700 - start) if start < 700 else not any(decisions)
            assert len({look.remaining for look in looks}) == 1
        assert len(Kept(connection, name, rules[0]).buckets()) == 1400
        holds = [await limiter.hold("b", now=(START + 90_000 + number) / 1e6) for number in range(150)]
        await asyncio.gather(*(hold.release(now=START / 1e6) for hold in holds))
        assert (await limiter.check("b", 0, now=START / 1e6)).results[0].remaining == 700


async def test_calls_that_leave_together_put_away_the_older_entries_in_time(
    url: str, connection: psycopg.Connection, name: str
) -> None:
    rule = sliding_log("700/3s")
    kept = Kept(connection, name, rule)
    async with PostgresStore(url, deadline=PATIENT) as store:
        limiter = AsyncLimiter(rule, name=name, store=store, on_store_error="raise")
        for start in range(0, 400, 20):
            times = [(START + number) / 1e6 for number in range(start, start + 20)]
            await asyncio.gather(*(limiter.hit("a", now=now) for now in times))
            assert len(kept.buckets()) == 2 * (start + 20)


async def test_a_look_without_a_lock_sees_one_moment(
    url: str, connection: psycopg.Connection, name: str
) -> None:
    """While others hit a full log, so that chunks come and go, it never has more than its limit nor less than all."""
    limit, step = 300, 1000
    rule = sliding_log(f"{limit}/{limit * step // 1000}ms")
    async with PostgresStore(url, deadline=PATIENT) as store, PostgresStore(url, deadline=PATIENT) as other:
        limiter = AsyncLimiter(rule, name=name, store=store, on_store_error="raise")
        looker = AsyncLimiter(rule, name=name, store=other, on_store_error="raise")
        now = START
        for _ in range(limit):
            now += step
            assert await limiter.hit("a", now=now / 1e6)

        async def hits() -> None:
            at = now
            for _ in range(1500):
                at += step
                assert await limiter.hit("a", now=at / 1e6)

        hitting = asyncio.create_task(hits())
        looks = 0
        while not hitting.done():
            look = await looker.check("a", 0, now=now / 1e6)  # the newest entry is the time that counts
            assert look.remaining == 0
            looks += 1
        await hitting
        assert looks > 100
    # The moment between two statements is short, so the test would seldom notice: only a stable function reads one state.
    kind = connection.execute(
        "SELECT provolatile FROM pg_proc WHERE proname = 'headgate_unfold_v1'"
    ).fetchone()
    assert kind == ("s",)
