"""Hooks receive all events and never change or break a call."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Decision,
    Limiter,
    MemoryStore,
    RateLimited,
    Rule,
    StoreUnavailable,
)
from headgate._sync.gates import Observed
from headgate.hooks import Call, Hook
from headgate.observe import LogHook
from headgate.observe.prometheus import PrometheusHook
from headgate.policy import LivePolicy, Policy
from headgate.stores import Gate
from headgate.stores.counters import MemoryGate
from headgate.testing import FakeClock
from tests.unit.processes import forking, in_child
from tests.unit.recorder import Recorder


class Broken(Hook):
    """Raises an error for every event."""

    def __init__(self) -> None:
        self.calls = 0

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        self.calls += 1
        raise RuntimeError("a hook must not do this")

    def settled(self, call: Call, cost: int | None) -> None:
        raise RuntimeError("nor this")

    attached = completed = failed = settled  # type: ignore[assignment]


def test_hook_receives_all_events_in_order() -> None:
    recorder = Recorder()
    limiter = Limiter("2/minute", name="login", hooks=[recorder])
    admitted = limiter.hit("a")
    checked = limiter.check("a", 2)
    hold = limiter.hold("a", tier="pro")
    refused = limiter.hit("a")
    hold.release()
    limiter.record("a", 3)
    limiter.reset("a")
    assert recorder.events == [
        ("attached", limiter, limiter.store),
        ("decided", Call("login", "hit", "a", 1, None), admitted),
        ("decided", Call("login", "check", "a", 2, None), checked),
        ("decided", Call("login", "hold", "a", 1, "pro"), hold.decision),
        ("decided", Call("login", "hit", "a", 1, None), refused),
        ("completed", Call("login", "refund", None, 1, None), False),
        ("settled", Call("login", "hold", "a", 1, "pro"), 0),
        ("completed", Call("login", "record", "a", 3, None), False),
        ("completed", Call("login", "reset", "a", 0, None), False),
    ]
    assert not refused
    assert all(0 <= seconds < 60 for seconds in recorder.seconds)


async def test_hook_receives_all_events_of_an_async_limiter() -> None:
    recorder = Recorder()
    limiter = AsyncLimiter("1/minute", hooks=[recorder])
    async with limiter.hold("a") as hold:
        assert not await limiter.hit("a")
    await hold.release()
    await limiter.record("a")
    await limiter.reset("a")
    assert [(event[0], event[1].operation) for event in recorder.events[1:]] == [
        ("decided", "hold"),
        ("decided", "hit"),
        ("settled", "hold"),
        ("completed", "record"),
        ("completed", "reset"),
    ]


def test_hold_is_settled_once() -> None:
    recorder = Recorder()
    limiter = Limiter("5/minute", hooks=[recorder])
    hold = limiter.hold("a", 2)
    hold.settle(3)
    hold.settle(1)
    hold.release()
    refused = limiter.hold("a", 5)
    del hold, refused
    gc.collect()
    assert [event[2] for event in recorder.events if event[0] == "settled"] == [3]


def test_unsettled_hold_is_reported_when_garbage_collected() -> None:
    recorder = Recorder()
    hold = Limiter("5/minute", hooks=[recorder]).hold("a")
    assert hold
    del hold
    gc.collect()
    assert recorder.events[-1][0] == "settled"
    assert recorder.events[-1][2] is None


class NoRefunds(MemoryStore):
    """A store that fails on refunds."""

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        return NoRefundsGate(self._counters, limiter, rules)


class NoRefundsGate(MemoryGate):
    def refund(self, *arguments: Any) -> None:
        raise StoreUnavailable("gone")


def test_hold_is_settled_even_if_its_refund_fails() -> None:
    recorder = Recorder()
    hold = Limiter("5/minute", name="x", store=NoRefunds(), hooks=[recorder]).hold("a")
    with pytest.raises(StoreUnavailable):
        hold.release()
    del hold
    gc.collect()
    assert [event[0] for event in recorder.events[2:]] == ["failed", "settled"]
    assert recorder.events[-1][2] == 0


def test_hook_receives_failures() -> None:
    recorder = Recorder()
    limiter = Limiter("5/minute", hooks=[recorder])
    with pytest.raises(CostTooHigh):
        limiter.hit("a", 6)
    with pytest.raises(ConfigError):
        limiter.record("a", -1)
    assert [event[0::2] for event in recorder.events[1:]] == [
        ("failed", CostTooHigh),
        ("failed", ConfigError),
    ]


def test_a_broken_hook_is_logged_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    broken, recorder = Broken(), Recorder()
    watched = Limiter("3/minute", clock=clock, hooks=[broken, recorder])
    plain = Limiter("3/minute", clock=clock)
    for _ in range(5):
        assert watched.hit("a") == plain.hit("a")
    watched.reset("a")
    with watched.hold("a") as hold:
        hold.settle(2)
    with pytest.raises(CostTooHigh):
        watched.hit("a", 9)
    assert broken.calls == 6
    assert [event[0] for event in recorder.events].count("decided") == 6
    [record] = caplog.records
    assert record.name == "headgate"
    assert record.levelno == logging.ERROR
    assert "Broken" in record.message
    assert record.exc_info


def test_two_broken_hooks_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    limiter = Limiter("3/minute", hooks=[Broken(), Broken()])
    limiter.hit("a")
    assert len(caplog.records) == 2


def test_an_interrupt_is_not_swallowed() -> None:
    class Interrupted(Hook):
        def decided(self, call: Call, decision: Decision, seconds: float) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Limiter("3/minute", hooks=[Interrupted()]).hit("a")


def test_limiter_without_hooks_uses_the_gate_of_the_store() -> None:
    recorded, plain = Limiter("3/minute", hooks=[Recorder()]), Limiter("3/minute")
    assert isinstance(plain.gate, MemoryGate)
    assert isinstance(recorded.gate, Observed)


def test_hook_receives_events_of_guard_and_wait() -> None:
    recorder = Recorder()
    limiter = Limiter("1/minute", hooks=[recorder], clock=FakeClock())

    @limiter.guard("a")
    def guarded() -> None: ...

    guarded()
    with pytest.raises(RateLimited):
        guarded()
    assert limiter.wait("a")
    assert [event[2].allowed for event in recorder.events[1:]] == [True, False, False, True]


@forking
def test_child_process_reports_store_up_again() -> None:
    registry = CollectorRegistry()
    hook = PrometheusHook(registry=registry)
    limiter = Limiter("5/minute", name="login", hooks=[hook])
    limiter.hit("ada")

    def is_reported() -> bool:
        hook._up.labels("login").set(0)  # as in the separate file of a child process
        limiter.hit("ada")
        return registry.get_sample_value("headgate_store_up", {"limiter": "login"}) == 1

    assert in_child(is_reported)


@pytest.mark.parametrize(
    ("hooks", "given"),
    [
        ([print], "[<built-in function print>]"),
        ([LogHook], "[<class "),
        ([Recorder(), None], "[<"),
        ("log", "'log'"),
        (print, "<built-in function print>"),
        (LogHook(), "<headgate.observe.logs.LogHook "),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda hooks: Limiter("5/minute", hooks=hooks),
        lambda hooks: AsyncLimiter("5/minute", hooks=hooks),
        lambda hooks: LivePolicy(Policy({}), hooks=hooks),
        lambda hooks: LivePolicy(Policy({}), shadow_hooks=hooks),
    ],
    ids=["sync", "async", "policy", "shadow"],
)
def test_invalid_hooks_are_refused_at_construction(
    make: Callable[[Any], Any], hooks: Any, given: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(hooks)
    message = f"hooks= is a list like [LogHook()], of objects of subclasses of Hook, not {given}"
    assert str(caught.value).startswith(message)
