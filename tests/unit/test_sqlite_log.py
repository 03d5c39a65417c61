"""Large logs in SQLite: answers of the pure functions, at a cost that does not grow, and no chunk left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from headgate import Decision, Hold, Limiter, Rule, SQLiteStore, StoreConflict, sliding_log, sliding_window
from headgate.algorithms import State
from headgate.stores import sqlite, sqlite_log
from headgate.stores.request import Request
from headgate.testing import FakeClock
from headgate.testing.reference import ReferenceStore

SECOND = 1_000_000
START = 1_700_000_000 * SECOND


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START / SECOND)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "limits.db"


@pytest.fixture
def store(path: Path, clock: FakeClock) -> Iterator[SQLiteStore]:
    with SQLiteStore(path, clock=clock) as opened:
        yield opened


def query(store: SQLiteStore, sql: str) -> list[tuple[object, ...]]:
    return store.transact(lambda connection: connection.execute(sql).fetchall(), write=False)


def dump(store: SQLiteStore) -> object:
    return query(store, "SELECT * FROM headgate_states"), query(store, "SELECT * FROM headgate_chunks")


def chunks(store: SQLiteStore) -> int:
    ((number,),) = query(store, "SELECT count(*) FROM headgate_chunks")
    assert isinstance(number, int)
    return number


def kept(store: SQLiteStore) -> list[State]:
    """Return the entries of every state in the file; and check that headers and chunks agree."""
    rows = query(store, "SELECT id, state FROM headgate_states ORDER BY id")
    return [entries_of(store, row, packed) for row, packed in rows]  # type: ignore[arg-type]  # two blobs


def entries_of(store: SQLiteStore, row: bytes, packed: bytes) -> State:
    found = store.transact(
        lambda connection: connection.execute(
            "SELECT units, entries FROM headgate_chunks WHERE id = ? ORDER BY start", (row,)
        ).fetchall(),
        write=False,
    )
    if len(packed) % 8 == 0:
        assert not found
        return sqlite_log.unpack(packed)[1:]
    _, floor, number, units, *tail = sqlite_log.unpack(packed[1:])
    parts = [sqlite_log.unpack(entries) for _, entries in found]
    assert [sum(part[1::2]) for part in parts] == [units for units, _ in found]
    assert (number, units) == (len(parts), sum(units for units, _ in found))
    assert number
    numbers = [*(n for part in parts for n in part), *tail]
    assert numbers[::2] == sorted(set(numbers[::2]))
    return tuple(n for i, u in zip(numbers[::2], numbers[1::2], strict=True) if i > floor for n in (i, u))


def one_a_second(limiter: Limiter, clock: FakeClock, hits: int) -> None:
    for _ in range(hits):
        clock.advance(1)
        assert limiter.hit("ada")


# --- The answers of the pure functions --------------------------------------------------------------------------------


class Replay:
    """Random calls to the reference and to a file, which must agree in every answer and in every entry they keep."""

    def __init__(self, seed: int, limit: int, rules: tuple[Rule, ...], *, explicit: bool) -> None:
        self.random = random.Random(seed)
        self.limit = limit
        self.explicit = explicit
        self.clock = FakeClock(START / SECOND)
        self.now = self.latest = START
        self.reference = ReferenceStore(clock=self.clock)
        self.store = SQLiteStore(":memory:", clock=self.clock)
        self.limiters = [Limiter(*rules, name="x", store=store) for store in (self.reference, self.store)]
        self.holds: list[list[Hold]] = []

    def run(self, steps: int) -> int:
        """Return how many chunks there were at most."""
        most = 0
        for number in range(steps):
            self.move()
            self.act()
            if number % 50 == 0:
                entries = [state[1:] for state, _ in self.reference.states.values()]
                assert sorted(kept(self.store)) == sorted(entries), number
                most = max(most, chunks(self.store))
        self.store.close()  # Python 3.13 warns of connections that are left to the garbage collector
        return most

    def move(self) -> None:
        """Let time pass as a full log needs it, with pauses, and sometimes back."""
        usual = 60 * SECOND // self.limit
        rare = 1 / (self.limit + 100)
        way = self.random.random()
        if way < 2 * rare:
            passed = self.random.randrange(30 * SECOND)
        elif way < 2.2 * rare:
            passed = 200 * SECOND
        elif way < 0.9:
            passed = self.random.randrange(usual + 1)
        elif way < 0.98:
            passed = -self.random.randrange(5 * usual)
        else:
            passed = -self.random.randrange(60 * SECOND)
        self.now = self.latest + passed
        if not self.explicit:  # what was fresh once may have been forgotten
            over = [fresh for _, fresh in self.reference.states.values() if fresh <= self.latest]
            self.now = max(self.now, *over, 0)
        self.latest = max(self.latest, self.now)
        self.clock.set_us(self.now)

    def act(self) -> None:
        now = self.now / SECOND if self.explicit else None
        tier = self.random.choice([None, None, "pro", "none"])
        cost = self.random.choice([0, 1, 1, 1, 1, 2, self.random.randint(1, self.limit)])
        what = self.random.random()
        if what < 0.6:
            self.compare(lambda limiter: limiter.hit("ada", min(cost, 2), tier=tier, now=now))
        elif what < 0.75:
            held = [limiter.hold("ada", max(1, cost // 900), tier=tier, now=now) for limiter in self.limiters]
            assert held[0].decision == held[1].decision
            self.holds.append(held)
        elif what < 0.87:
            self.give_back(now)
        elif what < 0.97:
            self.compare(lambda limiter: limiter.check("ada", cost, tier=tier, now=now))
        elif what < 0.9997:
            for limiter in self.limiters:
                limiter.record("ada", min(cost, 3), tier=tier, now=now)
        else:
            for limiter in self.limiters:
                limiter.reset("ada")

    def give_back(self, now: float | None) -> None:
        if not self.holds:
            return
        held = self.holds.pop(self.random.choice([0, -1, self.random.randrange(len(self.holds))]))
        used = self.random.choice([0, 0, 1])
        for hold in held:
            hold.settle(min(used, hold.cost), now=now)

    def compare(self, call: Callable[[Limiter], Decision]) -> None:
        expected, answer = (call(limiter) for limiter in self.limiters)
        assert answer == expected
        assert answer.results == expected.results


def tiered(limit: int) -> dict[str, str]:
    return {"pro": f"{2 * limit}/minute", "none": "0/minute"}


def log(limit: int) -> Rule:
    return sliding_log(f"{limit}/minute", tiers=tiered(limit), name="log")


@pytest.mark.deep
@pytest.mark.parametrize("explicit", [True, False], ids=["given times", "own clock"])
def test_a_log_of_thousands_answers_like_the_pure_functions(explicit: bool) -> None:
    replay = Replay(int(explicit), 3000, (log(3000),), explicit=explicit)
    assert replay.run(9_000) > 30


@pytest.mark.deep
@pytest.mark.parametrize("strict", [True, False])
def test_a_window_of_many_buckets_answers_like_the_pure_functions(strict: bool) -> None:
    rule = sliding_window("2000/minute", tiers=tiered(2000), buckets=1000, strict=strict)
    assert Replay(5, 2000, (rule,), explicit=True).run(4_000) > 5


@pytest.mark.parametrize(("in_row", "per_chunk"), [(1, 1), (3, 1), (3, 2), (8, 3), (20, 30)])
@pytest.mark.parametrize("limit", [5, 40, 300])
def test_chunks_of_any_size_answer_like_the_pure_functions(
    in_row: int, per_chunk: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones come and go all the time, so that every border is met often."""
    monkeypatch.setattr(sqlite, "LONGEST_STATE", 1 + 2 * in_row)
    monkeypatch.setattr(sqlite_log, "PER_CHUNK", per_chunk)
    second = sliding_log(f"{limit * 3 // 2}/2minutes", name="second")
    for seed, rules in enumerate([(log(limit),), (log(limit), second)]):
        Replay(seed, limit, rules, explicit=bool(seed)).run(600)


