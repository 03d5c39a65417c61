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

import time
from collections import deque
from functools import partial
from typing import Any

from headgate._fork import watch
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.base import REENTERED, new_rlock, while_locked
from headgate.stores.remote.batching import EXPIRY_PAUSE, OVER, Abandoned, Batcher, Lane, RemoteCall
from headgate.stores.remote.baton import Baton
from headgate.stores.remote.connecting import Connecting
from headgate.stores.remote.peer import FAILURES, PENDING, Peer, Talk, Wire

PAUSE = 0.001
"""Seconds after which the server may have closed a connection, so that it is looked at before it is used."""

LEASE = 0.05
"""Seconds for which a leader leads without saying so again, and after which those that wait look for themselves."""


CROWD = 32
"""How many threads look for themselves in each such time; if more wait, each looks more rarely."""


class ThreadCall(RemoteCall):
    """A call that a thread waits for.

    Attributes:
        baton: What its thread waits for while another one leads; `None` before it does.
        reply: What the server has answered.
        error: Why it has not.
        has_given_up: Whether its thread does not wait any more.
        is_awake: Whether its thread has seen that the call is over.
        answered: Where it goes when it is over, for its thread to be woken.
    """

    __slots__ = ("answered", "baton", "error", "has_given_up", "is_awake", "reply")

    def __init__(
        self,
        request: Any,
        due: float,
        source: str,
        must_leave: bool,
        abandoned: Abandoned | None,
        answered: deque[ThreadCall],
    ) -> None:
        super().__init__(request, time.monotonic(), due, source, must_leave, abandoned)
        self.answered = answered
        self.is_awake = False
        self.baton: Baton | None = None
        self.reply: Any = None
        self.error: BaseException | None = None
        self.has_given_up = False

    def is_abandoned(self) -> bool:
        return self.has_given_up

    def deliver(self, reply: Any, error: BaseException | None) -> None:
        self.reply, self.error = reply, error
        self.state = OVER
        if self.baton is not None:
            self.answered.append(self)


