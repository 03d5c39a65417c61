"""Tests of threads that share connections: one thread leads, the others wait for their replies."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headgate.errors import StoreError, StoreTimeout, StoreUnavailable
from headgate.stores.base import REENTERED
from headgate.stores.remote import connecting, threads
from headgate.stores.remote.batching import GRACE, OVER
from headgate.stores.remote.threads import ThreadEngine
from tests.unit.processes import Interrupted
from tests.unit.remote.scripted import PATIENCE, ScriptedPeer, ScriptedTime, ScriptedWire


@pytest.fixture
def peer() -> ScriptedPeer:
    return ScriptedPeer()


@pytest.fixture
def engine(peer: ScriptedPeer) -> ThreadEngine:
    return ThreadEngine(peer, PATIENCE)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as pool:
        yield pool


def call(engine: ThreadEngine, request: str, deadline: float = PATIENCE, **rest: Any) -> Any:
    return engine.call(request, time.monotonic() + deadline, **rest)


def waiting(engine: ThreadEngine) -> int:
    """Return how many calls wait to be sent."""
    return len(engine._dispatcher._batcher.waiting)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happens"
        os.sched_yield()


# --- Together --------------------------------------------------------------------------------------------------------


def test_a_call_made_while_another_thread_works_is_sent_by_that_thread(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor
) -> None:
    call(engine, "warm")
    wire, is_working, go_on = peer.wires[0], threading.Event(), threading.Event()
    usual = wire.receive

    def receive() -> Any:
        is_working.set()
        go_on.wait(PATIENCE)
        return usual()

    wire.receive = receive  # type: ignore[method-assign]
    first = pool.submit(call, engine, "first")
    assert is_working.wait(PATIENCE)
    others = [pool.submit(call, engine, f"{number}") for number in range(5)]
    until(lambda: len(engine._dispatcher._new) == 5)
    go_on.set()
    assert first.result(PATIENCE) == "first"
    assert [job.result(PATIENCE / 2) for job in others] == [f"{number}" for number in range(5)]


# --- Deadlines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ScriptedTime:
    """The fake clock of an engine; deadlines of calls must use it too."""
    clock = ScriptedTime()
    monkeypatch.setattr(threads, "time", clock)
    return clock


def call_at(clock: ScriptedTime, engine: ThreadEngine, request: str, deadline: float = PATIENCE) -> Any:
    return engine.call(request, clock.monotonic() + deadline)


def test_a_leader_past_its_deadline_hands_over_to_another_thread(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor, clock: ScriptedTime
) -> None:
    peer.is_open = False
    leader = pool.submit(call_at, clock, engine, "leader", 0.01)
    peer.until_sent(1)
    follower = pool.submit(call_at, clock, engine, "follower")
    until(lambda: waiting(engine) == 1)
    clock.advance(0.01)
    with pytest.raises(StoreTimeout):
        leader.result(PATIENCE)
    assert not follower.done()
    peer.open()
    assert follower.result(PATIENCE) == "follower"
    assert len(peer.wires) == 1  # the late reply was read, by the follower


def test_a_blocked_process_is_not_an_outage_while_connecting(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor, clock: ScriptedTime
) -> None:
    connecting, go_on = hold_connections(peer)
    jobs = [pool.submit(call_at, clock, engine, f"{number}", 0.01) for number in range(40)]
    assert connecting.wait(PATIENCE)
    until(lambda: waiting(engine) == 40)
    clock.advance(0.02 + GRACE)
    until(lambda: engine._dispatcher._batcher.alarm > clock.monotonic())  # a thread checked the deadlines
    go_on.set()
    assert [job.result(PATIENCE) for job in jobs] == [f"{number}" for number in range(40)]


def test_threads_wait_until_the_end_of_the_grace_period(engine: ThreadEngine, clock: ScriptedTime) -> None:
    """Polling would prevent the leader from reading the replies."""
    waits: list[float] = []
    call = threads.ThreadCall("late", clock.monotonic() + 1, engine._dispatcher.to_wake)
    engine._dispatcher._batcher.add(call)
    clock.advance(3)
    engine._dispatcher._batcher.expire(clock.monotonic())

    class Recorder:
        def wait(self, seconds: float) -> None:
            waits.append(seconds)

    call.wakeup = Recorder()  # type: ignore[assignment]
    engine._dispatcher._wait(call, False)
    assert waits == [GRACE]


def hold_connections(peer: ScriptedPeer) -> tuple[threading.Event, threading.Event]:
    """Block connecting; return two events: connecting has started, and connecting may continue."""
    has_begun, go_on = threading.Event(), threading.Event()

    def connect() -> None:
        has_begun.set()
        go_on.wait(PATIENCE)

    peer.before_connect = connect
    return has_begun, go_on


def test_connecting_counts_towards_the_deadline(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor, clock: ScriptedTime
) -> None:
    """This includes name resolution, handshake and login."""
    connecting, go_on = hold_connections(peer)
    early = pool.submit(call_at, clock, engine, "a", 0.01)
    assert connecting.wait(PATIENCE)
    clock.advance(0.01)
    with pytest.raises(StoreTimeout):
        early.result(PATIENCE)
    go_on.set()
    assert call_at(clock, engine, "b") == "b"
    assert peer.batches == [["b"]]
    assert len(peer.wires) == 1  # the late connection is used


def test_a_connection_made_after_the_timeout_is_closed(
    peer: ScriptedPeer, pool: ThreadPoolExecutor, clock: ScriptedTime
) -> None:
    engine = ThreadEngine(peer, 0.01)
    connecting, go_on = hold_connections(peer)
    given_up = pool.submit(call_at, clock, engine, "a", 0.01)
    assert connecting.wait(PATIENCE)
    clock.advance(0.01)
    with pytest.raises(StoreUnavailable):
        given_up.result(PATIENCE)
    go_on.set()
    until(lambda: peer.wires and peer.wires[0].is_closed)
    assert call_at(clock, engine, "b") == "b"
    assert [wire.is_closed for wire in peer.wires] == [True, False]


# --- Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble", [ConnectionResetError("gone"), struct.error("odd"), IndexError("none"), ValueError("no")]
)
def test_connection_exceptions_become_store_errors(
    engine: ThreadEngine, peer: ScriptedPeer, trouble: Exception
) -> None:
    call(engine, "warm")
    peer.answer = lambda batch: trouble
    with pytest.raises(StoreUnavailable, match=str(trouble)):
        call(engine, "a")
    peer.answer = list
    assert call(engine, "b") == "b"
    assert [wire.is_closed for wire in peer.wires] == [True, False]


def test_failure_to_start_a_thread_becomes_a_store_error(
    engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(connecting, "start_new_thread", refuse)
    with pytest.raises(StoreUnavailable, match="can't start new thread"):
        call(engine, "a")
    monkeypatch.undo()
    assert call(engine, "b") == "b"


def test_a_connection_closed_by_the_server_is_detected_before_use(
    engine: ThreadEngine, peer: ScriptedPeer
) -> None:
    call(engine, "a")
    peer.wires[0].has_ended = True
    engine._dispatcher._heard = 0.0  # like after a pause
    assert call(engine, "b") == "b"
    assert [wire.is_closed for wire in peer.wires] == [True, False]


def test_reconnecting_does_not_wait_for_the_previous_leader(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor, clock: ScriptedTime
) -> None:
    call_at(clock, engine, "a")
    peer.wires[0].has_ended = True
    clock.advance(2 * threads.PAUSE)
    job = pool.submit(call_at, clock, engine, "b")
    try:
        assert job.result(PATIENCE) == "b"
    finally:
        clock.advance(PATIENCE)


# --- Interrupted threads ---------------------------------------------------------------------------------------------


def interrupted_in(wire: ScriptedWire, step: str, before: bool = True) -> None:
    """Raise KeyboardInterrupt in the next use of a connection, before or after the real call."""
    usual = getattr(wire, step)

    def raise_once(*args: Any) -> Any:
        setattr(wire, step, usual)
        if not before:
            usual(*args)
        raise KeyboardInterrupt

    setattr(wire, step, raise_once)


def test_an_interrupted_leader_hands_over_to_another_thread(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor
) -> None:
    call(engine, "warm")
    peer.is_open = False
    go_on = threading.Event()
    usual = peer.wires[0].wait

    def interrupt(seconds: float) -> bool:
        go_on.wait(PATIENCE)
        peer.wires[0].wait = usual  # type: ignore[method-assign]
        raise KeyboardInterrupt

    peer.wires[0].wait = interrupt  # type: ignore[method-assign]
    leader = pool.submit(call, engine, "leader")
    peer.until_sent(2)
    followers = [pool.submit(call, engine, f"{number}") for number in range(5)]
    until(lambda: waiting(engine) == 5)
    go_on.set()
    with pytest.raises(KeyboardInterrupt):
        leader.result(PATIENCE)
    peer.open()
    assert [job.result(PATIENCE) for job in followers] == [f"{number}" for number in range(5)]
    assert len(peer.wires) == 1


@pytest.mark.parametrize("step", ["send", "receive"])
@pytest.mark.parametrize("before", [True, False])
def test_a_connection_is_not_reused_after_an_interrupt(
    engine: ThreadEngine, peer: ScriptedPeer, step: str, before: bool
) -> None:
    call(engine, "warm")
    interrupted_in(peer.wires[0], step, before)
    with pytest.raises(KeyboardInterrupt):
        call(engine, "a")
    assert call(engine, "b") == "b"
    assert [wire.is_closed for wire in peer.wires] == [True, False]


def test_waiting_threads_reconnect_at_once_after_an_interrupt(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor
) -> None:
    call(engine, "warm")
    peer.is_open = False
    first = pool.submit(call, engine, "first")
    peer.until_sent(2)
    others = [pool.submit(call, engine, f"{number}") for number in range(3)]
    until(lambda: waiting(engine) == 3)
    interrupted_in(peer.wires[0], "receive")
    peer.open()
    with pytest.raises(KeyboardInterrupt):
        first.result(PATIENCE)
    assert [job.result(PATIENCE) for job in others] == ["0", "1", "2"]  # these had not been sent


def test_a_reentrant_call_is_refused(engine: ThreadEngine, peer: ScriptedPeer) -> None:
    """For example from a signal handler or `__del__`: it must neither deadlock nor use the busy connection."""
    found: list[StoreError] = []

    def call_again(batch: list[Any]) -> Any:
        try:
            call(engine, "inner")
        except StoreError as error:
            found.append(error)
        return batch

    peer.answer = call_again
    assert call(engine, "outer") == "outer"
    assert [(type(error), str(error)) for error in found] == [(StoreError, REENTERED)]  # not an outage


# --- The end ---------------------------------------------------------------------------------------------------------


def test_a_thread_wakes_up_even_if_its_waker_is_interrupted(engine: ThreadEngine) -> None:
    dispatcher = engine._dispatcher
    call = threads.ThreadCall("a", 0.0, dispatcher.to_wake)
    woken: list[None] = []

    class InterruptedWakeUp:
        def set(self) -> None:
            woken.append(None)
            if len(woken) == 1:
                raise Interrupted

    call.wakeup = InterruptedWakeUp()  # type: ignore[assignment]
    dispatcher.to_wake.append(call)
    with pytest.raises(Interrupted):
        dispatcher._wake_next()
    dispatcher._wake_next()
    assert len(woken) == 2
    assert not dispatcher.to_wake


def test_an_interrupted_delivery_can_be_repeated() -> None:
    """Otherwise its thread would sleep until the end of the grace period."""

    class Interrupting(deque[threads.ThreadCall]):
        def append(self, call: threads.ThreadCall) -> None:
            raise Interrupted

    call = threads.ThreadCall("a", 0.0, Interrupting())
    with pytest.raises(Interrupted):
        call.deliver("reply", None)
    assert call.state != OVER


def test_calls_in_progress_end_before_a_connection_is_closed(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor
) -> None:
    peer.is_open = False
    in_progress = pool.submit(call, engine, "a")
    peer.until_sent(1)
    engine.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        call(engine, "b")
    assert not peer.wires[0].is_closed
    peer.open()
    assert in_progress.result(PATIENCE) == "a"
    assert peer.wires[0].is_closed


def test_close_closes_a_connection_with_an_unread_reply(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor, clock: ScriptedTime
) -> None:
    peer.is_open = False
    late = pool.submit(call_at, clock, engine, "late", 0.01)
    peer.until_sent(1)
    clock.advance(0.01)
    with pytest.raises(StoreTimeout):
        late.result(PATIENCE)
    assert not peer.wires[0].is_closed
    engine.close()
    assert peer.wires[0].is_closed


def test_a_connection_made_after_the_store_was_closed_is_closed(
    engine: ThreadEngine, peer: ScriptedPeer, pool: ThreadPoolExecutor, clock: ScriptedTime
) -> None:
    connecting, go_on = hold_connections(peer)
    early = pool.submit(call_at, clock, engine, "a", 0.01)
    assert connecting.wait(PATIENCE)
    clock.advance(0.01)
    with pytest.raises(StoreTimeout):
        early.result(PATIENCE)
    engine.close()
    go_on.set()
    until(lambda: peer.wires and peer.wires[0].is_closed)


def test_a_process_forked_during_a_call_does_not_read_its_reply(
    engine: ThreadEngine, peer: ScriptedPeer
) -> None:
    """A signal handler may fork; the child must not read the reply for the parent."""
    call(engine, "warm")
    wire = peer.wires[0]

    def fork(seconds: float) -> bool:
        engine.after_fork_in_child()
        return True

    wire.wait = fork  # type: ignore[method-assign]
    peer.is_open = False
    with pytest.raises(StoreError, match="forked"):
        call(engine, "a")
    peer.is_open = True
    assert call(engine, "b") == "b"
    assert len(peer.wires) == 2
    assert not wire.is_closed
