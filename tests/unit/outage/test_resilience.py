"""Limiters on a store that fails on command, in threads and in tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import (
    AsyncHold,
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    RateLimited,
    Rule,
    SQLiteStore,
    StoreConflict,
    StoreError,
    StoreUnavailable,
)
from headgate.keys import Key
from headgate.stores.base import Answer, AsyncGate, Gate, Guarantees, ImmediateGate, Receipts
from headgate.stores.outage import LONGEST_PAUSE, breaker_of, local
from headgate.stores.request import Request
from headgate.testing import FakeClock


class Flaky:
    """A memory that plays a store over a network: it fails when told to, and keeps count of who asked."""

    remote = True
    has_rules = False
    clock = None
    notes = None
    guarantees = Guarantees(shared=True)

    def __init__(self) -> None:
        self.memory = MemoryStore(clock=FakeClock())
        self.error: StoreError | None = None
        self.write_error: StoreError | None = None
        self.asked: list[str] = []
        self.deadlines: list[float | None] = []
        self.probed = threading.Event()

    def fail(self) -> None:
        self.error = StoreUnavailable("it is gone")

    def mend(self) -> None:
        self.error = self.write_error = None

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        self.deadlines.append(deadline)
        return FlakyGate(self, self.memory.bind(limiter, rules))

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        return AsyncFlakyGate(self.bind(limiter, rules, deadline=deadline))

    def close(self) -> None:
        self.asked.append("close")

    async def aclose(self) -> None:
        self.close()

    @contextmanager
    def asked_to(self, operation: str) -> Iterator[None]:
        """Fail a call if it is to fail."""
        self.asked.append(operation)
        try:
            if self.error is not None:
                raise self.error
            if self.write_error is not None and operation != "peek":
                raise self.write_error
            yield
        finally:
            if operation == "peek":
                self.probed.set()


class FlakyGate:
    def __init__(self, store: Flaky, gate: Gate) -> None:
        self.store = store
        self.gate = gate

    def ask(self, request: Request) -> Answer:
        with self.store.asked_to(request.operation):
            return self.gate.ask(request)

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        with self.store.asked_to("refund"):
            self.gate.refund(receipts, cost, now)

    def reset(self, key: Key | None) -> None:
        with self.store.asked_to("reset"):
            self.gate.reset(key)


class AsyncFlakyGate(ImmediateGate):
    """The same, with something to wait for."""

    async def ask(self, request: Request) -> Answer:
        await asyncio.sleep(0)
        return await super().ask(request)

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        await asyncio.sleep(0)
        await super().refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        await asyncio.sleep(0)
        await super().reset(key)


class Time:
    """The breaker's clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Flaky:
    return Flaky()


@pytest.fixture
def time(store: Flaky) -> Time:
    time = Time()
    breaker_of(store)._monotonic = time
    return time


def limiter_on(store: Flaky, **options: Any) -> Limiter:
    return Limiter("8/minute", name="x", store=store, **options)


def let_probe(limiter: Limiter, store: Flaky, time: Time) -> None:
    """Let a probe be due, a call start it, and wait for its end."""
    with probes_joined():
        store.probed.clear()
        time.now += LONGEST_PAUSE
        limiter.hit("starts the probe")
        assert store.probed.wait(10)


