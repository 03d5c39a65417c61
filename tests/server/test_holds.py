"""Holds are settled exactly once, by any worker, also after restarts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    MemoryStore,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.errors import StoreConflict, StoreUnavailable
from headgate.hooks import Hook
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.kv import KVStore, MemoryKV
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock
from headgate_server import holds
from headgate_server.hold_record import MARGIN, HoldsUnsupported, StoredHold, new_id
from headgate_server.holds import HoldBook, SettleResult, TooManyHolds, UnknownHold, UnknownLimiter
from tests.integration.redis.cluster import running_cluster
from tests.server.hold_places import PATIENT, NotingStore, OpenStore, take

RULES = (
    sliding_window("1000/hour", name="window"),
    token_bucket("1000/day", name="bucket"),
    sliding_log("1000/hour", name="log"),
    fixed_window("1000/366 days", name="fixed"),
)
OTHER_RULES = (sliding_window("1000/hour", name="newcomer"), RULES[1], RULES[0])


def limiter_on(store: NotingStore, *rules: str | Rule, name: str = "llm", **options: Any) -> AsyncLimiter:
    return AsyncLimiter(*(rules or RULES), name=name, store=store, **options)


def book_on(store: NotingStore, *rules: str | Rule, **options: Any) -> HoldBook:
    return HoldBook({"llm": limiter_on(store, *rules, **options)})


async def left_on(store: NotingStore, key: Key | None = "alice", *rules: str | Rule) -> list[int]:
    """Return the remaining units of each rule."""
    decision = await limiter_on(store, *rules).check(key, 0)
    return [result.remaining for result in decision.results]


# --- Taking and settling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost", "left"), [(300, 700), (800, 200), (0, 1000), (999, 1)])
async def test_a_hold_is_settled_at_its_true_cost(open_store: OpenStore, cost: int, left: int) -> None:
    store = open_store()
    book = book_on(store)
    decision, hold_id, expires_after = await book.take("llm", "alice", 800)
    assert decision.allowed
    assert hold_id is not None
    assert expires_after == max(result.reset_after or 0 for result in decision.results)
    assert await left_on(store) == [200] * 4
    assert await book.finish(hold_id, cost) == SettleResult("llm", 800, cost, first=True)
    assert await left_on(store) == [left] * 4


async def test_a_refusal_has_no_id_and_takes_nothing(store: MemoryStore) -> None:
    book = book_on(store)
    await book.take("llm", "alice", 800)
    decision, hold_id, expires_after = await book.take("llm", "alice", 300)
    assert (decision.allowed, hold_id, expires_after) == (False, None, None)
    assert await left_on(store) == [200] * 4


async def test_hold_of_cost_0_has_no_record(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredHold, "write", None)  # it would raise
    book = book_on(store)
    decision, hold_id, expires_after = await book.take("llm", "alice", 0)
    assert decision.allowed
    assert (hold_id, expires_after) == (None, None)


async def test_open_holds_are_limited_per_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holds, "MAX_PER_CALLER", 3)
    book = HoldBook({"llm": AsyncLimiter("1000/minute", name="llm", hooks=[Hook()])})
    ids = [(await book.take("llm", f"key {number}", caller="shop"))[1] for number in range(3)]
    with pytest.raises(TooManyHolds, match="this caller has 3 open holds"):
        await book.take("llm", "alice", caller="shop")
    assert (await book.take("llm", "alice", caller="other"))[1] is not None
    assert ids[0] is not None
    await book.finish(ids[0], 1)
    assert (await book.take("llm", "alice", caller="shop"))[1] is not None


async def test_limiter_without_rules_supports_holds(store: MemoryStore) -> None:
    book = HoldBook({"free": AsyncLimiter(name="free", store=store)})
    decision, hold_id, expires_after = await book.take("free", "alice", 7)
    assert (decision.allowed, expires_after) == (True, 0)
    assert hold_id is not None
    assert await book.finish(hold_id, 9) == SettleResult("free", 7, 9, first=True)
    assert await book.finish(hold_id, 7) == SettleResult("free", 7, 9, first=False)


async def test_scopes_and_tiers_survive_in_the_record(open_store: OpenStore) -> None:
    rules = (
        sliding_window("10/hour", scope="user", tiers={"pro": "1000/hour"}),
        token_bucket("2000/day", scope="realm"),
        fixed_window("3000/day", scope="*"),
    )
    store = open_store()
    key: Mapping[str, str | bytes] = {"user": b"\xff", "realm": "north"}
    hold_id = await take(book_on(store, *rules), key, 800, "pro")
    other_id = await take(book_on(store, *rules), key, 100, "pro")
    await book_on(open_store(), *rules).finish(hold_id, 300)
    await book_on(open_store(), *rules).finish(other_id, 200)
    decision = await limiter_on(store, *rules).check(key, 0, tier="pro")
    assert [result.remaining for result in decision.results] == [500, 1500, 2500]


async def test_invalid_cost_changes_nothing(store: MemoryStore) -> None:
    book = book_on(store)
    bad: list[Any] = [-1, 1.5, "1", None, True, 2**53]
    for cost in bad:
        with pytest.raises(ConfigError):
            await book.take("llm", "alice", cost)
    hold_id = await take(book, "alice", 800)
    for cost in bad:
        with pytest.raises(ConfigError):
            await book.finish(hold_id, cost)
    with pytest.raises(CostTooHigh):
        await book.take("llm", "alice", 1001)
    assert await book.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    assert await left_on(store) == [700] * 4


# --- Several workers, restarts ----------------------------------------------------------------------------------------


async def test_one_of_racing_workers_settles_and_all_get_its_outcome(open_store: OpenStore) -> None:
    store = open_store()
    books = [book_on(store), book_on(open_store())]
    for _ in range(5):
        before = await left_on(store)
        hold_id = await take(books[0], "alice", 100)
        costs = [0, 40, 40, 100, 130, 0, 40, 40]  # the same cost twice must not count as the same call
        told = await asyncio.gather(
            *(books[i % 2].finish(hold_id, cost) for i, cost in enumerate(costs)),
        )
        assert sum(finished.first for finished in told) == 1
        [stands] = {finished.cost for finished in told}
        assert next(f.cost for f, cost in zip(told, costs, strict=True) if f.first) == stands
        assert await left_on(store) == [units - stands for units in before]


# --- Invalid and expired ids ------------------------------------------------------------------------------


async def test_invalid_ids_are_unknown(store: MemoryStore) -> None:
    book = book_on(store)
    hold_id = await take(book, "alice", 800)
    await book.finish(hold_id, 300)
    hostile: list[Any] = [
        "",
        " ",
        "\x00",
        "\ud800",
        "../../etc/passwd",
        hold_id[:-1],
        hold_id + "A",
        hold_id + "\n",
        hold_id + "/end",
        f"hold/{hold_id}",
        hold_id.swapcase(),
        "x" * 1_000_000,
        new_id("llm"),
        new_id("nobody"),
        None,
        7,
        hold_id.encode(),
    ]
    for bad in hostile:
        with pytest.raises(UnknownHold):
            await book.finish(bad, 0)
    assert await left_on(store) == [700] * 4


async def test_an_unknown_limiter_is_named(store: MemoryStore) -> None:
    with pytest.raises(UnknownLimiter, match="'nobody'"):
        await book_on(store).take("nobody", "alice", 1)


async def test_foreign_record_is_a_conflict(store: MemoryStore) -> None:
    book = book_on(store)
    for text in ("", "{}", "[]", "7", "null", '{"limiter": "llm"}', "not JSON"):
        hold_id = new_id("llm")
        await store.note(f"hold/{hold_id}", text, 60)
        with pytest.raises(StoreConflict):
            await book.finish(hold_id, 0)


async def test_a_record_that_another_version_wrote_is_settled(store: MemoryStore) -> None:
    """Its text may differ from the one that this version would write."""
    book = book_on(store)
    hold_id = await take(book, "alice", 800)
    text = await store.get_note(f"hold/{hold_id}") or ""
    shorter = text.replace(', "lost": false', "")
    assert shorter != text
    await store.note(f"hold/{hold_id}", shorter, 60, replaces=text)
    assert await book.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    assert await left_on(store) == [700] * 4


# --- A policy that has changed in between -----------------------------------------------------------------------------


async def test_only_remaining_rules_get_units_back(store: MemoryStore) -> None:
    hold_id = await take(book_on(store), "alice", 800)
    await limiter_on(store, OTHER_RULES[0]).hit("alice", 500)
    assert await book_on(store, *OTHER_RULES).finish(hold_id, 300) == SettleResult(
        "llm", 800, 300, first=True
    )
    assert await left_on(store, "alice", *OTHER_RULES) == [500, 700, 700]
    assert await left_on(store) == [700, 700, 200, 200]


async def test_a_changed_limit_keeps_its_counts_and_gets_units_back(store: MemoryStore) -> None:
    hold_id = await take(book_on(store, "1000/hour"), "alice", 800)
    await book_on(store, "5000/hour").finish(hold_id, 300)
    assert await left_on(store, "alice", "5000/hour") == [4700]


async def test_excess_counts_only_in_the_rules_of_the_hold(store: MemoryStore) -> None:
    hold_id = await take(book_on(store), "alice", 800)
    assert (await book_on(store, *OTHER_RULES).finish(hold_id, 900)).first
    assert await left_on(store, "alice", *OTHER_RULES) == [1000, 100, 100]


async def test_excess_that_cannot_be_recorded_is_logged(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    user, realm = sliding_window("1000/hour", scope="user"), sliding_window("1000/hour", scope="realm")
    hold_id = await take(book_on(store, user, realm), {"user": "ann", "realm": "north"}, 800)
    assert await book_on(store, user).finish(hold_id, 900) == SettleResult("llm", 800, 900, first=True)
    assert "units above a hold of 800 could not be recorded" in caplog.text


async def test_hold_of_a_removed_limiter_is_settled_without_units(store: MemoryStore) -> None:
    hold_id = await take(book_on(store), "alice", 800)
    later = HoldBook({"other": limiter_on(store, "5/minute", name="other")})
    assert await later.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    assert await later.finish(hold_id, 0) == SettleResult("llm", 800, 300, first=False)
    assert await left_on(store) == [200] * 4


async def test_moved_limiter_gives_nothing_back_in_its_new_store(store: MemoryStore) -> None:
    elsewhere = MemoryStore()
    hold_id = await take(book_on(store), "alice", 800)
    moved = limiter_on(elsewhere)
    await moved.hit("alice", 600)
    later = HoldBook({"llm": moved, "other": limiter_on(store, "5/minute", name="other")})
    assert await later.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    assert await left_on(elsewhere) == [400] * 4


# --- Time ---------------------------------------------------------------------------------------------------------------


async def test_late_settle_gives_nothing_back_and_is_not_an_error() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    book = book_on(store, "1000/minute")
    _, hold_id, expires_after = await book.take("llm", "alice", 800)
    _, other_id, _ = await book.take("llm", "alice", 100)
    assert hold_id is not None
    assert other_id is not None
    assert expires_after is not None
    clock.advance(expires_after)
    await limiter_on(store, "1000/minute").hit("alice", 600)
    clock.advance(MARGIN - 0.001)
    assert await book.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    clock.advance(1)
    with pytest.raises(UnknownHold):
        await book.finish(other_id, 300)


async def test_outcome_is_kept_as_long_as_the_hold() -> None:
    """Or the next one would be the first again."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    book = book_on(store, "1000/minute")
    _, hold_id, expires_after = await book.take("llm", "alice", 800)
    assert hold_id is not None
    assert expires_after is not None
    await book.finish(hold_id, 300)
    clock.advance(expires_after + MARGIN - 0.001)
    assert not (await book.finish(hold_id, 0)).first


