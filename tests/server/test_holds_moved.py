"""Confirmed and renewed holds, on every store that keeps notes: racing calls, lost answers, workers that die in between."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from headgate import AsyncHold, AsyncLimiter, Decision, MemoryStore, concurrent, sliding_window
from headgate.testing import FakeClock
from headgate.testing.contract.races import in_processes
from headgate_server import hold_record
from headgate_server.hold_record import CONFIRMING_US, MARGIN, HeldUnits, HoldBusy, StoredHold
from headgate_server.holds import HoldBook, UnknownHold
from tests.server.hold_places import NotingStore, OpenStore, take

RULES = (
    sliding_window("10/hour", name="requests"),
    sliding_window("1000/hour", name="tokens", unit="tokens"),
    concurrent(3, lease="1h", name="in flight"),
)


TOKENS = {"tokens": 800}


def book_on(store: NotingStore, clock: FakeClock | None = None) -> HoldBook:
    return HoldBook({"llm": AsyncLimiter(*RULES, name="llm", store=store)}, clock=clock)


async def left_on(store: NotingStore, key: str = "alice") -> list[int]:
    """Return the remaining units of each rule."""
    decision = await AsyncLimiter(*RULES, name="llm", store=store).check(key, 0)
    return [result.remaining for result in decision.results]


async def test_one_of_racing_confirms_moves_the_units_and_all_return_it(open_store: OpenStore) -> None:
    store = open_store()
    books = [book_on(store), book_on(open_store())]
    for number in range(5):
        key = f"user {number}"
        hold_id = await take(books[0], key, TOKENS)
        decisions = await asyncio.gather(
            *(books[i % 2].confirm(hold_id, {"tokens": 300}) for i in range(6)),
        )
        assert all(decisions)
        assert await left_on(store, key) == [9, 700, 3]
        assert (await books[1].finish(hold_id, 0)).first is False


async def test_racing_confirms_are_all_refused(store: MemoryStore) -> None:
    books = [book_on(store), book_on(store)]
    hold_id = await take(books[0], cost=TOKENS)
    await take(books[0], cost={"tokens": 200})
    before = await left_on(store)
    decisions = await asyncio.gather(*(books[i % 2].confirm(hold_id, {"tokens": 801}) for i in range(4)))
    assert not any(decisions)
    assert await left_on(store) == before
    assert await books[1].confirm(hold_id, {"tokens": 700})


async def test_concurrent_release_and_confirm_agree(open_store: OpenStore) -> None:
    store = open_store()
    books = [book_on(store), book_on(open_store())]
    for number in range(5):
        key = f"user {number}"
        hold_id = await take(books[0], key, TOKENS)
        confirmed, released = await asyncio.gather(books[0].confirm(hold_id), books[1].finish(hold_id, 0))
        assert bool(confirmed) is not released.first
        assert await left_on(store, key) == ([10, 1000, 3] if released.first else [9, 200, 3])


async def test_a_renewed_hold_keeps_its_id(open_store: OpenStore) -> None:
    """So an answer that got lost costs nothing: the caller sends its renewal again."""
    store = open_store()
    books = [book_on(store), book_on(open_store())]
    hold_id = await take(books[0], cost=TOKENS)
    taken = await asyncio.gather(*(books[i % 2].renew(hold_id) for i in range(20)))
    assert {one.hold for one in taken} == {hold_id}
    assert await left_on(store) == [9, 200, 2]
    assert await books[1].confirm(hold_id, {"tokens": 300})
    assert await left_on(store) == [9, 700, 3]
    assert not (await books[0].renew(hold_id)).decision
    assert await left_on(store) == [9, 700, 3]


async def test_concurrent_renewal_and_release_free_the_place(open_store: OpenStore) -> None:
    store = open_store()
    books = [book_on(store), book_on(open_store())]
    for number in range(10):
        key = f"user {number}"
        hold_id = await take(books[0], key, TOKENS)
        calls = (books[0].renew(hold_id), books[1].finish(hold_id, 0), books[0].renew(hold_id))
        await asyncio.gather(*calls)
        assert await left_on(store, key) == [10, 1000, 3]


async def test_renewals_extend_the_lifetime_of_an_id() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    book = HoldBook({"a": AsyncLimiter(concurrent(1, lease="60s"), name="a", store=store)}, clock=clock)
    hold_id = (await book.take("a", "alice")).hold
    assert hold_id is not None
    for _ in range(40):
        clock.advance(59)
        assert (await book.renew(hold_id)).expires_after == 60
        await book.tidy()
    assert (await book.finish(hold_id, 0)).first
    assert (await book.take("a", "alice")).decision
    clock.advance(60 + 2 * MARGIN)
    with pytest.raises(UnknownHold):
        await book.renew(hold_id)


@pytest.mark.parametrize("place", ["sqlite", "redis", "postgres"], indirect=True)
async def test_processes_that_confirm_move_each_hold_once(place: OpenStore, open_store: OpenStore) -> None:
    store = open_store()
    ids = [await take(book_on(store), f"user {number}", TOKENS) for number in range(8)]

    async def confirm_all() -> int:
        async with aclosing(place()) as own:
            return sum([bool(await book_on(own).confirm(hold_id, {"tokens": 300})) for hold_id in ids])

    assert await asyncio.to_thread(in_processes, 4, lambda _: asyncio.run(confirm_all())) == [8] * 4
    assert [await left_on(store, f"user {number}") for number in range(8)] == [[9, 700, 3]] * 8


# --- A worker that dies between claim and move ------------------------------------------------------------------------


async def claim_and_die(store: NotingStore, hold_id: str, clock: FakeClock) -> None:
    """Claim the outcome of a hold, as a worker that is killed before it moves the units."""
    stored = await StoredHold.read(store, hold_id)
    assert stored is not None
    await stored.claim(stored.record.cost, clock.now_us(), to_confirm=True)


async def test_units_stay_counted_if_a_worker_dies_during_a_confirmation(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_record, "PAUSES", ())
    clock = FakeClock()
    book = book_on(store, clock)
    hold_id = await take(book, cost={"tokens": 400})
    await claim_and_die(store, hold_id, clock)
    for attempt in (book.confirm(hold_id), book.finish(hold_id, 0)):
        with pytest.raises(HoldBusy, match="send the call again"):
            await attempt
    clock.advance_us(CONFIRMING_US)
    # No one knows whether the units were moved, so the next call takes them in addition.
    assert await book.confirm(hold_id)
    assert await left_on(store) == [8, 200, 2]
    assert await book.confirm(hold_id)
    assert (await book.finish(hold_id, 0)).first is False
    assert await left_on(store) == [8, 200, 2]


async def test_hold_gives_nothing_back_after_a_lost_confirmation(store: MemoryStore) -> None:
    clock = FakeClock()
    book = book_on(store, clock)
    hold_id = await take(book, cost={"tokens": 400})
    await claim_and_die(store, hold_id, clock)
    clock.advance_us(CONFIRMING_US)
    assert (await book.finish(hold_id, {"tokens": 100})).first
    assert await left_on(store) == [9, 600, 2]


async def test_slow_confirmation_is_still_admitted(store: MemoryStore) -> None:
    """Its units count, and so do those of the call that overtook it: too few are admitted rather than too many."""
    clock = FakeClock()
    book, other = book_on(store, clock), book_on(store, clock)
    hold_id = await take(book, cost={"tokens": 400})
    asked = HeldUnits.hold
    overtaken: list[bool] = []

    def overtake(self: HeldUnits, *, calls_hooks: bool) -> AsyncHold:
        hold = asked(self, calls_hooks=calls_hooks)
        if overtaken:
            return hold
        overtaken.append(True)
        move = hold.confirm

        async def slow(*arguments: Any) -> Decision:
            clock.advance_us(CONFIRMING_US)
            assert await other.confirm(hold_id)
            return await move(*arguments)

        hold.confirm = slow  # type: ignore[method-assign,assignment]
        return hold

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldUnits, "hold", overtake)
        assert await book.confirm(hold_id)
    assert await left_on(store) == [8, 200, 3]
