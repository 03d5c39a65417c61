"""The driver for threads: all threads share one connection, and one of them, the leader, waits for all replies.

If there is no leader, a thread with a call becomes the leader: it sends all waiting calls, waits for the replies, and
passes them to the other threads. When its own call is over, it makes another waiting thread the leader.

Only waiting happens outside the lock. A short-lived thread connects; sending, receiving and passing on replies never
block, and any thread does them under one lock. A thread with a new call does not wait for the lock: its holder checks
for new calls after releasing it. So a leader whose deadline passes, or that is interrupted by a signal handler, can be
replaced at any time. If a signal handler raises while a thread holds the lock, the connection may be in an undefined
state. It is closed, and the calls that were sent on it fail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import Any

from headgate._concurrency import Event
from headgate._fork import watch
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.base import REENTERED, release_if_owned, while_locked
from headgate.stores.remote.batching import GRACE, OVER, Batcher, RemoteCall
from headgate.stores.remote.connecting import Connecting
from headgate.stores.remote.peer import FAILURES, PENDING, Peer, Wire

PAUSE = 0.001
"""Seconds without a reply after which the connection is checked before it is used: the server may have closed it."""

LOOK_AGAIN = 0.05
"""Seconds after which a leader that waits for the connection checks whether another thread has read its reply."""


class ThreadCall(RemoteCall):
    """A call that a thread waits for.

    Attributes:
        wakeup: Wakes the thread.
        reply: The reply, once the call is over.
        error: The error instead of a reply.
        is_awake: Whether the thread has seen that the call is over.
        to_wake: The calls whose threads are to be woken.
    """

    __slots__ = ("error", "is_awake", "reply", "to_wake", "wakeup")

    def __init__(self, request: Any, due: float, to_wake: deque[ThreadCall]) -> None:
        super().__init__(request, time.monotonic(), due)
        self.to_wake = to_wake
        self.wakeup = Event()
        self.is_awake = False
        self.reply: Any = None
        self.error: BaseException | None = None

    def deliver(self, reply: Any, error: BaseException | None) -> bool:
        self.reply, self.error = reply, error
        self.to_wake.append(self)  # first: a signal handler may raise before the next line
        self.state = OVER
        return True


class ThreadEngine:
    """Calls of all threads of this process to one server.

    Args:
        peer: The server.
        deadline: Seconds of silence after which a connection is closed.
    """

    def __init__(self, peer: Peer, deadline: float) -> None:
        self._peer = peer
        self._deadline = deadline
        self._dispatcher = ThreadDispatcher(peer, deadline)
        watch(self)

    def call(self, request: Any, due: float) -> Any:
        """Send a request, once, and return its reply.

        If the caller is interrupted, a request that was not sent is dropped, and one that was sent may count.

        Raises:
            StoreError: There is no reply.
        """
        dispatcher = self._dispatcher
        if dispatcher.is_closed:
            raise StoreUnavailable(f"{self._peer.name}: the store was closed")
        call = ThreadCall(request, due, dispatcher.to_wake)
        dispatcher.run(call)
        if call.error is not None:
            raise call.error
        return call.reply

    def close(self) -> None:
        """Close the connection when calls in progress have ended."""
        self._dispatcher.close()

    def after_fork_in_child(self) -> None:
        """Leave the parent's connection alone; it is kept, because deleting it could close it."""
        inherited = self._dispatcher
        inherited.is_inherited = True
        _inherited.append(inherited)
        self._dispatcher = ThreadDispatcher(self._peer, self._deadline)
        self._dispatcher.is_closed = inherited.is_closed