async def test_a_hold_under_the_overflow_key_of_a_full_memory_is_given_back() -> None:
    store = MemoryStore(max_keys=1)
    limiter = limiter_on(store, "1000/hour")
    await limiter.hit("old")
    book = HoldBook({"llm": limiter})
    hold_id = await take(book, "new", 800)
    assert (await limiter.check("newer", 0)).remaining == 200
    await book.finish(hold_id, 300)
    assert (await limiter.check("newer", 0)).remaining == 700


# --- Stores that fail, or cannot ----------------------------------------------------------------------------------------


async def test_a_store_without_notes_has_no_holds() -> None:
    limiter = AsyncLimiter(fixed_window("5/hour"), name="kv", store=KVStore(MemoryKV()))
    book = HoldBook({"kv": limiter})
    with pytest.raises(HoldsUnsupported, match="KVStore"):
        await book.take("kv", "alice", 3)
    assert (await limiter.check("alice", 0)).remaining == 5
    with pytest.raises(UnknownHold):
        await book.finish(new_id("kv"), 0)


class FailingNotes(MemoryStore):
    """A memory store whose next notes fail, before or after they are kept."""

    def __init__(
        self, failures: int = 0, *, after: bool = False, error: type[Exception] = StoreUnavailable
    ) -> None:
        super().__init__()
        self.failures = failures
        self.after = after
        self.error = error

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        if self.after:
            kept = await super().note(name, text, seconds, replaces=replaces)
        if self.failures:
            self.failures -= 1
            raise self.error("it does not answer")
        return kept if self.after else await super().note(name, text, seconds, replaces=replaces)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [StoreUnavailable, StoreConflict, RuntimeError])
