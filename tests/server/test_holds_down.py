"""Holds while a store is down."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import AsyncLimiter, MemoryStore
from headgate.errors import StoreUnavailable
from headgate.outage import local
from headgate.rules import Rule
from headgate.stores.base import Answer, AsyncGate, Gate, Receipts
from headgate.stores.counters import ImmediateGate
from headgate.stores.redis import RedisStore
from headgate.stores.request import Request
from headgate.testing import FakeClock
from headgate.testing.servers import RedisServer, find_free_port
from headgate_server import holds
from headgate_server.hold_record import MARGIN, new_id
from headgate_server.holds import HoldBook, SettleResult, UnknownHold
from tests.server.hold_places import take
from tests.unit.outage.later import Later


def nowhere() -> RedisStore:
    """Return a store on a server that is not there."""
    return RedisStore(f"redis://127.0.0.1:{find_free_port()}/0", deadline=5)


# --- Holds that only this process knows -------------------------------------------------------------------------------


async def test_degraded_hold_is_settled_by_its_worker() -> None:
    async with nowhere() as store:
        limiter = AsyncLimiter("10/minute", name="llm", store=store, on_store_error=local(share=0.5))
        book = HoldBook({"llm": limiter})
        decision, hold_id, expires_after = await book.take("llm", "alice", 4)
        assert decision.degraded
        assert hold_id is not None
        assert expires_after is not None
        assert 60 <= expires_after <= 61
        assert (await limiter.check("alice", 0)).remaining == 1
        assert await book.finish(hold_id, 1) == SettleResult("llm", 4, 1, first=True, degraded=True)
        assert (await limiter.check("alice", 0)).remaining == 4
        assert await book.finish(hold_id, 0) == SettleResult("llm", 4, 1, first=False, degraded=True)
        assert (await limiter.check("alice", 0)).remaining == 4


async def test_degraded_hold_without_counts_has_an_id() -> None:
    async with nowhere() as store:
        book = HoldBook({"llm": AsyncLimiter("10/minute", name="llm", store=store, on_store_error="open")})
        decision, hold_id, expires_after = await book.take("llm", "alice", 4)
        assert (decision.allowed, decision.degraded, expires_after) == (True, True, 0)
        assert hold_id is not None
        assert await book.finish(hold_id, 9) == SettleResult("llm", 4, 9, first=True, degraded=True)
        assert await book.finish(hold_id, 4) == SettleResult("llm", 4, 9, first=False, degraded=True)


async def test_degraded_hold_is_unknown_to_other_workers() -> None:
    with RedisServer() as server:
        server.kill()
        async with RedisStore(server.url, deadline=5) as store, RedisStore(server.url, deadline=5) as other:
            books = [
                HoldBook({"llm": AsyncLimiter("10/minute", name="llm", store=store)})
                for store in (store, other)
            ]
            hold_id = await take(books[0], "alice", 4)
            with pytest.raises(StoreUnavailable):
                await books[1].finish(hold_id, 1)
            server.start()
            await until_available(books[1]._live["llm"])
            with pytest.raises(UnknownHold):
                await books[1].finish(hold_id, 1)
            assert (await books[0].finish(hold_id, 4)).first


async def test_degraded_hold_expires() -> None:
    clock = FakeClock()
    async with nowhere() as store:
        limiter = AsyncLimiter("10/minute", name="llm", store=store, on_store_error=local(share=0.5))
        book = HoldBook({"llm": limiter}, clock=clock)
        _, hold_id, expires_after = await book.take("llm", "alice", 4)
        assert hold_id is not None
        assert expires_after is not None
        clock.advance(expires_after + MARGIN - 1)
        await book.tidy()
        assert (await book.finish(hold_id, 4)).first
        clock.advance(1)
        await book.tidy()
        with pytest.raises(StoreUnavailable):
            await book.finish(hold_id, 4)


async def test_number_of_degraded_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MAX_OPEN", 3)
    async with nowhere() as store:
        book = HoldBook({"llm": AsyncLimiter("10/minute", name="llm", store=store, on_store_error="open")})
        ids = [(await book.take("llm", "alice", 4))[1] or "" for _ in range(5)]
        for known in ids[2:]:
            assert (await book.finish(known, 4)).first
        with pytest.raises(StoreUnavailable):
            await book.finish(ids[0], 4)


# --- A store that goes away between take and finish ---------------------------------------------------------------------


class FarMemory(MemoryStore):
    """A memory store that is taken for one over a network, and can be cut off."""

    remote = True

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.asked = 0

    def _decide(self) -> None:
        self.asked += 1
        if self.is_down:
            raise StoreUnavailable("nobody answers")

    def bind_async(self, limiter: str, rules: tuple[Rule, ...], **options: Any) -> AsyncGate:
        return FarGate(self, self.bind(limiter, rules))

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        self._decide()
        return await super().note(name, text, seconds, replaces=replaces)

    async def get_note(self, name: str) -> str | None:
        self._decide()
        return await super().get_note(name)


class FarGate(ImmediateGate):
    """A gate that can neither count nor give back while its store is cut off."""

    def __init__(self, store: FarMemory, gate: Gate) -> None:
        super().__init__(gate)
        self.store = store

    async def decide(self, request: Request) -> Answer:
        self.store._decide()
        return await super().decide(request)

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        self.store._decide()
        await super().refund(receipts, cost, now)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    return Later.instead_of_timers(monkeypatch)


@pytest.fixture
def far(later: Later) -> FarMemory:
    """A store that is probed when the test says so."""
    return FarMemory()


async def taken(store: FarMemory) -> tuple[AsyncLimiter, HoldBook, str]:
    limiter = AsyncLimiter("1000/hour", name="llm", store=store)
    book = HoldBook({"llm": limiter})
    hold_id = await take(book, "alice", 800)
    return limiter, book, hold_id


def cut_off_after_note(store: FarMemory) -> None:
    """Cut a store off as soon as it has kept the next note."""
    keep = store.note

    async def note_and_go(name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        store.note = keep  # type: ignore[method-assign]
        kept = await keep(name, text, seconds, replaces=replaces)
        store.is_down = True
        return kept

    store.note = note_and_go  # type: ignore[method-assign]


async def test_store_that_is_down_is_called_only_by_probes(far: FarMemory, later: Later) -> None:
    limiter, book, hold_id = await taken(far)
    far.is_down = True
    far.asked = 0
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            await book.finish(hold_id, 300)
    assert far.asked == 1
    assert not limiter.health.available
    await later.aprobe()
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            await book.finish(hold_id, 300)
    assert far.asked == 2


async def test_settle_works_again_after_a_probe(far: FarMemory, later: Later) -> None:
    limiter, book, hold_id = await taken(far)
    far.is_down = True
    with pytest.raises(StoreUnavailable):
        await book.finish(hold_id, 300)
    far.is_down = False
    await later.aprobe()
    assert await book.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    assert limiter.health.available
    assert (await limiter.check("alice", 0)).remaining == 700


async def test_hold_is_not_unknown_while_its_store_is_down(far: FarMemory) -> None:
    _, book, _ = await taken(far)
    far.is_down = True
    with pytest.raises(StoreUnavailable):
        await book.finish(new_id("llm"), 0)


async def test_outage_of_another_store_does_not_prevent_settling(far: FarMemory) -> None:
    near = MemoryStore()
    book = HoldBook(
        {
            "far": AsyncLimiter("5/hour", name="far", store=far),
            "llm": AsyncLimiter("1000/hour", name="llm", store=near),
        }
    )
    hold_id = await take(book, "alice", 800)
    far.is_down = True
    assert (await book.finish(hold_id, 300)).first
    assert far.asked == 0
    with pytest.raises(StoreUnavailable):  # it may be there
        await book.finish(new_id("llm"), 0)


async def test_units_stay_counted_if_the_store_fails_after_the_claim(far: FarMemory, later: Later) -> None:
    limiter, book, hold_id = await taken(far)
    cut_off_after_note(far)
    assert await book.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    far.is_down = False
    await later.aprobe()
    assert await book.finish(hold_id, 0) == SettleResult("llm", 800, 300, first=False)
    assert (await limiter.check("alice", 0)).remaining == 200


async def test_excess_is_degraded_if_the_store_fails_after_the_claim(far: FarMemory, later: Later) -> None:
    limiter, book, hold_id = await taken(far)
    cut_off_after_note(far)
    assert await book.finish(hold_id, 900) == SettleResult("llm", 800, 900, first=True, degraded=True)
    far.is_down = False
    await later.aprobe()
    assert (await limiter.check("alice", 0)).remaining == 200


async def test_units_stay_counted_if_the_store_fails_after_the_claim_and_rules_changed(
    far: FarMemory, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, hold_id = await taken(far)
    changed = AsyncLimiter("1000/hour", "5000/day", name="llm", store=far)
    cut_off_after_note(far)
    assert (await HoldBook({"llm": changed}).finish(hold_id, 300)).first
    assert "is unavailable" in caplog.text
    far.is_down = False
    await later.aprobe()
    assert (await changed.check("alice", 0)).results[0].remaining == 200


async def until_available(limiter: AsyncLimiter) -> None:
    async with asyncio.timeout(60):
        while not limiter.health.available:  # noqa: ASYNC110  # a probe sets no event
            await asyncio.sleep(0.01)