class ThreadDispatcher:
    """The calls of all threads, their connection, and the leader.

    Attributes:
        is_closed: Whether to close the connection once no thread waits.
        is_inherited: Whether this process got it by a fork, and must not use it.
        to_wake: The calls whose threads are to be woken: their calls are over, or they are to lead.
    """

    def __init__(self, peer: Peer, deadline: float) -> None:
        self.is_closed = self.is_inherited = False
        self.to_wake: deque[ThreadCall] = deque()
        self._peer = peer
        self._deadline = deadline
        self._failures: tuple[type[Exception], ...] = (*peer.failures, *FAILURES)
        self._batcher = Batcher(peer, deadline)
        self._lock: Any = threading.RLock()
        self._wire: Wire | None = None
        self._connecting: Connecting[Wire] | None = None
        self._connected = Event()
        self._heard = 0.0
        self._leader: RemoteCall | None = None
        self._is_interrupted = False
        self._new: deque[ThreadCall] = deque()

    def run(self, call: ThreadCall) -> None:
        """Return when a call is over."""
        try:
            self._new.append(call)
            leads = self._step(call, waits=False)
            while call.state != OVER:
                self._wait(call, leads)
                if call.state == OVER and not leads:
                    break
                leads = self._step(call)
            call.is_awake = True
            self._wake_next()
        except BaseException:
            self._leave(call)
            raise

    def close(self) -> None:
        """Close the connection: now if no thread waits, else when the last one has its reply."""
        self.is_closed = True
        closing = ThreadCall(None, 0.0, self.to_wake)  # never sent
        closing.state = OVER
        self._step(closing)

    def _step(self, call: ThreadCall, *, waits: bool = True) -> bool:
        """Do everything that can be done without waiting; return whether the thread of the call leads.

        With `waits=False`, if another thread holds the lock, that thread does everything.
        """
        if self.is_inherited:
            raise StoreError(f"{self._peer.name}: the process was forked during a call")
        if self._lock._is_owned():
            raise StoreError(REENTERED)
        try:
            leads = while_locked(self._lock, self._advance, call) if waits else False
            while self._new:  # added by threads that did not wait for the lock
                result = self._advance_if_unlocked(call)
                if result is None:
                    break
                leads = result
            return leads
        except BaseException:
            self._is_interrupted = True
            raise
        finally:
            if call.state != OVER:
                self._wake_next()

    def _wait(self, call: ThreadCall, leads: bool) -> None:
        """Wait for the connection if this thread leads, else to be woken."""
        now, wire = time.monotonic(), self._wire
        if not leads:
            # Calls that expire together fail together, when the first of their threads checks them.
            due = max(call.due, now)
            call.wakeup.wait(min(max(due, self._batcher.alarm), due + GRACE) - now)
            return
        seconds = min(self._batcher.alarm - now, LOOK_AGAIN)
        if self._connecting is not None:
            self._connected.wait(seconds)
        elif wire is not None:
            wire.wait(seconds)

    def _wake_next(self) -> None:
        """Wake the next thread; it wakes the one after it.

        If all were woken at once, they would compete for the interpreter, which takes twice the CPU time.
        """
        while self.to_wake:
            try:
                call = self.to_wake[0]
                is_awake = call.is_awake
                if not is_awake:
                    call.wakeup.set()
                self.to_wake.remove(call)  # last: a signal handler may raise at any point
            except (IndexError, ValueError):
                return  # another thread was faster
            if not is_awake:
                return

    def _leave(self, call: ThreadCall) -> None:
        """Continue without the thread of a call, which was interrupted."""
        call.has_given_up = call.is_awake = True
        if not self.is_inherited and not self._lock._is_owned():
            self._step(call)
        self._wake_next()

    def _advance_if_unlocked(self, call: ThreadCall) -> bool | None:
        """Return the result of `_advance`, or `None` at once if another thread holds the lock."""
        try:
            if not self._lock.acquire(blocking=False):
                return None
            leads = self._advance(call)
            self._lock.release()
        except BaseException:
            release_if_owned(self._lock)
            raise
        return leads

    def _advance(self, call: ThreadCall) -> bool:
        now, batcher = time.monotonic(), self._batcher
        if self._is_interrupted:
            self._is_interrupted = False
            self._lose(InterruptedError("a signal handler raised during a call"))
        while self._new:
            batcher.add(self._new[0])
            self._new.popleft()
        is_due = now >= batcher.alarm
        if self._leader is call or is_due:
            self._receive(now)
        if is_due and batcher.expire(now):
            self._give_up()
        if not batcher.batches and batcher.waiting and self._connecting is None:
            self._send(now)
        return self._choose_leader(call)

    def _choose_leader(self, call: ThreadCall) -> bool:
        """Return whether the thread of the call leads; if its call is over, make another thread the leader."""
        has_left = call.state == OVER or call.has_given_up
        leader = self._leader
        if leader is None or leader.state == OVER or leader.has_given_up:
            self._leader = self._batcher.find_caller() if has_left else call
            if has_left and isinstance(self._leader, ThreadCall):
                self.to_wake.append(self._leader)  # last: the server has just begun
        if self._leader is None and self.is_closed:
            self._lose(ConnectionAbortedError("the store was closed"))
        return self._leader is call

    def _send(self, now: float) -> None:
        """Send the next batch, or connect first."""
        if self._wire is not None and now - self._heard > PAUSE and self._wire.is_over():
            self._hang_up()
        if self._wire is None:
            self._connect(now)
            return
        try:
            message = self._batcher.next_message(now)
            if message is not None:
                self._wire.send(message)
        except self._failures as cause:
            self._lose(cause)

    def _connect(self, now: float) -> None:
        connect = partial(self._peer.connect, self._batcher.time_to_connect(now))
        self._connected = Event()
        try:
            self._connecting = Connecting(connect, self._connected.set)
        except RuntimeError as cause:  # no thread can be started
            self._batcher.cannot_connect(cause)

    def _receive(self, now: float) -> None:
        """Read everything that has arrived, and send the next message of the conversation."""
        if self._connecting is not None:
            self._finish_connecting(self._connecting, now)
            return
        try:
            while self._wire is not None and self._batcher.batches:
                reply = self._wire.receive()
                if reply is PENDING:
                    return
                self._heard = now
                message = self._batcher.receive(reply, now)
                if message is not None:
                    self._wire.send(message)
        except self._failures as cause:
            self._lose(cause)

    def _finish_connecting(self, connecting: Connecting[Wire], now: float) -> None:
        if not connecting.is_over:
            return
        self._connecting = None
        if connecting.wire is not None:
            self._wire, self._heard = connecting.wire, now
            self._batcher.connected()
        else:
            self._batcher.cannot_connect(connecting.error or ConnectionAbortedError("there is no connection"))

    def _give_up(self) -> None:
        """Close a connection on which the server is silent, or stop connecting."""
        if self._connecting is not None:
            self._batcher.cannot_connect(TimeoutError("no connection in time"))
        self._lose(TimeoutError("no reply in time"))

    def _lose(self, cause: BaseException) -> None:
        """Close the connection, and fail the calls that were sent."""
        self._batcher.lose(cause)
        self._hang_up()

    def _hang_up(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.give_up()


_inherited: list[object] = []
