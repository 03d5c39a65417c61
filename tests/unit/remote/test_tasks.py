"""Tasks that share connections, per event loop."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate.errors import StoreTimeout, StoreUnavailable
from headgate.stores.remote import batching, tasks
from headgate.stores.remote.connecting import in_thread
from headgate.stores.remote.tasks import AsyncEngine
from tests.unit.remote.scripted import PATIENCE, ScriptedPeer, ScriptedTime, ScriptedWire


@pytest.fixture
async def peer() -> AsyncIterator[ScriptedPeer]:
    peer = ScriptedPeer()
    yield peer
    peer.open()


@pytest.fixture
async def engine(peer: ScriptedPeer) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(peer, PATIENCE)
    yield engine
    peer.open()
    await engine.aclose()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ScriptedTime:
    """The fake clock of an engine; `start` computes deadlines by the same clock."""
    clock = ScriptedTime()
    monkeypatch.setattr(tasks, "time", clock)
    return clock


def start(engine: AsyncEngine, request: str, deadline: float = PATIENCE, **rest: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(engine.call(request, tasks.time.monotonic() + deadline, **rest))


def block(clock: ScriptedTime, seconds: float) -> None:
    """Block the event loop for some seconds, by its own clock and by the clock of the engine."""
    clock.advance(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def outcomes(futures: list[asyncio.Future[Any]]) -> list[Any]:
    return await asyncio.gather(*futures, return_exceptions=True)


# --- Together --------------------------------------------------------------------------------------------------------


async def test_calls_of_one_event_loop_iteration_are_sent_together(
    engine: AsyncEngine, peer: ScriptedPeer
) -> None:
    assert await outcomes([start(engine, name) for name in "abc"]) == ["a", "b", "c"]
    assert peer.batches == [["a", "b", "c"]]


# --- One batch after another -----------------------------------------------------------------------------------------

HALF = batching.MOST_PER_BATCH


async def test_calls_started_by_a_reply_do_not_start_a_second_reader() -> None:
    """A former bug: with enough new calls for a second batch, a second task used the same connection."""
    peer = ScriptedPeer(follows=True)
    engine = AsyncEngine(peer, PATIENCE)
    peer.is_open = False
    given_back: list[asyncio.Future[Any]] = []

    def give_back(reply: str) -> None:
        peer.is_open = False
        given_back.append(start(engine, f"back {reply}"))

    held = [start(engine, f"held {number}", abandoned=give_back) for number in range(HALF)]
    await peer.until_sent_async(1)
    for call in held:
        call.cancel()
    peer.open()
    await peer.until_sent_async(2)
    for _ in range(5):
        await asyncio.sleep(0)  # a second task would start to wait for the same reply
    peer.open()
    async with asyncio.timeout(PATIENCE):
        assert await outcomes(given_back) == [f"back held {number}" for number in range(HALF)]
        await engine.aclose()
    assert len(peer.wires) == 1


async def test_a_second_batch_that_cannot_be_encoded_fails_both_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = ScriptedPeer(follows=True)
    usual = peer.converse

    def cannot_pack(calls: Any) -> Any:
        if calls[0].request == "b0":
            raise OverflowError("too large")
        return (yield from usual(calls))

    monkeypatch.setattr(peer, "converse", cannot_pack)
    engine = AsyncEngine(peer, PATIENCE)
    peer.is_open = False
    calls = [start(engine, f"a{number}") for number in range(HALF)]
    await peer.until_sent_async(1)
    calls += [start(engine, f"b{number}") for number in range(HALF)]
    async with asyncio.timeout(PATIENCE):
        found = await outcomes(calls)
    assert {str(error) for error in found} == {"OverflowError: too large"}
    assert peer.wires[0].is_closed
    peer.open()
    assert await start(engine, "afterwards") == "afterwards"
    await engine.aclose()


# --- Deadlines -------------------------------------------------------------------------------------------------------


class Connecting:
    """A connection attempt that waits for an event."""

    def __init__(self, peer: ScriptedPeer) -> None:
        self.has_begun = asyncio.Event()
        self.go_on = asyncio.Event()
        peer.before_connect = self._connect

    async def _connect(self) -> None:
        self.has_begun.set()
        await self.go_on.wait()


async def test_each_call_fails_at_its_deadline(
    engine: AsyncEngine, peer: ScriptedPeer, clock: ScriptedTime
) -> None:
    peer.is_open = False
    tight, patient = start(engine, "tight", 0.01), start(engine, "patient")
    await peer.until_sent_async(1)
    unsent = start(engine, "unsent", 0.01)
    clock.advance(0.01)
    with pytest.raises(StoreTimeout):
        await tight
    with pytest.raises(StoreTimeout):
        await unsent
    assert not patient.done()
    peer.open()
    assert await patient == "patient"
    assert peer.batches == [["tight", "patient"]]
    assert len(peer.wires) == 1


async def test_connecting_times_out(peer: ScriptedPeer, clock: ScriptedTime) -> None:
    engine = AsyncEngine(peer, 0.01)
    connecting = Connecting(peer)
    call = start(engine, "a", 0.05)
    await connecting.has_begun.wait()
    clock.advance(0.05)
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        await call
    peer.before_connect = lambda: None
    assert await start(engine, "b") == "b"
    await engine.aclose()


async def test_a_blocked_event_loop_is_not_an_outage_while_connecting(
    engine: AsyncEngine, peer: ScriptedPeer, clock: ScriptedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "GRACE", 0.1)  # blocking takes real time
    connecting = Connecting(peer)
    calls = [start(engine, f"{number}", 0.01) for number in range(100)]
    await connecting.has_begun.wait()
    block(clock, 2 * batching.GRACE)
    for _ in range(3):
        await asyncio.sleep(0)
    connecting.go_on.set()
    assert await outcomes(calls) == [f"{number}" for number in range(100)]


async def test_a_silent_connection_is_replaced_for_waiting_calls(
    peer: ScriptedPeer, clock: ScriptedTime
) -> None:
    engine = AsyncEngine(peer, 0.05)
    peer.is_open = False
    sent = start(engine, "sent", 0.05)
    await peer.until_sent_async(1)
    waiting = start(engine, "waiting")
    await asyncio.sleep(0)
    clock.advance(0.05)
    with pytest.raises(StoreTimeout):
        await sent
    await peer.until_sent_async(2)
    peer.open()
    assert await waiting == "waiting"
    assert [wire.is_closed for wire in peer.wires] == [True, False]
    await engine.aclose()


async def test_a_received_reply_is_not_late_if_the_event_loop_is_blocked_twice(
    engine: AsyncEngine, peer: ScriptedPeer, clock: ScriptedTime
) -> None:
    """For example by many callers that were just refused."""
    peer.is_open = False
    call = start(engine, "a", 0.01)
    await peer.until_sent_async(1)
    for _ in range(2):
        block(clock, 0.1)
        await asyncio.sleep(0)  # the event loop runs its timers
        await asyncio.sleep(0)
    peer.open()
    assert await call == "a"


# --- Cancelled callers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(12))
async def test_the_reply_to_a_cancelled_call_is_never_lost(
    engine: AsyncEngine, peer: ScriptedPeer, steps: int
) -> None:
    """The reply goes to the caller or to the cleanup, or the request was never sent."""
    released: list[Any] = []
    holding = asyncio.ensure_future(
        engine.call("hold", time.monotonic() + PATIENCE, abandoned=released.append)
    )
    for _ in range(steps):
        await asyncio.sleep(0)
    holding.cancel()
    await asyncio.wait([holding])
    await start(engine, "next")
    assert sum("hold" in batch for batch in peer.batches) == len(released) + (not holding.cancelled())


# --- Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble", [ConnectionResetError("gone"), struct.error("odd"), IndexError("none"), RuntimeError("closed")]
)
async def test_connection_exceptions_become_store_errors(
    engine: AsyncEngine, peer: ScriptedPeer, trouble: Exception
) -> None:
    peer.answer = lambda batch: trouble
    found = await outcomes([start(engine, name) for name in "ab"])
    assert [type(error) for error in found] == [StoreUnavailable] * 2
    assert found[0] is not found[1]
    peer.answer = list
    assert await start(engine, "c") == "c"


async def test_a_connection_made_in_a_thread_is_closed_if_no_call_waits_for_it(
    peer: ScriptedPeer,
) -> None:
    go_on, closed = threading.Event(), threading.Event()

    class Wire(ScriptedWire):
        def close(self) -> None:
            closed.set()

    def connect() -> Wire:
        go_on.wait(PATIENCE)
        return Wire(peer)

    connecting = asyncio.ensure_future(in_thread(connect))
    await asyncio.sleep(0)
    connecting.cancel()
    await asyncio.wait([connecting])
    go_on.set()
    assert await asyncio.to_thread(closed.wait, PATIENCE)


# --- Cancelled tasks ---------------------------------------------------------------------------------------------------


def cancel_other_tasks(*kept: asyncio.Future[Any]) -> None:
    """Cancel all tasks, like a program at shutdown."""
    for task in asyncio.all_tasks() - {asyncio.current_task(), *kept}:
        task.cancel()


@pytest.mark.parametrize("turns", range(6))
async def test_calls_work_after_all_tasks_were_cancelled(
    engine: AsyncEngine, peer: ScriptedPeer, turns: int
) -> None:
    """A task that is cancelled before its first step never runs."""
    peer.is_open = False
    cancelled = start(engine, "a")
    for _ in range(turns):
        await asyncio.sleep(0)
    cancel_other_tasks()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    peer.open()
    async with asyncio.timeout(PATIENCE):
        assert await start(engine, "b") == "b"
        await engine.aclose()
    assert all(wire.is_closed for wire in peer.wires)


async def test_calls_survive_the_cancellation_of_other_tasks(engine: AsyncEngine, peer: ScriptedPeer) -> None:
    """Sent calls are not affected; if a new connection was being made, it is made again."""
    connecting = Connecting(peer)
    waiting, cancelled = start(engine, "waiting"), start(engine, "cancelled")
    await connecting.has_begun.wait()
    cancelled.cancel()
    cancel_other_tasks(waiting)
    connecting.go_on.set()
    assert await waiting == "waiting"
    peer.is_open = False
    sent = start(engine, "sent")
    await peer.until_sent_async(2)
    cancel_other_tasks(sent)
    peer.open()
    assert await sent == "sent"
    assert peer.batches == [["waiting"], ["sent"]]
    assert len(peer.wires) == 1


async def test_silent_connections_time_out_after_a_failed_send(
    clock: ScriptedTime,
) -> None:
    peer = ScriptedPeer()
    engine = AsyncEngine(peer, 0.05)
    peer.is_open = False
    sent = start(engine, "sent")
    await peer.until_sent_async(1)
    waiting = start(engine, "waiting")
    await asyncio.sleep(0)
    usual = peer.converse

    def is_gone() -> Any:
        raise ConnectionResetError("gone")

    def cannot_send(calls: Any) -> Any:
        peer.converse = usual  # type: ignore[method-assign]
        peer.wires[0].receive = is_gone  # type: ignore[method-assign]
        yield is_gone()

    peer.converse = cannot_send  # type: ignore[method-assign]
    peer.open()
    assert [type(found) for found in await outcomes([sent, waiting])] == [str, StoreUnavailable]
    peer.is_open = False
    silent = start(engine, "silent", 0.05)
    await peer.until_sent_async(2)
    clock.advance(0.05)
    with pytest.raises(StoreTimeout):
        await silent
    peer.open()
    async with asyncio.timeout(PATIENCE):
        assert await start(engine, "afterwards") == "afterwards"
        await engine.aclose()
    assert len(peer.wires) == 3


# --- Event loops -----------------------------------------------------------------------------------------------------


def test_calls_in_progress_fail_when_the_event_loop_ends() -> None:
    peer = ScriptedPeer()
    engine = AsyncEngine(peer, PATIENCE)
    left: list[asyncio.Future[Any]] = []

    async def leave() -> None:
        peer.is_open = False
        left.append(start(engine, "a"))
        await peer.until_sent_async(1)
        left.append(start(engine, "b"))
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert all(future.cancelled() for future in left)  # `asyncio.run` cancels every task
    assert [wire.is_closed for wire in peer.wires] == [True]


def test_required_calls_are_sent_when_the_event_loop_ends() -> None:
    peer = ScriptedPeer()
    engine = AsyncEngine(peer, PATIENCE)

    async def hold() -> None:
        try:
            await engine.call("hold", tasks.time.monotonic() + PATIENCE)
            held.append(None)
            await asyncio.Event().wait()
        finally:
            peer.open()
            await engine.call("release", tasks.time.monotonic() + PATIENCE, must_send=True)

    async def leave() -> None:
        left.extend(asyncio.ensure_future(hold()) for _ in range(20))
        while len(held) < 20:  # noqa: ASYNC110  # all replies were received
            await asyncio.sleep(0)
        peer.is_open = False
        left.append(start(engine, "other"))
        await peer.until_sent_async(len(peer.batches) + 1)
        engine.tell("told", tasks.time.monotonic() + PATIENCE)

    held: list[None] = []
    left: list[asyncio.Future[Any]] = []
    asyncio.run(leave())
    sent = [request for batch in peer.batches for request in batch]
    assert (sent.count("release"), sent.count("told")) == (20, 1)
    assert all(wire.is_closed for wire in peer.wires)


def test_an_engine_can_be_closed_after_its_event_loop() -> None:
    peer = ScriptedPeer()
    engine = AsyncEngine(peer, PATIENCE)
    loop = asyncio.new_event_loop()

    async def call() -> Any:
        return await start(engine, "a")

    assert loop.run_until_complete(call()) == "a"
    loop.close()  # without the cleanup of asyncio.run
    engine.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        asyncio.run(call())


async def test_calls_in_progress_end_before_connections_are_closed(
    engine: AsyncEngine, peer: ScriptedPeer
) -> None:
    peer.is_open = False
    in_progress = start(engine, "a")
    await peer.until_sent_async(1)
    closing = asyncio.ensure_future(engine.aclose())
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match="closed"):
        await start(engine, "b")
    release = start(engine, "release", must_send=True)  # of a hold of a cancelled caller
    peer.open()
    assert await outcomes([in_progress, release]) == ["a", "release"]
    await closing
    assert peer.wires[0].is_closed


def test_a_forked_process_opens_a_new_connection() -> None:
    peer = ScriptedPeer()
    engine = AsyncEngine(peer, PATIENCE)

    async def call() -> Any:
        before = await start(engine, "a")
        engine.after_fork_in_child()
        return before, await start(engine, "b")

    assert asyncio.run(call()) == ("a", "b")
    assert len(peer.wires) == 2
