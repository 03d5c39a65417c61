"""Decides which calls are sent together and what a passed deadline means; no I/O and no clock.

- **Batches.** On an idle connection, a call is sent at once. Calls that arrive during a round trip wait for its end and
  are sent together, at most `MOST_PER_BATCH`. If the peer allows it, a second full batch follows on the same connection
  before the first is answered, so that client and server work at the same time.
- **Deadlines.** Each call has a deadline for everything from the call to its reply. A call that misses it fails alone:
  a connection is closed only after silence for the store's own deadline.
- **Down or overloaded.** If nothing arrived from the server since the call was made, the server is down. Otherwise this
  process or the server has too much work for the deadline (`StoreOverloaded`).
- **Late checks.** If an expired deadline is detected late, this process was blocked, and replies or a new connection
  may be ready but not processed. They get a grace period first.
- **At most once.** A call is sent once. It is sent again only if the server certainly did nothing; the peer decides that.

Times are seconds of a monotonic clock, passed in as `now`. In threads a signal handler may raise at any point, so each
change is made in an order that loses no call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from headgate.errors import StoreError, StoreOverloaded
from headgate.stores.remote.peer import ALONE, Conversation, Peer

MOST_PER_BATCH = 32
"""The cap of a batch. Without one, client and server would work in turns instead of at the same time."""

LATE = 0.02
"""Seconds; if an expired deadline is detected later than this, this process was blocked."""

GRACE = 1.0
"""The longest grace period for replies, in seconds, after this process was blocked beyond a deadline."""

EXPIRY_PAUSE = 0.005
"""Seconds between two searches for expired calls; a search checks every call."""

_NEVER = float("inf")

WAITING, SENT, OVER = range(3)
"""The states of a call."""

Abandoned = Callable[[Any], object]
"""Called with the reply to a call whose caller no longer waits."""


class RemoteCall:
    """A request to a server. Drivers add how the caller waits for the reply.

    Attributes:
        request: The request, in the form that the peer sends.
        since: The time of the call.
        due: The deadline.
        must_send: Whether to send it even if its caller no longer waits.
        abandoned: Called with the reply if its caller no longer waits.
        alone: Whether it needs its own batch.
        state: `WAITING`, `SENT` or `OVER`.
        has_given_up: Whether the caller was interrupted or cancelled.
        was_repeated: Whether it was sent a second time after a lost connection.
    """

    __slots__ = (
        "abandoned",
        "alone",
        "due",
        "has_given_up",
        "must_send",
        "request",
        "since",
        "state",
        "was_repeated",
    )

    def __init__(
        self,
        request: Any,
        since: float,
        due: float,
        must_send: bool = False,
        abandoned: Abandoned | None = None,
    ) -> None:
        self.request = request
        self.since = since
        self.due = due
        self.must_send = must_send
        self.abandoned = abandoned
        self.alone = False
        self.state = WAITING
        self.has_given_up = False
        self.was_repeated = False

    def deliver(self, reply: Any, error: BaseException | None) -> bool:
        """Pass the reply or the error to the caller; then the call is over. Return false if the caller no longer waits."""
        raise NotImplementedError

    def answer(self, reply: Any) -> None:
        """Pass on the reply: to the caller, or to `abandoned` if the caller no longer waits or has got an error."""
        if (self.state == OVER or not self.deliver(reply, None)) and self.abandoned is not None:
            self.abandoned(reply)

    def fail(self, error: BaseException) -> None:
        """Pass the error to the caller, unless the call is over."""
        if self.state != OVER:
            self.deliver(None, error)


class Batch(NamedTuple):
    """Calls that were sent together, and their conversation with the server."""

    calls: list[RemoteCall]
    conversation: Conversation


class Batcher:
    """The calls of one event loop, or of all threads, over one connection.

    Args:
        peer: The server.
        deadline: Seconds of silence after which the connection is closed.
        follows: Whether a second batch may be sent before the first is answered.

    Attributes:
        waiting: Calls that were not sent.
        batches: Batches that were sent, in the order of their replies.
        alarm: The earliest time at which `expire` can have something to do.
    """

    def __init__(self, peer: Peer, deadline: float, *, follows: bool = False) -> None:
        self.waiting: deque[RemoteCall] = deque()
        self.batches: deque[Batch] = deque()
        self.alarm = _NEVER
        self._peer = peer
        self._deadline = deadline
        self._follows = follows
        self._heard = -_NEVER
        self._silent_since = 0.0
        self._connect_due = _NEVER
        self._had_grace = False

    @property
    def is_busy(self) -> bool:
        """Whether any call waits or was sent."""
        return bool(self.waiting or self.batches)

    @property
    def is_needed(self) -> bool:
        """Whether a caller waits for a reply, or a call has to be completed without its caller."""
        return any(
            call.state != OVER and (not call.has_given_up or call.must_send or call.abandoned is not None)
            for call in self._calls()
        )

    def add(self, call: RemoteCall) -> None:
        """Queue a call."""
        if not self.is_busy:
            self.alarm = _NEVER  # the alarm of earlier calls
        self.waiting.append(call)
        self.alarm = min(self.alarm, call.due)

    def next_message(self, now: float) -> Any | None:
        """Return the first message of the next batch; `None` if no caller waits, or no batch may be sent now."""
        if not self.waiting:
            return None
        if not self.batches:
            self._silent_since = now
        elif not self._follows or len(self.batches) > 1 or len(self.waiting) < MOST_PER_BATCH:
            return None
        calls: list[RemoteCall] = []
        batch = Batch(calls, self._peer.converse(calls))  # a generator: it begins when the batch is complete
        self.batches.append(batch)
        self._fill(calls)
        if not calls:
            self.batches.pop()
            return None
        return next(batch.conversation)

    def receive(self, reply: Any, now: float) -> Any | None:
        """Pass the reply to the first batch, and return the next message of its conversation, or `None` if it is over."""
        self._heard = self._silent_since = now
        try:
            message = self.batches[0].conversation.send(reply)
        except StopIteration as stop:
            self._finish(stop.value)
            return None
        self.batches.rotate(-1)  # the reply to that message comes after the reply to the second batch
        return message

    def lose(self, cause: BaseException) -> None:
        """Fail the calls that were sent, because the connection is lost; requeue those that the peer may repeat."""
        again = []
        for batch in self.batches:
            for call in batch.calls:
                if call.state != SENT:
                    continue
                if not call.was_repeated and self._peer.may_repeat(call.request, cause):
                    call.was_repeated = True
                    again.append(call)
                else:
                    call.fail(self._failure(cause))
        self._send_again(again, alone=False)
        self.batches.clear()
        self._connect_due = _NEVER

    def time_to_connect(self, now: float) -> float:
        """Return the seconds after which to give up connecting: at least until all waiting calls are due."""
        self._connect_due = max(now + self._deadline, max((call.due for call in self.waiting), default=now))
        self.alarm = min(self.alarm, self._connect_due)
        return self._connect_due - now

    def connected(self) -> None:
        """Record that there is a connection."""
        self._connect_due = _NEVER

    def cannot_connect(self, cause: BaseException) -> None:
        """Fail all waiting calls, because connecting failed."""
        self._connect_due = _NEVER
        while self.waiting:
            self.waiting[0].fail(self._failure(cause))
            self.waiting.popleft()

    def drop_abandoned(self) -> None:
        """Drop waiting calls whose callers no longer wait, unless the calls must be sent."""
        self.waiting = deque(call for call in self.waiting if _is_wanted(call))

    def expire(self, now: float) -> bool:
        """Fail calls past their deadlines; return whether the connection is to be closed, because the server is silent.

        Everything that has arrived must have been read.
        """
        late = now - self.alarm
        if late > LATE and not self._had_grace:
            self._had_grace, self.alarm = True, now + min(late, GRACE)
            return False
        self._had_grace = False
        for call in list(self._calls()):
            if call.due <= now:
                is_silent = self._heard <= call.since
                call.fail(self._failure(TimeoutError("no reply in time")) if is_silent else self._overload())
        self.waiting = deque(call for call in self.waiting if call.state == WAITING)
        end = self._gives_up_at()
        dues = [call.due for call in self._calls() if call.state != OVER]
        self.alarm = max(min([*dues, end]), now + EXPIRY_PAUSE)
        return now >= end

    def find_caller(self) -> RemoteCall | None:
        """Return a call whose caller still waits, or `None`."""
        return next((call for call in self._calls() if call.state != OVER and not call.has_given_up), None)

    def _fill(self, calls: list[RemoteCall]) -> None:
        """Move waiting calls into a batch."""
        waiting, room = self.waiting, 1.0
        while waiting and len(calls) < MOST_PER_BATCH:
            call = waiting[0]
            if not _is_wanted(call):
                waiting.popleft()
                continue
            room -= ALONE if call.alone else self._peer.share(call.request)
            if calls and room < 0:
                break
            calls.append(call)
            call.state = SENT
            waiting.popleft()

    def _finish(self, again: Iterable[RemoteCall]) -> None:
        """Remove the first batch, whose conversation is over; send some of its calls again, each in its own batch."""
        if again:
            self._send_again([call for call in again if call.state == SENT], alone=True)
        for call in self.batches.popleft().calls:
            if call.state == SENT:
                call.fail(self._peer.failure(ValueError("there was no reply to this call")))

    def _calls(self) -> Iterator[RemoteCall]:
        """Return the calls that were sent, then the waiting calls."""
        return chain(*[batch.calls for batch in self.batches], self.waiting)

    def _send_again(self, calls: list[RemoteCall], *, alone: bool) -> None:
        for call in reversed(calls):
            call.state, call.alone = WAITING, alone or call.alone
            self.waiting.appendleft(call)

    def _gives_up_at(self) -> float:
        """Return when to close the connection: not before all calls of the first batch are due."""
        if self._connect_due < _NEVER or not self.batches:
            return self._connect_due
        return max(self._silent_since + self._deadline, *(call.due for call in self.batches[0].calls))

    def _overload(self) -> StoreOverloaded:
        return StoreOverloaded(f"{self._peer.name} could not be called in time: too many calls at once")

    def _failure(self, cause: BaseException) -> StoreError:
        if isinstance(cause, InterruptedError):  # by this process; the server did nothing wrong
            return StoreError(f"{self._peer.name}: {cause}")
        return self._peer.failure(cause)


def _is_wanted(call: RemoteCall) -> bool:
    """Return whether a waiting call is to be sent; if not, end it."""
    if call.state == WAITING and call.has_given_up and not call.must_send:
        call.state = OVER
    return call.state == WAITING