async def test_hold_is_released_if_its_record_cannot_be_written(after: bool, error: type[Exception]) -> None:
    store = FailingNotes(2, after=after, error=error)
    with pytest.raises(error):
        await book_on(store).take("llm", "alice", 800)
    assert await left_on(store) == [1000] * 4


@pytest.mark.parametrize("after", [False, True])
async def test_record_is_written_again_if_the_outcome_is_unknown(after: bool) -> None:
    store = FailingNotes(1, after=after)
    book = book_on(store)
    hold_id = await take(book, "alice", 800)
    store.failures = 1
    assert await book.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    assert await left_on(store) == [700] * 4


class SlowNotes(MemoryStore):
    """A memory store whose notes wait to be let through."""

    def __init__(self) -> None:
        super().__init__()
        self.let_through = asyncio.Event()
        self.let_through.set()
        self.waiting = asyncio.Event()

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        self.waiting.set()
        await self.let_through.wait()
        return await super().note(name, text, seconds, replaces=replaces)


async def test_cancelled_hold_is_released() -> None:
    store = SlowNotes()
    store.let_through.clear()
    taking = asyncio.ensure_future(book_on(store).take("llm", "alice", 800))
    await store.waiting.wait()
    assert await left_on(store) == [200] * 4
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await left_on(store) == [1000] * 4