# --- The cost of a call ------------------------------------------------------------------------------------------------


def steps_of(store: SQLiteStore, call: Callable[[], object]) -> int:
    """Return how many steps SQLite takes for a call."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    connection = store._connection
    assert connection is not None
    connection.set_progress_handler(count, 1)
    call()
    connection.set_progress_handler(None, 1)
    return steps


def held(limiter: Limiter) -> None:
    limiter.hold("ada").release()


def admitted(limiter: Limiter) -> None:
    assert limiter.hit("ada")


def refused(limiter: Limiter) -> None:
    assert not limiter.hit("ada")


def checked(limiter: Limiter) -> None:
    assert not limiter.check("ada")


@pytest.mark.deep
def test_no_call_costs_more_with_more_entries(tmp_path: Path, clock: FakeClock) -> None:
    """In steady state: with every step one entry expires and one comes."""
    costs: list[list[int]] = []
    for entries in (500, 8_000):
        with SQLiteStore(tmp_path / f"{entries}.db", clock=clock) as store:
            limiter = Limiter(sliding_log(f"{entries}/{entries}s"), name="x", store=store)
            one_a_second(limiter, clock, entries + 10)

            found = []
            for _ in range(100):  # so that chunks fill and expire
                clock.advance(1)
                found.append([steps_of(store, partial(call, limiter)) for call in (held, admitted)])
            looks = [steps_of(store, partial(call, limiter)) for call in (checked, refused)]
            costs.append([max(column) for column in zip(*found, strict=True)] + looks)
    few, many = costs
    assert all(b <= a * 1.1 for a, b in zip(few, many, strict=True)), costs


def test_checks_and_refusals_write_nothing(store: SQLiteStore, clock: FakeClock) -> None:
    limiter = Limiter(sliding_log("300/300s"), name="x", store=store)
    one_a_second(limiter, clock, 300)
    clock.advance(99.5)  # a hundred have expired, in three chunks
    before = dump(store)
    assert not limiter.hit("ada", 101)
    assert not limiter.hold("ada", 300)
    assert limiter.check("ada", 99)
    assert not limiter.check("ada", 150)
    assert limiter.hit("ada", 0)
    assert dump(store) == before


def test_what_was_only_skipped_counts_again_when_time_goes_back(store: SQLiteStore) -> None:
    limiter = Limiter(sliding_log("300/300s"), name="x", store=store)
    for second in range(300):
        limiter.hit("ada", now=second)
    assert limiter.check("ada", 0, now=400.5).remaining == 101
    assert limiter.check("ada", 0, now=299).remaining == 0
    limiter.hit("ada", now=400.5)
    assert limiter.check("ada", 0, now=299).remaining == 100, "a write has dropped them"


@pytest.fixture
def dropped(store: SQLiteStore) -> tuple[Limiter, list[Hold]]:
    """A limiter and its holds, one a second up to 299, of which those up to 100 are dropped: more than two chunks of 48."""
    limiter = Limiter(sliding_log("300/300s"), name="x", store=store)
    holds = [limiter.hold("ada", now=second) for second in range(300)]
    limiter.hold("ada", now=400).release()
    return limiter, holds


def test_what_was_dropped_stays_dropped_when_time_goes_back(dropped: tuple[Limiter, list[Hold]]) -> None:
    """The newest entry is that of second 299 again, and at that time the one of second 100 would still count."""
    limiter, _ = dropped
    assert limiter.check("ada", 0, now=299).remaining == 101
    assert limiter.hit("ada", 101, now=299)
    assert not limiter.hit("ada", now=299)


def test_what_was_dropped_cannot_be_given_back(
    store: SQLiteStore, dropped: tuple[Limiter, list[Hold]]
) -> None:
    limiter, holds = dropped
    before = dump(store)
    for hold in holds[:101]:
        hold.release(now=299)
    assert dump(store) == before
    holds[101].release(now=299)
    assert limiter.check("ada", 0, now=299).remaining == 102


def test_what_was_dropped_does_not_come_back_when_all_else_is_given_back(
    store: SQLiteStore, dropped: tuple[Limiter, list[Hold]]
) -> None:
    for hold in dropped[1][:100:-1]:
        hold.release(now=299)
    assert dump(store) == ([], [])


def test_a_log_of_which_only_a_part_of_the_tail_is_left(dropped: tuple[Limiter, list[Hold]]) -> None:
    limiter, _ = dropped
    assert limiter.check("ada", 0, now=595.5).remaining == 296
    assert limiter.hit("ada", 297, now=595.5).retry_after == 0.5
    assert limiter.hit("ada", 300, now=595.5).retry_after == 3.5


# --- Small, large, small -----------------------------------------------------------------------------------------------


def test_a_log_grows_into_chunks_and_back_into_one_row(store: SQLiteStore, clock: FakeClock) -> None:
    limiter = Limiter(sliding_log("1000/1000s"), name="x", store=store)
    one_a_second(limiter, clock, 128)
    assert chunks(store) == 0, "the usual sizes are as they were"
    one_a_second(limiter, clock, 872)
    assert chunks(store) == 20
    clock.advance(990)
    assert limiter.hit("ada").remaining == 989
    assert chunks(store) == 0
    assert len(kept(store)[0]) == 2 * 11
    one_a_second(limiter, clock, 300)
    assert chunks(store) > 0


def test_a_pause_longer_than_the_period_begins_anew(store: SQLiteStore, clock: FakeClock) -> None:
    limiter = Limiter(sliding_log("500/500s"), name="x", store=store)
    hold = limiter.hold("ada")
    one_a_second(limiter, clock, 400)
    clock.advance(500)
    assert limiter.check("ada", 0).remaining == 500
    assert chunks(store) > 0
    assert limiter.hit("ada").remaining == 499
    assert chunks(store) == 0
    hold.release()
    assert limiter.check("ada", 0).remaining == 499, "the hold was of the state before"


def test_a_reset_leaves_no_chunk(store: SQLiteStore, clock: FakeClock) -> None:
    limiter = Limiter(sliding_log("500/500s"), name="x", store=store)
    one_a_second(limiter, clock, 400)
    limiter.reset("ada")
    assert dump(store) == ([], [])
    assert limiter.hit("ada").remaining == 499


@pytest.mark.parametrize("newest_first", [True, False])
def test_a_log_that_is_given_back_whole_leaves_no_chunk(
    store: SQLiteStore, clock: FakeClock, newest_first: bool
) -> None:
    limiter = Limiter(sliding_log("500/500s"), name="x", store=store)
    holds = []
    for _ in range(400):
        clock.advance(1)
        holds.append(limiter.hold("ada"))
    assert chunks(store) == 8
    for hold in holds[:: -1 if newest_first else 1]:
        hold.release()
    assert dump(store) == ([], [])


def test_units_are_given_back_once_though_asked_twice(store: SQLiteStore) -> None:
    """Also if the chunk that they were in is gone."""
    gate = store.bind("x", (sliding_log("500/500s"),))
    held = [gate.ask(Request("hold", "ada", now=second * SECOND))[1] for second in range(300)]
    for receipts in [*held[:48], *held[:48], *held[100:110], *held[100:110], held[-2], held[-2]]:
        assert receipts is not None
        gate.refund(receipts, 1, 299 * SECOND)
    decision, _ = gate.ask(Request("peek", "ada", 0, now=299 * SECOND))
    assert decision.remaining == 500 - 300 + 48 + 10 + 1


def test_expiry_leaves_no_chunk(store: SQLiteStore, clock: FakeClock) -> None:
    limiter = Limiter(sliding_log("500/500s"), name="x", store=store)
    one_a_second(limiter, clock, 400)
    clock.advance(500)
    for number in range(200):
        limiter.hit(f"{number}")
    assert chunks(store) == 0


# --- Damaged files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"L", b"L" + b"\0" * 8, b"L" + b"\0" * 32, b"M" + b"\0" * 48])
def test_a_row_that_holds_no_large_log_is_a_conflict(store: SQLiteStore, garbage: bytes) -> None:
    limiter = Limiter(sliding_log("5/minute"), name="x", store=store)
    limiter.hit("ada")
    store.transact(lambda c: c.execute("UPDATE headgate_states SET state = ?", (garbage,)), write=True)
    with pytest.raises(StoreConflict, match="does not hold a state"):
        limiter.hit("ada")
    limiter.reset("ada")
    assert limiter.hit("ada")


def test_lost_chunks_are_a_conflict_where_they_are_missed(store: SQLiteStore, clock: FakeClock) -> None:
    limiter = Limiter(sliding_log("500/500s"), name="x", store=store)
    one_a_second(limiter, clock, 3 * 48)
    clock.advance(1)
    hold = limiter.hold("ada")  # the only one that is not in a chunk
    assert chunks(store) == 3
    store.transact(lambda c: c.execute("DELETE FROM headgate_chunks"), write=True)
    with pytest.raises(StoreConflict, match="headgate_chunks lacks entries"):
        hold.release()


@pytest.mark.parametrize("garbage", [b"garbage", "text", 5])
def test_a_chunk_that_holds_no_entries_is_a_conflict(
    store: SQLiteStore, clock: FakeClock, garbage: object
) -> None:
    limiter = Limiter(sliding_log("200/200s"), name="x", store=store)
    one_a_second(limiter, clock, 200)
    store.transact(lambda c: c.execute("UPDATE headgate_chunks SET entries = ?", (garbage,)), write=True)
    clock.advance(1)
    with pytest.raises(StoreConflict, match="headgate_chunks has no entries"):
        limiter.hit("ada")
    limiter.reset("ada")
    assert limiter.hit("ada")