@contextmanager
def probes_joined() -> Iterator[None]:
    """Wait for the end of all threads that a block has started."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


def test_a_store_over_a_network_is_open_by_default(store: Flaky) -> None:
    limiter = limiter_on(store)
    assert not limiter.hit("alice").degraded
    store.fail()
    for _ in range(10):
        decision = limiter.hit("alice")
        assert decision.allowed
        assert decision.degraded
    assert store.asked == ["hit", "hit"]
    assert repr(limiter.health) == "<Health: unavailable, 1 outages, 1 failures, 10 degraded>"


def test_any_other_store_raises_by_default() -> None:
    with SQLiteStore(":memory:") as store:
        limiter = Limiter("8/minute", name="x", store=store)
        store.close()
        with pytest.raises(StoreUnavailable):
            limiter.hit("alice")
        with pytest.raises(StoreUnavailable):
            limiter.hit("alice")


def test_any_shared_store_can_have_a_policy() -> None:
    with SQLiteStore(":memory:") as store:
        limiter = Limiter("8/minute", name="x", store=store, on_store_error="closed")
        assert limiter.hit("alice")
        store.close()
        assert limiter.hit("alice").degraded
        assert limiter.health.outages == 1


def test_memory_needs_none() -> None:
    limiter = Limiter("1/minute", on_store_error="closed", deadline=1)
    assert limiter.hit("alice")
    assert not limiter.hit("alice").degraded
    assert limiter.health.available


def test_a_limiter_without_rules_needs_none(store: Flaky) -> None:
    store.fail()
    limiter = Limiter(name="x", store=store)
    assert limiter.hit("alice")
    assert limiter.health.available


def test_deadlines_go_to_stores_that_take_them(store: Flaky) -> None:
    limiter_on(store, deadline=0.5)
    limiter_on(store)
    assert store.deadlines == [0.5, None]
    with SQLiteStore(":memory:") as sqlite, pytest.raises(ConfigError, match="deadline"):
        Limiter("8/minute", name="x", store=sqlite, deadline=0.5)


def test_a_policy_that_is_none_is_refused(store: Flaky) -> None:
    with pytest.raises(ConfigError, match="on_store_error"):
        limiter_on(store, on_store_error="sometimes")


def test_every_operation_is_answered_in_an_outage_except_forgetting(store: Flaky) -> None:
    limiter = limiter_on(store)
    on_store = limiter.hold("alice", 2)
    store.fail()
    assert limiter.check("alice").degraded
    assert limiter.hit("alice").degraded
    limiter.record("alice")
    with limiter.hold("alice") as hold:
        hold.settle(5)
    assert on_store.release() == 0
    with pytest.raises(StoreUnavailable):
        limiter.reset("alice")
    assert store.asked == ["hold", "peek"]


@pytest.mark.parametrize("operation", ["hit", "check", "hold", "record", "release", "reset"])
def test_whatever_fails_first_finds_out(store: Flaky, operation: str) -> None:
    limiter = limiter_on(store)
    hold = limiter.hold("alice")
    store.fail()
    if operation == "release":
        hold.release()
    elif operation == "reset":
        with pytest.raises(StoreUnavailable, match="gone"):
            limiter.reset("alice")
    else:
        getattr(limiter, operation)("alice")
    assert not limiter.health.available
    assert limiter.health.failures == 1


@pytest.mark.parametrize("operation", ["hit", "hold", "record", "release", "reset"])
def test_whatever_charges_first_after_a_probe_leads_back(store: Flaky, time: Time, operation: str) -> None:
    limiter = limiter_on(store)
    hold = limiter.hold("alice")
    store.fail()
    limiter.hit("alice")
    let_probe(limiter, store, time)
    assert not limiter.health.available
    store.mend()
    let_probe(limiter, store, time)
    assert limiter.check("alice").degraded is False
    assert not limiter.health.available
    hold.release() if operation == "release" else getattr(limiter, operation)("alice")
    assert limiter.health.available
    assert not limiter.hit("alice").degraded


def test_a_store_that_can_be_read_but_not_written_is_not_back(store: Flaky, time: Time) -> None:
    limiter = limiter_on(store)
    store.write_error = StoreUnavailable("read only")
    limiter.hit("alice")
    for failures in (2, 3, 4):
        let_probe(limiter, store, time)
        assert limiter.hit("alice").degraded
        assert limiter.health.failures == failures
    assert limiter.health.outages == 1


def test_a_probe_that_finds_something_else_finds_a_store(store: Flaky, time: Time) -> None:
    limiter = limiter_on(store)
    store.fail()
    limiter.hit("alice")
    store.error = StoreConflict("a list")
    let_probe(limiter, store, time)
    store.mend()
    assert not limiter.hit("alice").degraded


def test_a_call_with_a_mistake_neither_ends_an_outage_nor_prolongs_it(store: Flaky, time: Time) -> None:
    limiter = limiter_on(store)
    store.fail()
    limiter.hit("alice")
    store.mend()
    time.now += LONGEST_PAUSE
    with probes_joined(), pytest.raises(ConfigError):
        limiter.hit({"user": "alice"})  # starts a probe that asks for the impossible as well
    assert limiter.hit("alice").degraded
    let_probe(limiter, store, time)
    with pytest.raises(ConfigError):
        limiter.hit({"user": "alice"})
    assert not limiter.health.available
    assert not limiter.hit("alice").degraded


@pytest.mark.parametrize("operation", ["release", "reset"])
def test_a_trial_that_ends_otherwise_is_open_to_another(
    store: Flaky, time: Time, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = limiter_on(store)
    hold = limiter.hold("alice")
    store.fail()
    limiter.hit("alice")
    store.mend()
    let_probe(limiter, store, time)

    class InterruptedCall(BaseException):
        pass

    store.write_error = InterruptedCall()  # type: ignore[assignment]
    with pytest.raises(InterruptedCall):
        hold.release() if operation == "release" else limiter.reset("alice")
    store.mend()
    assert not limiter.hit("alice").degraded


def test_a_conflict_is_answered_by_policy_and_is_no_outage(store: Flaky) -> None:
    limiter = limiter_on(store, on_store_error="closed")
    store.error = StoreConflict("a list")
    assert not limiter.hit("alice")
    store.mend()
    assert not limiter.hit("alice").degraded
    assert limiter.health.failures == 0


def test_closed_keeps_waiters_waiting_until_their_time_is_up(store: Flaky) -> None:
    clock = FakeClock()
    limiter = Limiter("8/minute", name="x", store=store, on_store_error="closed", clock=clock)
    store.fail()
    with pytest.raises(RateLimited) as refusal:
        limiter.wait("alice", timeout=2.5)
    assert refusal.value.decision.degraded
    assert clock.now - FakeClock().now == 2


def test_a_limiter_made_anew_in_an_outage_does_not_hand_out_its_share_again(store: Flaky) -> None:
    store.fail()
    hits = [limiter_on(store, on_store_error=local(0.25)).hit("alice") for _ in range(4)]
    assert [bool(hit) for hit in hits] == [True, True, False, False]
    other = Limiter("8/minute", name="y", store=store, on_store_error=local(0.25))
    assert other.hit("alice"), "which counts for itself"


def test_local_holds_are_given_back_to_memory(store: Flaky) -> None:
    limiter = limiter_on(store, on_store_error=local(0.5))
    store.fail()
    limiter.hit("alice")
    hold = limiter.hold("alice", 3)
    assert not limiter.hit("alice")
    hold.release()
    assert limiter.check("alice").remaining == 2
    assert "refund" not in store.asked


# --- The same for tasks ----------------------------------------------------------------------------------------------


async def test_tasks_are_answered_in_an_outage(store: Flaky) -> None:
    limiter = AsyncLimiter("8/minute", name="x", store=store, on_store_error=local(0.5))
    on_store = await limiter.hold("alice", 2)
    store.fail()
    decisions = await asyncio.gather(*(limiter.hit("alice") for _ in range(10)))
    assert all(decision.degraded for decision in decisions)
    assert sum(decision.allowed for decision in decisions) == 4
    assert (await limiter.check("alice")).degraded
    await limiter.record("alice")
    async with limiter.hold("bob") as hold:
        await hold.release()
    await on_store.release()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await limiter.reset("alice")
    assert limiter.health.failures == 10  # those that were under way
    assert limiter.health.outages == 1


async def call(limiter: AsyncLimiter, hold: AsyncHold, operation: str) -> None:
    await (hold.release() if operation == "release" else getattr(limiter, operation)("alice"))


@pytest.mark.parametrize("operation", ["hit", "check", "hold", "record", "release", "reset"])
async def test_whatever_a_task_fails_at_first_finds_out(store: Flaky, operation: str) -> None:
    limiter = AsyncLimiter("8/minute", name="x", store=store)
    hold = await limiter.hold("alice")
    store.fail()
    if operation == "reset":
        with pytest.raises(StoreUnavailable):
            await limiter.reset("alice")
    else:
        await call(limiter, hold, operation)
    assert not limiter.health.available
    assert limiter.health.failures == 1


@pytest.mark.parametrize("operation", ["hit", "hold", "record", "release", "reset"])
async def test_whatever_a_task_charges_first_after_a_probe_leads_back(
    store: Flaky, time: Time, operation: str
) -> None:
    limiter = AsyncLimiter("8/minute", name="x", store=store)
    hold = await limiter.hold("alice")
    store.fail()
    await limiter.hit("alice")
    for mended in (False, True):
        if mended:
            store.error = StoreConflict(
                "a list"
            )  # a store with something else in it is a store that is there
        time.now += LONGEST_PAUSE
        assert (await limiter.hit("starts the probe")).degraded
        await until_idle()
    store.mend()
    assert not limiter.health.available
    await call(limiter, hold, operation)
    assert limiter.health.available
    assert not (await limiter.hit("alice")).degraded


@pytest.mark.parametrize("operation", ["hit", "release", "reset"])
async def test_a_task_that_is_interrupted_on_trial_leaves_it_to_another(
    store: Flaky, time: Time, operation: str
) -> None:
    limiter = AsyncLimiter("8/minute", name="x", store=store)
    hold = await limiter.hold("alice")
    store.fail()
    await limiter.hit("alice")
    store.mend()
    time.now += LONGEST_PAUSE
    with pytest.raises(ConfigError):
        await limiter.hit({"user": "alice"})  # starts a probe that asks for the impossible as well
    await until_idle()
    assert (await limiter.hit("alice")).degraded
    time.now += LONGEST_PAUSE
    await limiter.hit("starts the probe")
    await until_idle()
    trial = asyncio.ensure_future(call(limiter, hold, operation))
    await asyncio.sleep(0)
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert not (await limiter.hit("alice")).degraded


async def test_tasks_have_deadlines_only_where_they_are_taken(store: Flaky) -> None:
    AsyncLimiter("8/minute", name="x", store=store, deadline=0.5)
    assert store.deadlines == [0.5]
    with SQLiteStore(":memory:") as sqlite, pytest.raises(ConfigError, match="deadline"):
        AsyncLimiter("8/minute", name="x", store=sqlite, deadline=0.5)
    assert AsyncLimiter("8/minute").health.available


async def until_idle() -> None:
    """Let all other tasks run to their end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)