async def test_cancelled_settle_completes() -> None:
    store = SlowNotes()
    book = book_on(store)
    hold_id = await take(book, "alice", 800)
    store.let_through.clear()
    store.waiting.clear()
    settling = asyncio.ensure_future(book.finish(hold_id, 300))
    await store.waiting.wait()
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    store.let_through.set()
    assert await book.finish(hold_id, 0) == SettleResult("llm", 800, 300, first=False)
    assert await left_on(store) == [700] * 4


async def test_a_hold_on_a_cluster_is_given_back_once() -> None:
    """Its record may be on another node than its counts."""
    rules = (
        sliding_window("1000/hour", scope="user", name="user"),
        token_bucket("1000/day", scope="realm", name="realm"),
        sliding_window("1000/hour", scope="*", name="all"),
    )
    key = {"user": "42", "realm": "north"}
    with running_cluster("redis") as cluster:
        async with RedisStore(cluster.url, cluster=True, hash_tag="limiter", deadline=PATIENT) as store:
            hold_id = await take(book_on(store, *rules), key, 800)
            told = await asyncio.gather(*(book_on(store, *rules).finish(hold_id, 300) for _ in range(4)))
            assert sum(finished.first for finished in told) == 1
            assert await left_on(store, key, *rules) == [700] * 3
