"""The driver for threads: one caller leads, the others wait for what it brings.

A caller that finds no round trip under way leads: it sends its own call and all that have gathered, waits for the reply, and
hands the others theirs. Before it leaves with its own, it sends those that have come meanwhile, and one of their callers
leads from there. So all threads together use the same few connections as tasks do.

To lead is only to wait on a connection on behalf of others. Everything else (sending, receiving, handing over) never waits,
and happens under one lock, by whichever thread comes along. So a leader that is gone, because a signal handler raised or its
own deadline passed, is replaced by the next thread that looks, and two leaders do no harm. A step that was interrupted
leaves its connection in doubt: that is closed, and what was under way on it fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.base import REENTERED, release_down_to
from headgate.stores.remote.batching import OVER, Abandoned, Batcher, Call, Lane
from headgate.stores.remote.baton import Baton
from headgate.stores.remote.connecting import Connecting
from headgate.stores.remote.peer import PENDING, Peer, Talk, Wire

T = TypeVar("T")

LEASE = 0.05
"""Seconds for which a leader leads without saying so again, and after which those that wait look for themselves."""


class ThreadCall(Call):
    """A call that a thread waits for."""

    __slots__ = ("baton", "error", "has_given_up", "reply")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.baton = Baton()
        self.reply: Any = None
        self.error: BaseException | None = None
        self.has_given_up = False

    @property
    def is_abandoned(self) -> bool:
        return self.has_given_up

    def deliver(self, reply: Any) -> None:
        self.reply = reply
        self.baton.set()

    def deliver_error(self, error: BaseException) -> None:
        self.error = error
        self.baton.set()


class Work:
    """What is under way on a lane.

    Attributes:
        connecting: The connection that is being made.
        connected: Set when that is over.
        connect_by: When it is given up.
        talk: The batch that is under way.
        leader: The call whose thread waits here on behalf of all, and until when it does so without saying so again.
        led_until: See there.
        heard: When the server has last answered.
        is_in_doubt: Whether a step has begun here and not ended.
    """

    __slots__ = (
        "connect_by",
        "connected",
        "connecting",
        "heard",
        "is_in_doubt",
        "leader",
        "led_until",
        "talk",
    )

    def __init__(self) -> None:
        self.connecting: Connecting[Wire] | None = None
        self.connected = Baton()
        self.connect_by = 0.0
        self.talk: Talk | None = None
        self.leader: Call | None = None
        self.led_until = 0.0
        self.heard = 0.0
        self.is_in_doubt = False


class ThreadEngine:
    """Calls of all threads of this process to one server.

    Args:
        peer: The server.
        deadline: Seconds after which a connection that is silent is given up.
    """

    def __init__(self, peer: Peer, deadline: float) -> None:
        self._peer = peer
        self._deadline = deadline
        self._is_closed = False
        self._crew = Crew(peer, deadline)
        watch(self)

    def call(
        self,
        request: Any,
        due: float,
        source: str = "",
        *,
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> Any:
        """Send a request, once, and return its reply.

        If the caller is interrupted, a request that has not left does not leave, unless it must; the reply to one that has
        left goes to `abandoned` when some thread reads it.

        Raises:
            StoreError: There is no reply.
        """
        if self._is_closed:
            raise StoreUnavailable(f"{self._peer.name}: the store was closed")
        crew = self._crew
        call = ThreadCall(request, time.monotonic(), due, source, must_leave)
        if abandoned is not None:
            call.abandoned = partial(crew.keep_for_later, abandoned)
        try:
            lane = crew.step(call, is_new=True)
            while call.state != OVER:
                crew.wait(call, lane)
                if call.state != OVER:
                    lane = crew.step(call)
        except BaseException:
            crew.leave(call)
            raise
        if call.error is not None:
            raise call.error
        return call.reply

    def start(self, request: Any, due: float, source: str = "") -> None:
        """Send a request that no caller waits for; its reply is read by the next call that comes."""
        call = ThreadCall(request, time.monotonic(), due, source, True)
        call.has_given_up = True
        self._crew.step(call, is_new=True)

    def close(self) -> None:
        """Close all connections; calls that are under way end first."""
        self._is_closed = True
        self._crew.close()

    @property
    def wires(self) -> list[Any]:
        """The connections that there are."""
        return [lane.wire for lane in self._crew.lanes if lane.wire is not None]

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone; they are kept, because forgetting them could close them."""
        self._crew.is_inherited = True
        _inherited.append(self._crew)
        self._crew = Crew(self._peer, self._deadline)


