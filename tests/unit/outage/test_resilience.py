"""Limiters on a store that fails on command, in threads and in tasks."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Decision,
    Limiter,
    MemoryStore,
    RateLimited,
    Rule,
    SQLiteStore,
    StoreConflict,
    StoreError,
    StoreMisconfigured,
    StoreOverloaded,
    StoreTimeout,
    StoreUnavailable,
    concurrent,
    sliding_window,
)
from headgate._concurrency import call_later, call_later_async
from headgate.keys import Key
from headgate.outage import AsyncCircuit, Circuit
from headgate.outage.breaker import breaker_of
from headgate.outage.policies import local
from headgate.stores.base import Answer, AsyncGate, Gate, Guarantees, Receipts
from headgate.stores.request import Request
from headgate.testing import FakeClock
from tests.unit.outage.later import Later
from tests.unit.recorder import Recorder


class Flaky:
    """A memory store that acts as a remote store: it fails on command and lists its calls."""

    remote = True
    has_rules = False
    clock = None
    notes = None
    deadline = 1.0
    guarantees = Guarantees(shared=True)
    is_closed = False

    def __init__(self) -> None:
        self.memory = MemoryStore(clock=FakeClock())
        self.error: StoreError | None = None
        self.write_error: StoreError | None = None
        self.asked: list[str] = []
        self.deadlines: list[float | None] = []
        self.late: float = 0

    def fail(self) -> None:
        self.error = StoreUnavailable("it is gone")

    def mend(self) -> None:
        self.error = self.write_error = None

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        self.deadlines.append(deadline)
        return FlakyGate(
            self, self.memory.bind(limiter, rules), self.deadline if deadline is None else deadline
        )

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        return AsyncFlakyGate(self.bind(limiter, rules, deadline=deadline))

    def close(self) -> None:
        self.asked.append("close")

    async def aclose(self) -> None:
        self.close()

    def check(self, operation: str, deadline: float) -> None:
        """Raise the configured error, if any."""
        self.asked.append(operation)
        if self.error is not None:
            raise type(self.error)(*self.error.args)  # a new error, without the frames of other calls
        if self.late > deadline:
            raise StoreTimeout(f"no answer in {deadline:g} s")
        if self.write_error is not None and operation != "peek":
            raise type(self.write_error)(*self.write_error.args)


class FlakyGate:
    def __init__(self, store: Flaky, gate: Gate, deadline: float) -> None:
        self.store = store
        self.gate = gate
        self.deadline = deadline

    def decide(self, request: Request) -> Answer:
        self.store.check(request.operation, self.deadline)
        return self.gate.decide(request)

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        self.store.check("refund", self.deadline)
        self.gate.refund(receipts, cost, now)

    def reset(self, key: Key | None) -> None:
        self.store.check("reset", self.deadline)
        self.gate.reset(key)


class AsyncFlakyGate:
    """An async gate that yields to the event loop before each call."""

    def __init__(self, gate: FlakyGate) -> None:
        self.gate = gate

    async def decide(self, request: Request) -> Answer:
        await asyncio.sleep(0)
        return self.gate.decide(request)

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        await asyncio.sleep(0)
        self.gate.refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        await asyncio.sleep(0)
        self.gate.reset(key)


@pytest.fixture
def store() -> Flaky:
    return Flaky()


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    return Later.instead_of_timers(monkeypatch)


def limiter_on(store: Flaky, **options: Any) -> Limiter:
    return Limiter("8/minute", name="x", store=store, **options)


def test_remote_store_fails_open_by_default(store: Flaky) -> None:
    limiter = limiter_on(store)
    assert not limiter.hit("alice").degraded
    store.fail()
    for _ in range(10):
        decision = limiter.hit("alice")
        assert decision.allowed
        assert decision.degraded
    assert store.asked == ["hit", "hit"]
    assert repr(limiter.health) == "<Health: unavailable, 1 outages, 1 failures, 0 overloads, 10 degraded>"
    assert limiter.health.reason == "it is gone"


def test_local_store_raises_by_default() -> None:
    with SQLiteStore(":memory:") as store:
        limiter = Limiter("8/minute", name="x", store=store)
        store.close()
        with pytest.raises(StoreUnavailable):
            limiter.hit("alice")
        with pytest.raises(StoreUnavailable):
            limiter.hit("alice")


def test_memory_store_never_degrades() -> None:
    limiter = Limiter("1/minute", on_store_error="closed", deadline=1)
    assert limiter.hit("alice")
    assert not limiter.hit("alice").degraded
    assert limiter.health.available


def test_limiter_without_rules_never_degrades(store: Flaky) -> None:
    store.fail()
    limiter = Limiter(name="x", store=store)
    assert limiter.hit("alice")
    assert limiter.health.available


def test_deadline_is_passed_only_to_stores_that_support_it(store: Flaky) -> None:
    limiter_on(store, deadline=0.5)
    limiter_on(store)
    assert store.deadlines == [0.5, None, None, None, None], "and probes have the store's own"
    with SQLiteStore(":memory:") as sqlite, pytest.raises(ConfigError, match="deadline"):
        Limiter("8/minute", name="x", store=sqlite, deadline=0.5)


def test_policy_answers_every_operation_in_an_outage_except_reset(store: Flaky) -> None:
    limiter = limiter_on(store)
    on_store = limiter.hold("alice", 2)
    store.fail()
    assert limiter.check("alice").degraded
    assert limiter.hit("alice").degraded
    assert limiter.record("alice").degraded
    with limiter.hold("alice") as hold:
        hold.settle(5)
    assert on_store.release() == 0
    with pytest.raises(StoreUnavailable):
        limiter.reset("alice")
    assert store.asked == ["hold", "peek"]


@pytest.mark.parametrize(("policy", "is_admitted"), [("open", True), ("closed", False), (local(0.5), True)])
def test_policy_answers_renew_in_an_outage_and_the_hold_keeps_its_place(
    store: Flaky, policy: Any, is_admitted: bool
) -> None:
    limiter = Limiter(concurrent(2, lease="60s"), name="x", store=store, on_store_error=policy)
    hold = limiter.hold("alice")
    store.fail()
    renewed = hold.renew()
    assert (renewed.allowed, renewed.degraded) == (is_admitted, True)
    store.mend()
    limiter.ping()
    assert hold.renew() == limiter.check("alice", 0)
    hold.release()
    assert limiter.check("alice", 0).remaining == 2


def test_local_hold_is_renewed_and_released_locally(store: Flaky) -> None:
    limiter = Limiter(concurrent(2, lease="60s"), name="x", store=store, on_store_error=local(0.5))
    store.fail()
    hold = limiter.hold("alice")
    assert hold.renew().degraded
    store.mend()
    limiter.ping()
    assert hold.renew().degraded
    assert limiter.check("alice", 0).remaining == 2
    hold.release()
    store.fail()
    assert limiter.hold("alice")


def test_renew_of_an_uncounted_hold_changes_nothing(store: Flaky) -> None:
    limiter = Limiter(concurrent(2, lease="60s"), name="x", store=store, on_store_error="open")
    store.fail()
    hold = limiter.hold("alice")
    store.mend()
    limiter.ping()
    assert hold.renew() is hold.decision
    assert limiter.check("alice", 0).remaining == 2
    hold.release()
    assert not hold.renew()


def test_hook_sees_a_degraded_record(store: Flaky) -> None:
    hook = Recorder()
    limiter = limiter_on(store, hooks=[hook])
    limiter.record("alice")
    store.fail()
    limiter.record("alice")
    completed = [(call.operation, degraded) for call, degraded in hook.arguments("completed")]
    assert completed == [("record", False), ("record", True)]


def test_hold_is_degraded_if_its_extra_cost_was_not_counted(store: Flaky) -> None:
    limiter = limiter_on(store)
    counted, settled, exceeded = (limiter.hold("alice", 2) for _ in range(3))
    assert counted.settle(3) == 3
    store.fail()
    assert settled.settle(1) == 1
    assert exceeded.settle(3) == 3
    assert [hold.degraded for hold in (counted, settled, exceeded)] == [False, False, True]
    assert limiter.hold("alice").degraded, "the policy took it"


@pytest.mark.parametrize("operation", ["hit", "check", "hold", "record", "release", "reset"])
def test_first_failure_of_any_operation_opens_the_breaker(store: Flaky, operation: str) -> None:
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


def test_idle_limiter_recovers_by_probes(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store, on_store_error="closed")
    store.fail()
    limiter.hit("alice")
    for _ in range(3):
        later.probe()
    assert not limiter.health.available
    assert limiter.health.failures == 1, "probes are no calls"
    store.mend()
    later.probe()
    assert limiter.health.available
    assert later.is_idle
    assert not limiter.hit("alice").degraded


def test_readable_but_not_writable_store_stays_unavailable(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store)
    store.write_error = StoreUnavailable("out of memory")
    limiter.hit("alice")
    for _ in range(3):
        later.probe()
        assert limiter.hit("alice").degraded
    assert (limiter.health.outages, limiter.health.failures) == (1, 1)


def test_probe_with_a_conflict_ends_the_outage(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store)
    store.fail()
    limiter.hit("alice")
    store.error = StoreConflict("a list")
    later.probe()
    store.mend()
    assert not limiter.hit("alice").degraded


def test_request_with_an_invalid_key_is_not_used_as_a_probe(store: Flaky, later: Later) -> None:
    """Its error is raised before the store is called, and would look like a response of the store."""
    rule = sliding_window("5/minute", scope="user")
    first, second = (Limiter(rule, name=name, store=store) for name in ("first", "second"))
    store.fail()
    assert first.hit({"user": "ada"}).degraded
    with pytest.raises(ConfigError):
        second.hit({"usr": "ada"})
    with pytest.raises(StoreUnavailable):
        second.ping()
    assert not second.health.available
    store.mend()
    second.ping()
    assert second.health.available


def test_probes_use_no_units_of_any_key(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store)
    store.fail()
    limiter.hit("alice")
    later.probe()
    store.mend()
    later.probe()
    limiter.ping()
    assert limiter.check("alice", 0).remaining == 8
    assert limiter.check("ping", 0).remaining == 8


def test_limiters_on_one_store_share_one_probe(store: Flaky, later: Later) -> None:
    limiters = [Limiter("8/minute", name=str(number), store=store) for number in range(5)]
    store.fail()
    for limiter in limiters:
        assert limiter.hit("alice").degraded
    store.mend()
    del store.asked[:]
    later.probe()
    assert store.asked == ["peek", "record"]
    assert not any(limiter.hit("alice").degraded for limiter in limiters)


def test_closed_store_is_not_probed(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store)
    store.fail()
    limiter.hit("alice")
    store.is_closed = True
    later.probe()
    assert later.is_idle


def test_deleted_limiter_stops_probing(store: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Circuit, "_call_later", staticmethod(call_later))
    limiter = limiter_on(store)
    store.fail()
    before = set(threading.enumerate())
    limiter.hit("alice")
    (prober,) = set(threading.enumerate()) - before
    assert prober.daemon
    gone = weakref.ref(limiter)
    del limiter
    gc.collect()
    assert gone() is None, "a prober does not keep it"
    del store.asked[:]
    prober.join(10)
    assert not prober.is_alive()
    assert store.asked == []


def test_call_succeeds_if_no_probe_thread_can_start(store: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Circuit, "_call_later", staticmethod(call_later))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    limiter = limiter_on(store)
    store.fail()
    assert limiter.hit("alice").degraded


# --- Errors without an outage ----------------------------------------------------------------------------------------


def test_timeout_of_a_tighter_deadline_degrades_only_its_limiter(store: Flaky, later: Later) -> None:
    """Each limiter has its own policy, and a store that takes 5 ms is not down."""
    tight = limiter_on(store, deadline=0.003)
    closed = Limiter("8/minute", name="y", store=store, on_store_error="closed")
    store.late = 0.005
    for _ in range(5):
        assert tight.hit("alice").degraded
        assert closed.hit("alice").allowed
    assert closed.health.available
    assert tight.health.available
    assert (tight.health.outages, tight.health.failures, tight.health.degraded) == (0, 5, 5)
    later.probe()
    assert later.is_idle
    assert closed.health.available


def test_overload_is_refused_and_does_not_change_health(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store, on_store_error="open")
    store.error = StoreOverloaded("too many calls")
    for _ in range(3):
        decision = limiter.hit("alice")
        assert not decision
        assert decision.degraded
        assert decision.retry_after == 0.1
    assert limiter.health.available
    assert (limiter.health.overloads, limiter.health.outages, limiter.health.failures) == (3, 0, 0)
    assert later.is_idle
    store.mend()
    assert not limiter.hit("alice").degraded


def test_interrupted_call_does_not_change_health(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store, on_store_error="open")
    store.error = StoreError("a signal handler raised in the middle of a call")
    assert limiter.hit("alice").degraded
    assert limiter.health.available
    assert later.is_idle
    store.fail()
    limiter.hit("alice")
    store.error = StoreError("a signal handler raised in the middle of a call")
    later.probe()
    assert not limiter.health.available  # it may still be down
    store.mend()
    later.probe()
    assert limiter.health.available


def test_overload_can_use_the_failure_policy(store: Flaky) -> None:
    limiter = limiter_on(store, on_store_error="open", on_overload="policy")
    store.error = StoreOverloaded("too many calls")
    assert limiter.hit("alice").allowed
    with pytest.raises(ConfigError, match="on_overload"):
        limiter_on(store, on_overload="sometimes")


def test_unsent_probe_is_repeated(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store)
    store.fail()
    limiter.hit("alice")
    store.error = StoreOverloaded("too many calls")
    later.probe()
    assert not limiter.health.available
    store.mend()
    later.probe()
    assert limiter.health.available


# --- Misconfiguration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["open", "closed", "raise", local()])
def test_misconfigured_store_that_never_worked_raises_under_every_policy(store: Flaky, policy: Any) -> None:
    limiter = limiter_on(store, on_store_error=policy)
    store.error = StoreMisconfigured("wrong password")
    for _ in range(3):
        with pytest.raises(ConfigError, match="wrong password"):
            limiter.hit("alice")
    store.mend()
    assert not limiter.hit("alice").degraded


def test_misconfigured_store_that_worked_before_uses_the_policy_and_logs_an_error(
    store: Flaky, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = limiter_on(store, on_store_error="closed")
    limiter.hit("alice")
    store.error = StoreMisconfigured("wrong password")
    for _ in range(3):
        decision = limiter.hit("alice")
        assert not decision
        assert decision.degraded
    assert (limiter.health.state, limiter.health.reason) == ("misconfigured", "wrong password")
    assert not limiter.health.available
    assert limiter.health.outages == 0
    assert later.is_idle, "the store answers, so every call finds out"
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "the store is misconfigured, its limiters answer by their policies: wrong password"
    ]
    store.mend()
    assert not limiter.hit("alice").degraded
    assert limiter.health.available


def test_release_on_a_misconfigured_store_does_not_raise(store: Flaky) -> None:
    limiter = limiter_on(store)
    hold = limiter.hold("alice")
    store.error = StoreMisconfigured("wrong password")
    hold.release()
    assert limiter.health.state == "misconfigured"


def test_missing_permission_for_reset_does_not_change_health(store: Flaky) -> None:
    limiter = limiter_on(store)
    limiter.hit("alice")
    store.error = StoreMisconfigured("may not administer")
    with pytest.raises(StoreMisconfigured):
        limiter.reset("alice")
    assert limiter.health.available


def test_store_misconfigured_after_an_outage_raises_if_it_never_worked(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store)
    store.fail()
    limiter.hit("alice")
    store.error = StoreMisconfigured("wrong password")
    later.probe()
    with pytest.raises(StoreMisconfigured):
        limiter.hit("alice")


# --- Ping ------------------------------------------------------------------------------------------------------------


def test_ping_checks_that_the_store_can_count(store: Flaky) -> None:
    limiter = limiter_on(store)
    limiter.ping()
    assert store.asked == ["record"]
    store.error = StoreMisconfigured("wrong password")
    assert limiter.hit("alice").degraded, "it has worked once"
    store.mend()
    limiter.ping()
    assert limiter.health.available


def test_ping_raises_the_store_error(store: Flaky, later: Later) -> None:
    limiter = limiter_on(store, on_store_error="open", deadline=0.001)
    store.error = StoreMisconfigured("wrong password")
    with pytest.raises(ConfigError, match="wrong password"):
        limiter.ping()
    store.error = StoreTimeout("hangs")
    with pytest.raises(StoreUnavailable, match="hangs"):
        limiter.ping()
    assert not limiter.health.available
    store.mend()
    limiter.ping()
    assert limiter.health.available


def test_failed_ping_of_a_store_that_worked_changes_health(store: Flaky) -> None:
    limiter = limiter_on(store)
    limiter.ping()
    store.error = StoreMisconfigured("wrong password")
    with pytest.raises(StoreMisconfigured):
        limiter.ping()
    assert limiter.health.state == "misconfigured"


def test_ping_without_a_shared_store_or_rules_does_nothing(store: Flaky) -> None:
    Limiter("5/minute").ping()
    store.fail()
    Limiter(name="x", store=store).ping()
    assert store.asked == []


def test_ping_checks_sqlite_stores_too() -> None:
    with SQLiteStore(":memory:") as store:
        limiter = Limiter("8/minute", name="x", store=store)
        limiter.ping()
        store.close()
        with pytest.raises(StoreUnavailable):
            limiter.ping()


def test_wait_retries_under_closed_until_its_timeout(store: Flaky) -> None:
    clock = FakeClock()
    limiter = Limiter("8/minute", name="x", store=store, on_store_error="closed", clock=clock)
    store.fail()
    with pytest.raises(RateLimited) as refusal:
        limiter.wait("alice", timeout=2.5)
    assert refusal.value.decision.degraded
    assert clock.now - FakeClock().now == 2


def test_recreated_limiter_keeps_its_local_counts_in_an_outage(store: Flaky) -> None:
    store.fail()
    hits = [limiter_on(store, on_store_error=local(0.25)).hit("alice") for _ in range(4)]
    assert [bool(hit) for hit in hits] == [True, True, False, False]
    other = Limiter("8/minute", name="y", store=store, on_store_error=local(0.25))
    assert other.hit("alice"), "which counts for itself"


# --- Async limiters --------------------------------------------------------------------------------------------------


async def test_policy_answers_async_calls_in_an_outage(store: Flaky) -> None:
    limiter = AsyncLimiter("8/minute", name="x", store=store, on_store_error=local(0.5))
    on_store = await limiter.hold("alice", 2)
    store.fail()
    decisions = await asyncio.gather(*(limiter.hit("alice") for _ in range(10)))
    assert all(decision.degraded for decision in decisions)
    assert sum(decision.allowed for decision in decisions) == 4
    assert (await limiter.check("alice")).degraded
    assert (await limiter.record("alice")).degraded
    async with limiter.hold("bob") as hold:
        await hold.release()
    await on_store.release()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await limiter.reset("alice")
    assert limiter.health.failures == 10  # the concurrent hits
    assert limiter.health.outages == 1


async def test_cancelled_task_does_not_change_health(store: Flaky) -> None:
    limiter = AsyncLimiter("8/minute", name="x", store=store)
    call = asyncio.ensure_future(limiter.hit("alice"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert limiter.health.available


def test_new_event_loop_detects_recovery_without_the_old_prober(
    store: Flaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop of the prober is closed."""
    monkeypatch.setattr(AsyncCircuit, "_call_later", staticmethod(call_later_async))
    limiter = AsyncLimiter("8/minute", name="x", store=store, on_store_error="closed")
    store.fail()
    assert asyncio.run(hit(limiter)).degraded
    store.mend()
    breaker = breaker_of(store)
    breaker._monotonic = lambda: breaker._probed_by
    assert not asyncio.run(hit(limiter)).degraded
    assert limiter.health.available


async def hit(limiter: AsyncLimiter) -> Decision:
    return await limiter.hit("alice")