class ThreadLane(Lane):
    """A lane, and who sees to it.

    Attributes:
        connecting: The connection that is being made.
        connected: Set when that is over.
        connect_by: When it is given up.
        busy: For how long this process had run when that was last looked at.
        talk: What is said about the batch that is under way.
        leader: The call whose thread waits here on behalf of all.
        led_until: Until when it does so without saying so again.
        heard: When the server has last answered.
        is_in_doubt: Whether a step has begun here and not ended.
    """

    __slots__ = (
        "busy",
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
        super().__init__()
        self.connecting: Connecting[Wire] | None = None
        self.connected = Baton()
        self.connect_by = 0.0
        self.busy = 0.0
        self.talk: Talk | None = None
        self.leader: RemoteCall | None = None
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
        self._crew = Crew(peer, deadline)
        watch(self)

    def call(
        self,
        request: Any,
        due: float,
        source: str = "",
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> Any:
        """Send a request, once, and return its reply.

        If the caller is interrupted, a request that has not left does not leave, unless it must; the reply to one that has
        left goes to `abandoned` when some thread reads it.

        Raises:
            StoreError: There is no reply.
        """
        crew = self._crew
        if crew.is_closed:
            raise StoreUnavailable(f"{self._peer.name}: the store was closed")
        if abandoned is not None:
            abandoned = partial(crew.keep_for_later, abandoned)
        call = ThreadCall(request, due, source, must_leave, abandoned, crew.answered)
        try:
            lane = crew.join(call)
            while True:  # in this form the jump back is inside of the `try`, also on Python 3.12 and 3.13
                if call.state == OVER:
                    break
                crew.wait(call, lane)
                if call.state == OVER and lane is None:  # else it has led, and hands that on
                    break
                lane = crew.step(call)
        except BaseException:
            crew.leave(call)
            raise
        call.is_awake = True
        crew.wake_next()
        if call.error is not None:
            raise call.error
        return call.reply

    def tell(self, request: Any, due: float, source: str) -> None:
        """Send a request that no caller waits for; its reply is read by the next call that comes."""
        call = ThreadCall(request, due, source, True, None, self._crew.answered)
        call.has_given_up = True
        self._crew.join(call)

    def close(self) -> None:
        """Close all connections; calls that are under way end first."""
        self._crew.close()

    @property
    def wires(self) -> list[Any]:
        """The connections that there are."""
        return [lane.wire for lane in self._crew.lanes if lane.wire is not None]

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone; they are kept, because forgetting them could close them."""
        inherited = self._crew
        inherited.is_inherited = True
        _inherited.append(inherited)
        self._crew = Crew(self._peer, self._deadline)
        self._crew.is_closed = inherited.is_closed


class Crew:
    """The threads of one process that call one server, and what is under way for them.

    Attributes:
        is_closed: Whether connections are closed as soon as they are idle.
        is_inherited: Whether this process has it from its parent, and must not touch it.
        lanes: The connections.
    """

    def __init__(self, peer: Peer, deadline: float) -> None:
        self.is_closed = self.is_inherited = False
        self._peer = peer
        self._failures: tuple[type[Exception], ...] = (*peer.failures, *FAILURES)
        self._batcher = Batcher(peer, deadline, ThreadLane)
        self.lanes = self._batcher.lanes
        self._lock: Any = new_rlock()
        self._is_led = False
        self._new: deque[ThreadCall] = deque()
        self.answered: deque[ThreadCall] = deque()
        self._unclaimed: list[tuple[Abandoned, Any]] = []

    def join(self, call: ThreadCall) -> ThreadLane | None:
        """Take a new call; else as `step`."""
        if self._is_led:
            call.baton = Baton()
            self._new.append(call)
            if self._is_led:  # so the leader looks for new calls once more before it leaves
                return None
        else:
            self._new.append(call)
        return self.step(call)

    def step(self, call: ThreadCall) -> ThreadLane | None:
        """Do all that can be done without waiting; return the lane on which the caller has to wait for all, if it leads."""
        if self.is_inherited:
            raise StoreError(f"{self._peer.name}: the process was forked in the middle of a call")
        if self._lock._is_owned():
            raise StoreError(REENTERED)
        try:
            return while_locked(self._lock, self._step, call)
        finally:
            if call.state != OVER:
                self.wake_next()
            while self._unclaimed:
                abandoned, reply = self._unclaimed.pop()
                abandoned(reply)

    def wait(self, call: ThreadCall, lane: ThreadLane | None) -> None:
        """Wait until there is something to do: on a lane, or for the thread that does so. It is never for long."""
        batcher, now = self._batcher, time.monotonic()
        if lane is None:
            if call.baton is not None:
                # The more wait, the more rarely each looks: to wake a thread holds up all others.
                lease = LEASE * (1 + (len(self._new) + batcher.crowd()) // CROWD)
                # And calls that are due almost together fail together; but the leader may not know of this one yet.
                due = min(max(call.due, batcher.alarm), call.due + EXPIRY_PAUSE)
                call.baton.wait(min(lease, due - now))
            return
        seconds = min(LEASE, min(call.due, batcher.alarm) - now)
        if lane.connecting is not None:
            lane.connected.wait(seconds)
        elif (wire := lane.wire) is not None:
            wire.wait(seconds)

    def wake_next(self) -> None:
        """Wake a thread whose reply has come; it wakes the next one, before anything else.

        Were all woken together, they would only fight for the interpreter, which takes twice the time.
        """
        answered = self.answered
        while answered:
            try:
                call = answered.popleft()
            except IndexError:
                return  # another thread was quicker
            if not call.is_awake and call.baton is not None:
                call.baton.set()
                return

    def leave(self, call: ThreadCall) -> None:
        """Let others go on without the thread of a call that was interrupted."""
        call.has_given_up = True
        if not self.is_inherited and not self._lock._is_owned():
            self.step(call)
        self.wake_next()

    def keep_for_later(self, abandoned: Abandoned, reply: Any) -> None:
        """Take a reply whose caller was interrupted; what is to be done with it may need another call."""
        self._unclaimed.append((abandoned, reply))

    def close(self) -> None:
        """Close the connections for which no thread waits, and the others when none does."""
        self.is_closed = self._batcher.is_ending = True
        no_call = ThreadCall(None, 0.0, "", False, None, self.answered)
        no_call.state = OVER
        self.step(no_call)

    def _step(self, call: ThreadCall) -> ThreadLane | None:
        batcher = self._batcher
        while True:
            now = time.monotonic()
            while self._new:
                batcher.add(self._new[0])
                self._new.popleft()
            for lane in self.lanes:
                if lane.queue is not None:
                    self._look_at(lane, call, now)
            if now >= batcher.alarm:
                for lane in batcher.expire(now):
                    self._hang_up(lane)
                    batcher.give_up(lane)
            while (idle := batcher.next_lane(now)) is not None:
                self._begin(idle, now)
            own = None
            if call.state == OVER or call.has_given_up:
                self._hand_on(call, now)
            else:
                own = self._own_lane(call, now)
            main = batcher.main_lane()
            self._is_led = main is not None and main.led_until > now
            if self._is_led or not self._new:
                return own

    def _own_lane(self, call: ThreadCall, now: float) -> ThreadLane | None:
        """Return the lane that a call waits for if its thread is to lead there."""
        lane: ThreadLane | None = self._batcher.lane_of(call)
        if lane is None or (lane.leader is not call and lane.led_until > now):
            call.baton = call.baton or Baton()
            return None
        lane.leader, lane.led_until = call, now + 2 * LEASE
        return lane

    def _look_at(self, lane: ThreadLane, call: ThreadCall, now: float) -> None:
        """Go on with what is under way on a lane, if that is for this thread to do."""
        if lane.connecting is not None:
            # While this process runs, a connection may be there and unnoticed: that is not the server's time. The thread
            # that connects has a limit of its own.
            busy = time.process_time() - lane.busy
            lane.busy += busy
            lane.sent = min(lane.sent + busy, now)
            lane.connect_by += busy
        if lane.is_in_doubt or (lane.talk is None and lane.connecting is None):
            self._lose(lane, InterruptedError("a signal handler raised in the middle of a call"))
        elif lane.leader is call or lane.led_until <= now or now >= self._batcher.alarm:
            if lane.connecting is not None:
                self._finish_connecting(lane, lane.connecting, now)
            else:
                self._receive(lane, now)

    def _begin(self, lane: ThreadLane, now: float) -> None:
        """Have calls leave on a lane that was idle."""
        if lane.wire is not None and now - lane.heard > PAUSE and lane.wire.is_over():
            self._hang_up(lane)
        if lane.wire is not None:
            self._depart(lane, now)
            return
        lane.leader, lane.led_until = None, 0.0  # who led here last has left
        seconds = self._batcher.time_to_connect(lane, now)
        lane.connect_by = now + seconds
        lane.busy = time.process_time()
        lane.connected = Baton()
        try:
            lane.connecting = Connecting(partial(self._peer.connect, seconds), lane.connected.set)
        except RuntimeError as cause:  # there can be no more threads
            self._batcher.cannot_connect(lane, cause, now)

    def _finish_connecting(self, lane: ThreadLane, connecting: Connecting[Wire], now: float) -> None:
        if not connecting.is_over and now < lane.connect_by:
            return
        lane.connecting = None
        if connecting.wire is not None:
            lane.wire = connecting.wire
            self._depart(lane, now)
        else:
            connecting.give_up()
            cause = connecting.error or TimeoutError("no connection in time")
            self._batcher.cannot_connect(lane, cause, now)

    def _depart(self, lane: ThreadLane, now: float) -> None:
        calls = self._batcher.take(lane, now, after_pause=lane.heard != now)
        if calls:
            lane.is_in_doubt = True
            lane.leader, lane.led_until = None, 0.0
            lane.talk = self._peer.talk(calls)
            self._go_on(lane, None)

    def _receive(self, lane: ThreadLane, now: float) -> None:
        lane.is_in_doubt = True
        while lane.talk is not None:
            try:
                reply = lane.wire.receive()
            except self._failures as cause:
                self._lose(lane, cause)
                return
            if reply is PENDING:
                break
            lane.heard = now
            self._batcher.hear(lane, time.monotonic())
            self._go_on(lane, reply)
        lane.is_in_doubt = False

    def _go_on(self, lane: ThreadLane, reply: Any) -> None:
        """Give a talk its reply, and send what it says next."""
        assert lane.talk is not None
        try:
            lane.wire.send(lane.talk.send(reply))
            lane.is_in_doubt = False
            self._batcher.leave(lane, time.monotonic())
        except StopIteration as stop:
            lane.talk = None
            self._batcher.finish(lane, stop.value)
            lane.is_in_doubt = False
        except self._failures as cause:
            self._lose(lane, cause)

    def _hand_on(self, call: ThreadCall, now: float) -> None:
        """Have another thread lead where this one did, or where no thread does."""
        if call.has_given_up and call.reply is not None and call.abandoned is not None:
            call.abandoned(call.reply)  # it has come, and the caller has not seen it
            call.abandoned = None
        for lane in self.lanes:
            if self.is_closed and self._batcher.someone_on(lane) is None:
                # Also if the server still owes a reply: no thread would come to read it.
                self._lose(lane, ConnectionAbortedError("the store was closed"))
            elif lane.queue is not None and (lane.leader is call or lane.led_until <= now):
                lane.leader, lane.led_until = self._batcher.someone_on(lane), 0.0
                if isinstance(lane.leader, ThreadCall) and lane.leader.baton is not None:
                    lane.led_until = now + LEASE
                    self.answered.append(lane.leader)  # last: the server has just begun

    def _lose(self, lane: ThreadLane, cause: BaseException) -> None:
        self._hang_up(lane)
        self._batcher.lose(lane, cause)

    def _hang_up(self, lane: ThreadLane) -> None:
        wire, lane.wire, lane.talk, lane.is_in_doubt = lane.wire, None, None, False
        if wire is not None:
            wire.close()
        connecting, lane.connecting = lane.connecting, None
        if connecting is not None:
            connecting.give_up()


_inherited: list[object] = []
