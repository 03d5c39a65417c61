"""Hooks of holds with a record: the units of open holds add up over all workers."""

from __future__ import annotations

import pytest

from headgate import AsyncLimiter, Decision, MemoryStore
from headgate.errors import StoreUnavailable
from headgate.hooks import Call, Hook
from headgate.testing import FakeClock
from headgate_server import holds
from headgate_server.hold_record import MARGIN
from headgate_server.holds import HoldBook, TooManyHolds


class HeldUnits(Hook):
    """Counts the units of open holds, as the metric does."""

    def __init__(self) -> None:
        self.held = 0
        self.ends: list[int | None] = []

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        if call.operation == "hold" and decision.allowed:
            self.held += call.cost

    def settled(self, call: Call, cost: int | None) -> None:
        self.held -= call.cost
        self.ends.append(cost)


class Worker:
    """A book with separate hooks."""

    def __init__(self, store: MemoryStore, clock: FakeClock, run: str = "") -> None:
        self.hook = HeldUnits()
        limiter = AsyncLimiter("1000000/hour", name="llm", store=store, hooks=[self.hook])
        self.live = {"llm": limiter}
        self.book = HoldBook(self.live, clock=clock, run=run)

    async def take(self, cost: int = 800) -> str:
        _, hold_id, _ = await self.book.take("llm", "alice", cost)
        assert hold_id is not None
        return hold_id


class FlakyStore(MemoryStore):
    is_down = False

    async def get_note(self, name: str) -> str | None:
        if self.is_down:
            raise StoreUnavailable("nobody answers")
        return await super().get_note(name)

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        if self.is_down:
            raise StoreUnavailable("nobody answers")
        return await super().note(name, text, seconds, replaces=replaces)


UNTIL_DUE = 3660 + MARGIN  # an hour, and a minute for the bucket that the units are in


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FlakyStore:
    return FlakyStore(clock=clock)


@pytest.fixture
def worker(store: FlakyStore, clock: FakeClock) -> Worker:
    return Worker(store, clock)


@pytest.fixture
def other(store: FlakyStore, clock: FakeClock) -> Worker:
    return Worker(store, clock)


async def test_units_are_held_until_they_are_settled(worker: Worker) -> None:
    hold_id = await worker.take()
    assert worker.hook.held == 800
    await worker.book.finish(hold_id, 300)
    await worker.book.finish(hold_id, 300)
    assert (worker.hook.held, worker.hook.ends) == (0, [300])


async def test_held_units_sum_to_0_when_another_worker_settles(
    worker: Worker, other: Worker, clock: FakeClock
) -> None:
    hold_id = await worker.take()
    await other.book.finish(hold_id, 300)
    assert worker.hook.held + other.hook.held == 0
    clock.advance(UNTIL_DUE)
    await worker.book.tidy()
    await other.book.tidy()
    assert worker.hook.held + other.hook.held == 0
    assert (worker.hook.ends, other.hook.ends) == ([], [300])


async def test_late_settle_calls_no_hooks(worker: Worker, other: Worker) -> None:
    hold_id = await worker.take()
    await other.book.finish(hold_id, 300)
    assert not (await worker.book.finish(hold_id, 0)).first
    assert worker.hook.held + other.hook.held == 0
    assert worker.book._watched.get(hold_id) is None


async def test_expired_hold_is_subtracted(worker: Worker, clock: FakeClock) -> None:
    await worker.take()
    clock.advance(UNTIL_DUE - 120)
    await worker.book.tidy()
    assert worker.hook.held == 800
    clock.advance(120)
    await worker.book.tidy()
    await worker.book.tidy()
    assert (worker.hook.held, worker.hook.ends) == (0, [None])


async def test_expired_hold_of_a_removed_limiter_is_subtracted(worker: Worker, clock: FakeClock) -> None:
    await worker.take()
    worker.live.clear()
    clock.advance(UNTIL_DUE)
    await worker.book.tidy()
    assert (worker.hook.held, worker.hook.ends) == (0, [None])


async def test_expired_holds_wait_while_the_store_is_down(
    worker: Worker, other: Worker, store: FlakyStore, clock: FakeClock
) -> None:
    settled = await worker.take(1)
    await worker.take(10)
    await other.book.finish(settled, 0)
    clock.advance(UNTIL_DUE)
    store.is_down = True
    await worker.book.tidy()
    assert worker.hook.held == 11
    store.is_down = False
    await worker.book.tidy()
    assert worker.hook.held + other.hook.held == 0
    assert worker.hook.ends == [None]
    assert worker.book._watched.due(clock.now_us()) == []


async def test_hold_without_a_record_is_subtracted(worker: Worker, store: FlakyStore) -> None:
    store.is_down = True
    with pytest.raises(StoreUnavailable):
        await worker.take()
    assert (worker.hook.held, worker.hook.ends) == (0, [0])


async def test_number_of_watched_holds_is_bounded(
    worker: Worker, other: Worker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More holds are counted neither as open nor, later, as settled."""
    monkeypatch.setattr(holds, "MAX_OPEN", 2)
    ids = [await worker.take(cost) for cost in (1, 10, 100, 1000)]
    assert worker.hook.held == 11
    assert worker.hook.ends == [None, None]
    for hold_id in ids:
        assert (await other.book.finish(hold_id, 0)).first
    clock.advance(UNTIL_DUE)
    await worker.book.tidy()
    assert worker.hook.held + other.hook.held == 0


async def test_holds_that_other_workers_settled_make_room(
    worker: Worker, other: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "MAX_PER_CALLER", 4)
    monkeypatch.setattr(holds, "CHECKED_AT_ONCE", 2)
    ids = [await worker.take(1) for _ in range(4)]
    await other.book.finish(ids[3], 0)
    with pytest.raises(TooManyHolds):
        await worker.take(1)
    for _ in range(2):  # all are looked at in turn, not the same ones again and again
        await worker.book.tidy()
    assert worker.hook.held + other.hook.held == 3
    await worker.take(1)
