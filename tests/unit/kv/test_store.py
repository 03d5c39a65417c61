"""Rate limiting over a key-value store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    Quota,
    Rule,
    StoreConflict,
    StoreUnavailable,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.stores.kv import KeyTurns, KVStore, MemoryKV, SQLiteKV
from headgate.stores.kv.redis import RedisKV
from headgate.stores.kv.store import default_stem
from headgate.testing import FakeClock
from tests.unit.kv.redis_server import with_own_prefix

ALL_KINDS = [
    fixed_window("20/hour"),
    sliding_window("20/hour"),
    sliding_log("20/hour"),
    token_bucket("20/hour", burst=20),
]


class PlainKV:
    """A key-value store with only get and put; both yield to the event loop, like a remote store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.calls: list[tuple[str, ...]] = []

    async def get(self, key: str) -> str | None:
        self.calls.append(("get", key))
        found = self.values.get(key)
        await asyncio.sleep(0)
        return found

    async def put(self, key: str, value: str, ttl: int) -> None:
        await asyncio.sleep(0)
        self.calls.append(("put", key, value, str(ttl)))
        self.values[key] = value


class FailingKV(PlainKV):
    """A store that is down for the first calls."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def get(self, key: str) -> str | None:
        if self.times > 0:
            self.times -= 1
            await asyncio.sleep(0)
            raise StoreUnavailable("down")
        return await super().get(key)


class RivalledKV(MemoryKV):
    """A store in which another process wins the first `times` races."""

    def __init__(self, times: float, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.times = times

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        if self.times > 0:
            self.times -= 1
            await self.put(key, str(int(expected or 0) + 1), ttl)
        return await super().swap(key, expected, value, ttl)


def limiter_on(kv: object, rule: Rule, clock: FakeClock | None = None) -> AsyncLimiter:
    return AsyncLimiter(rule, name="test", store=KVStore(kv, clock=clock))  # type: ignore[arg-type]  # a KV


@given(
    st.lists(
        st.tuples(
            st.integers(0, 12_000_000),
            st.sampled_from(["hit", "check", "record", "hold", "release"]),
            st.integers(0, 3),
        ),
        max_size=30,
    )
)
async def test_fixed_windows_are_decided_like_in_memory(trace: list[tuple[int, str, int]]) -> None:
    """The conformance kit compares the other kinds."""
    clock, rule = FakeClock(), fixed_window("3/10s")
    reference = AsyncLimiter(rule, name="test", store=MemoryStore(clock=clock))
    subject = limiter_on(MemoryKV(clock=clock), rule, clock)
    holds = []
    for advance, call, cost in trace:
        clock.advance_us(advance)
        if call == "hold":
            pair = await reference.hold("k", cost), await subject.hold("k", cost)
            assert pair[0].decision == pair[1].decision
            holds.append(pair)
        elif call == "release":
            for hold in holds.pop() if holds else ():
                await hold.release()
        else:
            answers = [await getattr(limiter, call)("k", cost) for limiter in (reference, subject)]
            assert answers[0] == answers[1]
    assert await reference.check("k") == await subject.check("k")


class TestOperations:
    """Key-value stores charge for each call."""

    async def test_an_admission_is_one_get_and_one_put(self, clock: FakeClock) -> None:
        kv = PlainKV()
        await limiter_on(kv, fixed_window("2/hour"), clock).hit("42")
        assert [call[0] for call in kv.calls] == ["get", "put"]

    async def test_a_refusal_is_one_get(self, clock: FakeClock) -> None:
        kv = PlainKV()
        limiter = limiter_on(kv, fixed_window("1/hour"), clock)
        await limiter.hit("42")
        kv.calls.clear()
        assert not await limiter.hit("42")
        assert [call[0] for call in kv.calls] == ["get"]

    async def test_check_and_zero_cost_write_nothing(self, clock: FakeClock) -> None:
        kv = PlainKV()
        limiter = limiter_on(kv, fixed_window("2/hour"), clock)
        await limiter.check("42")
        await limiter.hit("42", cost=0)
        await limiter.record("42", cost=0)
        assert [call[0] for call in kv.calls] == ["get", "get"]

    async def test_a_late_release_writes_nothing(self, clock: FakeClock) -> None:
        kv = PlainKV()
        hold = await limiter_on(kv, fixed_window("2/hour"), clock).hold("42")
        clock.advance(3600)
        kv.calls.clear()
        await hold.release()
        assert [call[0] for call in kv.calls] == ["get"]

    async def test_parallel_calls_on_a_store_without_swap_are_serialized(self, clock: FakeClock) -> None:
        kv = PlainKV()
        limiter = limiter_on(kv, fixed_window("20/hour"), clock)
        await asyncio.gather(*(limiter.hit("42") for _ in range(30)))
        assert [call[0] for call in kv.calls] == ["get", "put"] * 20 + ["get"] * 10


class TestEntries:
    async def test_fixed_window_is_stored_as_a_decimal_count_per_window(self, clock: FakeClock) -> None:
        kv = PlainKV()
        limiter = AsyncLimiter(
            fixed_window("20/hour"),
            name="n",
            store=KVStore(kv, stem=lambda n, rule, key: f"s:{key!s}", clock=clock),
        )
        await limiter.hit("42", cost=12)
        assert kv.values == {f"s:42:{clock.now_us() // 3_600_000_000}": "12"}

    @pytest.mark.parametrize("numbers", ["1", "1 2", "1 2 3 4", "1 -2 3", "1 2 3 4 5 6 0", "1 2 3 4 0 6 7"])
    @pytest.mark.parametrize("rule", ALL_KINDS[1:], ids=lambda rule: rule.kind)
    async def test_invalid_state_counts_as_zero(self, rule: Rule, numbers: str, clock: FakeClock) -> None:
        kv = PlainKV()
        limiter = AsyncLimiter(rule, name="x", store=KVStore(kv, clock=clock))
        hold = await limiter.hold("ada")
        [(entry, written)] = kv.values.items()
        for call in (hold.release, lambda: limiter.check("ada"), lambda: limiter.hit("ada")):
            kv.values[entry] = f"{written.split()[0]} {numbers}"
            outcome: Any = await call()
        assert outcome.remaining == 19

    @pytest.mark.parametrize("found", ["", "x", "-5", "1.5", "5 ", "٣", "9" * 5000, "0"])
    async def test_unreadable_value_counts_as_zero(self, found: str, clock: FakeClock) -> None:
        kv = PlainKV()
        for rule in ALL_KINDS:
            limiter = limiter_on(kv, rule, clock)
            await limiter.hit("42", cost=20)
            kv.values = dict.fromkeys(kv.values, found)
            assert (await limiter.hit("42")).remaining == 19

    @pytest.mark.parametrize(
        ("rule", "ttl"),
        [
            (fixed_window("20/hour"), 3600),
            (fixed_window("20/1500ms"), 60),
            (fixed_window(Quota(20, 90_500_000)), 91),
            (sliding_window("20/hour"), 3660),  # a strict bucket of one minute adds a minute
            (token_bucket("20/hour", burst=40), 7200),
        ],
        ids=str,
    )
    async def test_time_to_live_covers_the_counted_period(self, rule: Rule, ttl: int) -> None:
        kv = PlainKV()
        clock = FakeClock(1_699_999_200)  # the beginning of an hour
        limiter = limiter_on(kv, rule, clock)
        await limiter.hit("42", cost=rule.quota.burst or 1)
        assert kv.calls[-1][-1] == str(ttl)

    @pytest.mark.parametrize("rule", ALL_KINDS, ids=lambda rule: rule.kind)
    @given(gaps=st.lists(st.integers(0, 4000), max_size=10))
    async def test_expiry_never_changes_a_decision(self, rule: Rule, gaps: list[int]) -> None:
        clock = FakeClock()
        forgetting, remembering = MemoryKV(clock=clock), PlainKV()
        limiters = limiter_on(forgetting, rule, clock), limiter_on(remembering, rule, clock)
        for gap in gaps:
            clock.advance(gap)
            assert await limiters[0].hit("42", cost=7) == await limiters[1].hit("42", cost=7)

    @pytest.mark.parametrize("rule", ALL_KINDS, ids=lambda rule: rule.kind)
    async def test_call_can_override_the_quota(self, rule: Rule) -> None:
        limiter = limiter_on(PlainKV(), rule, FakeClock())
        assert (await limiter.hit("42", 15)).remaining == 5
        assert (
            await limiter.hit("42", quota="30/hour burst 30" if rule.quota.burst else "30/hour")
        ).remaining == 14
        async with await limiter.hold(
            "42", 9, quota="30/hour burst 30" if rule.quota.burst else "30/hour"
        ) as hold:
            await hold.settle(2)
        assert (await limiter.check("42", 0)).remaining == 2

    async def test_a_hold_cannot_be_moved(self) -> None:
        limiter = limiter_on(PlainKV(), ALL_KINDS[0], FakeClock())
        hold = await limiter.hold("42", 3)
        with pytest.raises(ConfigError, match="cannot move a hold"):
            await hold.confirm()
        assert (await limiter.check("42", 0)).remaining == 17

    def test_entry_names_are_unique(self) -> None:
        whose: list[tuple[str, str | bytes]] = [
            ("a", "b:c"),
            ("a:b", "c"),
            ("a", b"b:c"),
            ("a", "b%3Ac"),
            ("a", "x" * 129),
        ]
        names = {default_stem(limiter, fixed_window("5/minute"), key) for limiter, key in whose}
        assert len(names) == len(whose)

    def test_entry_names_fit_the_cloudflare_limit(self) -> None:
        for key in ("\N{SNOWMAN}" * 42, "x" * 10_000):
            name = default_stem("limiter" * 60, fixed_window("5/minute"), key)
            assert len(f"{name}:{2**53}".encode()) <= 512


class TestSeveralProcesses:
    """Two limiters that share nothing but the key-value store."""

    @pytest.mark.parametrize("rule", ALL_KINDS, ids=lambda rule: rule.kind)
    async def test_two_limiters_on_sqlite_admit_exactly_the_limit(self, rule: Rule, tmp_path: Path) -> None:
        adapters = [SQLiteKV(tmp_path / "kv.db") for _ in range(2)]
        await self.race(adapters, rule)

    @pytest.mark.parametrize("rule", ALL_KINDS, ids=lambda rule: rule.kind)
    async def test_two_limiters_on_redis_admit_exactly_the_limit(self, rule: Rule, redis_server: str) -> None:
        url = with_own_prefix(redis_server)
        await self.race([RedisKV.from_url(url) for _ in range(2)], rule)

    async def race(self, adapters: list[SQLiteKV] | list[RedisKV], rule: Rule) -> None:
        clock = FakeClock()
        limiters = [limiter_on(kv, rule, clock) for kv in adapters]
        decisions = await asyncio.gather(*(limiters[i % 2].hit("42") for i in range(60)))
        for kv in adapters:
            await kv.aclose()
        assert sum(decision.allowed for decision in decisions) == 20

    async def test_call_is_decided_again_after_a_lost_race(self, clock: FakeClock) -> None:
        limiter = limiter_on(RivalledKV(2, clock), fixed_window("3/hour"), clock)
        assert (await limiter.hit("42")).remaining == 0
        assert not await limiter.hit("42")

    async def test_a_call_that_loses_every_race_gives_up(self, clock: FakeClock) -> None:
        limiter = limiter_on(RivalledKV(math.inf, clock), fixed_window("1000/hour"), clock)
        with pytest.raises(StoreConflict, match="changed by other processes"):
            await limiter.hit("42")


class TestUse:
    @pytest.mark.parametrize("kv", ["redis://:secret@localhost", {}, None, MemoryKV], ids=repr)
    def test_invalid_key_value_store_is_refused(self, kv: Any) -> None:
        with pytest.raises(ConfigError, match=r"^kv is a key-value store, like MemoryKV\(\) or ") as caught:
            KVStore(kv)
        assert "secret" not in str(caught.value)

    def test_several_rules_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="one rule"):
            AsyncLimiter("5/minute", "50/hour", name="test", store=KVStore(MemoryKV()))

    def test_sync_limiter_is_refused(self) -> None:
        with pytest.raises(ConfigError):
            Limiter("5/minute", name="test", store=KVStore(MemoryKV()))  # type: ignore[arg-type]  # that is the point

    def test_store_without_declared_guarantees_is_not_exact(self) -> None:
        assert not KVStore(PlainKV()).guarantees.exact
        assert KVStore(MemoryKV()).guarantees.exact
        assert not KVStore(MemoryKV()).guarantees.all_or_nothing, "a limiter on it has one rule"


class TestOutage:
    async def test_calls_waiting_for_a_failed_call_fail_too(self, clock: FakeClock) -> None:
        kv = FailingKV(times=1)
        limiter = limiter_on(kv, fixed_window("20/hour"), clock)
        answers = await asyncio.gather(*(limiter.hit("42") for _ in range(5)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 5
        assert kv.calls == []
        assert (await limiter.hit("42")).remaining == 19

    async def test_calls_for_other_keys_do_not_fail(self, clock: FakeClock) -> None:
        limiter = limiter_on(FailingKV(times=1), fixed_window("20/hour"), clock)
        failed, admitted = await asyncio.gather(limiter.hit("42"), limiter.hit("43"), return_exceptions=True)
        assert isinstance(failed, StoreUnavailable)
        assert admitted


@pytest.mark.parametrize(
    "changed",
    [
        token_bucket("5/hour"),
        sliding_log("5/hour"),
        sliding_window("5/day"),
        sliding_window("5/hour", buckets=6),
        sliding_window("5/hour", name="other"),
    ],
    ids=str,
)
async def test_another_rule_under_the_same_stem_counts_from_zero(changed: Rule) -> None:
    clock = FakeClock()
    store = KVStore(MemoryKV(clock=clock), clock=clock, stem=lambda limiter, rule, key: f"ratelimit:{key!s}")
    before = AsyncLimiter(sliding_window("5/hour"), name="bot", store=store)
    after = AsyncLimiter(changed, name="bot", store=store)
    assert await before.hit("42", 3)
    assert [bool(await after.hit("42")) for _ in range(6)] == [True] * 5 + [False]
    clock.advance(3 * 86_400)
    assert await after.hit("42", 5)


class TestCancelledCallers:
    """Cancel a call after some turns of the event loop, and wait for its background work."""

    @pytest.fixture
    def limiter(self) -> AsyncLimiter:
        return AsyncLimiter("20/hour", name="x", store=KVStore(PlainKV()))

    async def cancel(self, call: Awaitable[object], turns: int) -> None:
        task = asyncio.ensure_future(call)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110  # background work
            await asyncio.sleep(0)

    async def used(self, limiter: AsyncLimiter) -> int | None:
        return 20 - ((await limiter.check("alice", 0)).remaining or 0)

    @pytest.mark.parametrize("turns", range(8))
    async def test_cancelled_hold_is_returned_or_refunded(self, limiter: AsyncLimiter, turns: int) -> None:
        taken = []

        async def take() -> None:
            taken.append(await limiter.hold("alice", 5))

        await self.cancel(take(), turns)
        assert await self.used(limiter) == 5 * len(taken)

    @pytest.mark.parametrize("turns", range(1, 8))
    async def test_cancelled_record_is_counted(self, limiter: AsyncLimiter, turns: int) -> None:
        await self.cancel(limiter.record("alice", 5), turns)
        assert await self.used(limiter) == 5

    @pytest.mark.parametrize("turns", range(1, 8))
    @pytest.mark.parametrize("final", [0, 2, 5, 8])
    async def test_cancelled_settle_is_completed(self, limiter: AsyncLimiter, turns: int, final: int) -> None:
        hold = await limiter.hold("alice", 5)
        await self.cancel(hold.settle(final), turns)
        assert await self.used(limiter) == final

    @pytest.mark.parametrize("turns", range(1, 8))
    async def test_cancelled_reset_is_completed(self, limiter: AsyncLimiter, turns: int) -> None:
        await limiter.hit("alice", 5)
        await self.cancel(limiter.reset("alice"), turns)
        assert await self.used(limiter) == 0

    async def test_failure_of_a_cancelled_call_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        limiter = AsyncLimiter("20/hour", name="x", store=KVStore(FailingKV(1)))
        await self.cancel(limiter.record("alice"), 2)
        assert "a cancelled call could not be completed: down" in caplog.text


class TestTurns:
    async def test_cancelled_waiter_leaves_the_queue(self) -> None:
        turns = KeyTurns()
        order: list[str] = []

        async def take(name: str) -> None:
            async with turns.take("x"):
                order.append(name)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(take(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "c"]
        assert not turns._queue.is_taken("x")

    async def test_names_do_not_wait_for_one_another(self) -> None:
        turns = KeyTurns()
        async with turns.take("x"), turns.take("y"):
            pass