class Crew:
    """The threads of one process that call one server, and what is under way for them.

    Attributes:
        is_inherited: Whether this process has it from its parent, and must not touch it.
        lanes: The connections.
    """

    def __init__(self, peer: Peer, deadline: float) -> None:
        self.is_inherited = False
        self._peer = peer
        self._batcher = Batcher(peer, deadline)
        self.lanes = self._batcher.lanes
        for lane in self.lanes:
            lane.work = Work()
        self._lock: Any = threading.RLock()
        self._is_busy = False
        self._is_closed = False
        self._unclaimed: list[tuple[Abandoned, Any]] = []

    def step(self, call: ThreadCall, *, is_new: bool = False) -> Lane | None:
        """Do all that can be done without waiting; return the lane on which the caller has to wait for all, if it leads."""
        return self._alone(self._step, call, is_new)

    def wait(self, call: ThreadCall, lane: Lane | None) -> None:
        """Wait until there is something to do: on a lane, or for the thread that does so. It is never for long."""
        if self.is_inherited:
            raise StoreUnavailable(f"{self._peer.name}: the process was forked in the middle of a call")
        seconds = min(LEASE, call.due - time.monotonic())
        if lane is None:
            call.baton.wait(seconds)
        elif lane.work.connecting is not None:
            lane.work.connected.wait(seconds)
        elif (wire := lane.wire) is not None:
            wire.wait(max(0.0, seconds))

    def leave(self, call: ThreadCall) -> None:
        """Let others go on without the thread of a call that was interrupted."""
        if self.is_inherited or self._is_busy:
            return
        if self._alone(self._leave, call) and call.abandoned is not None:
            call.abandoned(call.reply)
        self._give_back_unclaimed()

    def keep_for_later(self, abandoned: Abandoned, reply: Any) -> None:
        """Take a reply whose caller was interrupted; what is to be done with it may need another call."""
        self._unclaimed.append((abandoned, reply))

    def close(self) -> None:
        """Close the connections that are idle, and the others when they are."""
        self._alone(self._close)

    def _alone(self, work: Callable[..., T], *args: Any) -> T:
        """Return what some work returns that no other thread may interrupt."""
        lock = self._lock
        taken = lock._recursion_count()
        try:
            with lock:
                if self._is_busy:
                    raise StoreUnavailable(REENTERED)
                self._is_busy = True
                try:
                    return work(*args)
                finally:
                    self._is_busy = False
        except BaseException:
            try:
                release_down_to(lock, taken)
            finally:  # once more, in case another signal handler raised meanwhile
                release_down_to(lock, taken)
            raise
        finally:
            if self._unclaimed and not self._is_busy:
                self._give_back_unclaimed()

    def _give_back_unclaimed(self) -> None:
        while self._unclaimed:
            abandoned, reply = self._unclaimed.pop()
            abandoned(reply)

    def _step(self, call: ThreadCall, is_new: bool) -> Lane | None:
        now = time.monotonic()
        batcher = self._batcher
        if is_new:
            batcher.add(call)
        for lane in self.lanes:
            if lane.queue is not None:
                self._look_at(lane, call, now)
        for lane in batcher.expire(now):
            self._hang_up(lane)
            batcher.give_up(lane)
        while (idle := batcher.next_lane(now)) is not None:
            self._begin(idle, now)
        if call.state == OVER or call.has_given_up:
            self._hand_on(call, now)
            return None
        own = batcher.lane_for(call)
        if own is None or (own.work.leader is not call and own.work.led_until > now):
            return None
        own.work.leader, own.work.led_until = call, now + 2 * LEASE
        return own

    def _look_at(self, lane: Lane, call: ThreadCall, now: float) -> None:
        """Go on with what is under way on a lane, if that is for this thread to do."""
        work: Work = lane.work
        if work.is_in_doubt or (work.talk is None and work.connecting is None):
            self._lose(lane, InterruptedError("a signal handler raised in the middle of a call"))
        elif work.leader is call or work.led_until <= now or (call.due <= now and lane is call.lane):
            if work.connecting is not None:
                self._finish_connecting(lane, work.connecting, now)
            else:
                self._receive(lane, now)

    def _begin(self, lane: Lane, now: float) -> None:
        """Have calls leave on a lane that was idle."""
        work: Work = lane.work
        if lane.wire is not None and work.heard != now and lane.wire.is_over():
            self._hang_up(lane)
        if lane.wire is not None:
            self._depart(lane, now)
            return
        seconds = self._batcher.time_to_connect(lane, now)
        work.connect_by = now + seconds
        work.connected = Baton()
        try:
            work.connecting = Connecting(partial(self._peer.connect, seconds), work.connected.set)
        except RuntimeError as cause:  # there can be no more threads
            self._batcher.cannot_connect(lane, cause, now)

    def _finish_connecting(self, lane: Lane, connecting: Connecting[Wire], now: float) -> None:
        if not connecting.is_over and now < lane.work.connect_by:
            return
        lane.work.connecting = None
        if connecting.wire is not None:
            lane.wire = connecting.wire
            self._depart(lane, now)
        else:
            connecting.give_up()
            cause = connecting.error or TimeoutError("no connection in time")
            self._batcher.cannot_connect(lane, cause, now)

    def _depart(self, lane: Lane, now: float) -> None:
        work: Work = lane.work
        calls = self._batcher.take(lane, now, after_pause=work.heard != now)
        if calls:
            work.is_in_doubt = True
            work.leader, work.led_until = None, 0.0
            work.talk = self._peer.talk(calls)
            self._go_on(lane, None)

    def _receive(self, lane: Lane, now: float) -> None:
        work: Work = lane.work
        work.is_in_doubt = True
        while work.talk is not None:
            try:
                reply = lane.wire.receive()
            except Exception as cause:  # noqa: BLE001  # whatever it is, no caller may wait for ever
                self._lose(lane, cause)
                return
            if reply is PENDING:
                break
            work.heard = now
            self._batcher.hear(lane, now)
            self._go_on(lane, reply)
        work.is_in_doubt = False

    def _go_on(self, lane: Lane, reply: Any) -> None:
        """Give a talk its reply, and send what it says next."""
        work: Work = lane.work
        assert work.talk is not None
        try:
            lane.wire.send(work.talk.send(reply))
            work.is_in_doubt = False
        except StopIteration as stop:
            work.talk = None
            self._batcher.finish(lane, stop.value)
            work.is_in_doubt = False
        except Exception as cause:  # noqa: BLE001  # see above
            self._lose(lane, cause)

    def _hand_on(self, call: ThreadCall, now: float) -> None:
        """Have another thread lead where this one did, or where nobody does."""
        for lane in self.lanes:
            work: Work = lane.work
            if lane.queue is not None and (work.leader is call or work.led_until <= now):
                work.leader = successor = self._batcher.someone_on(lane)
                work.led_until = 0.0
                if isinstance(successor, ThreadCall):
                    work.led_until = now + LEASE
                    successor.baton.set()
        if self._is_closed:
            self._close()

    def _leave(self, call: ThreadCall) -> bool:
        """Give a call up; return whether there is a reply that its caller has not seen."""
        has_reply = call.state == OVER and call.error is None
        call.has_given_up = True
        self._step(call, False)
        return has_reply

    def _close(self) -> None:
        self._is_closed = True
        for lane in self.lanes:
            if lane.queue is None:
                self._hang_up(lane)

    def _lose(self, lane: Lane, cause: BaseException) -> None:
        self._hang_up(lane)
        self._batcher.lose(lane, cause)

    def _hang_up(self, lane: Lane) -> None:
        work: Work = lane.work
        wire, lane.wire, work.talk, work.is_in_doubt = lane.wire, None, None, False
        if wire is not None:
            wire.close()


_inherited: list[object] = []
