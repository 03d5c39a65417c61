"""Which calls leave when, on which connection, and what becomes of them; without any I/O and without a clock.

A call that finds nothing under way leaves at once. One that comes while a round trip is under way waits for its end, and
then leaves with all others that wait, as one batch. There is no timer and nothing to tune: the busier it is, the more calls
share a round trip. If as many wait as are under way, and these are many, they need not wait for its end: they follow on the
same connection, so that the server has something to work on while replies are read here. Where that cannot be, half of many
leave, and the other half next, for the same reason.

The rules, for tasks and threads alike:

- **Lanes.** A lane is a connection, or room for one, with one batch under way, and at most one that follows it. There are
  few. Normally all calls share one lane; the others are for what would hold up everybody.
- **Slow limiters.** A batch that takes much longer than usual makes the limiters in it *slow*. A slow limiter has a queue of
  its own, which leaves on another lane, so that no other limiter waits for it. It is slow until a batch of its own is
  quick. One lane is kept for those that are not.
- **Deadlines.** Each call has its own, which counts from the call to its answer, whatever it waits for. When it passes, that
  call fails, and no other: a connection is given up only after the store's own deadline.
- **Not sent, not to blame.** A call that was not sent by its deadline has charged nothing. If the server was silent all that
  time it is down; if it answered others meanwhile, or the call could leave at last, this process is too busy
  (`StoreOverloaded`). The same is said if the server was asked only when half of the call's time was over, or if this
  process did not look for half of it: the silence then says nothing. If it was this call that it was asked, it may have
  been charged.
- **At most once.** A call is sent once. Only what a server has certainly not done is sent again: a peer says what that is.

Times are seconds of a monotonic clock, handed in as `now`. Threads may be interrupted anywhere by a signal handler that
raises, so each change is made in an order that loses no call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from headgate.errors import StoreError, StoreOverloaded
from headgate.stores.remote.peer import Peer

MANY = 32
"""From how many calls on they leave in two halves."""

SLOW = 0.02
"""Seconds. A batch that takes longer, and four times as long as usual, is slow."""

EXPIRY_PAUSE = 0.005
"""Seconds between two looks for calls that are due: the more calls wait, the longer each look takes."""

RECONNECT_PAUSE = 1.0
"""Seconds after which a further connection is tried again, while others work."""

TOO_MANY = 1 << 30
"""More calls than there can be."""

_NEVER = float("inf")

WAITING, SENT, OVER = range(3)
"""The states of a call."""

Abandoned = Callable[[Any], object]
"""Takes the reply to a call whose caller no longer waits for it."""


class RemoteCall:
    """A request on its way to a server. Drivers add how a caller waits for the reply.

    Attributes:
        request: What the peer sends.
        since: When it was asked.
        due: When it fails.
        source: What is quick or slow together: the limiter.
        must_leave: Whether it is sent even if its caller has given up.
        abandoned: What takes the reply if the caller has given up.
        alone: Whether it cannot share a batch.
        lane: Where it was sent.
        state: Whether it waits, was sent, or is over.
        has_left_before: Whether it was sent before, in vain.
    """

    __slots__ = (
        "abandoned",
        "alone",
        "due",
        "has_left_before",
        "lane",
        "must_leave",
        "request",
        "since",
        "source",
        "state",
    )

    def __init__(
        self,
        request: Any,
        since: float,
        due: float,
        source: str = "",
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> None:
        self.request = request
        self.since = since
        self.due = due
        self.source = source
        self.must_leave = must_leave
        self.abandoned = abandoned
        self.alone = False
        self.lane: Any = None
        self.state = WAITING
        self.has_left_before = False

    def is_abandoned(self) -> bool:
        """Return whether its caller no longer waits."""
        raise NotImplementedError

    def deliver(self, reply: Any, error: BaseException | None) -> None:
        """Give the caller its reply, or its error; then the call is over."""
        raise NotImplementedError

    def answer(self, reply: Any) -> None:
        """Hand over the reply, unless it comes too late."""
        if self.state == OVER:
            return
        if not self.is_abandoned():
            self.deliver(reply, None)
            return
        if self.abandoned is not None:
            self.abandoned(reply)
        self.state = OVER

    def fail(self, error: BaseException) -> None:
        """Hand over why there is no reply."""
        if self.state != OVER:
            self.deliver(None, error)


class Queue:
    """Calls that leave together.

    Attributes:
        waiting: Those that have not left.
        lane: Where others of them are under way.
    """

    __slots__ = ("lane", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[RemoteCall] = deque()
        self.lane: Any = None


class Lane:
    """A connection, or room for one. Drivers add what they need.

    Attributes:
        wire: The connection; `None` while there is none.
        queue: Whose calls it carries now; `None` while it is idle.
        batch: The calls whose replies come next.
        following: Those that have left after them.
        answered: How many the batch before has answered that are likely to call again: none if it was the first.
        is_first: Whether the batch has left after a pause.
        enough: How many have to wait until they follow.
        sent: Since when the server works on the batch, or since when a connection is made.
        left: When the batch, or the next part of what it says, has left; and when that which follows has.
        is_heard: Whether it has said something about the batch.
        closed_until: When a connection may be tried again after it failed.
    """

    __slots__ = (
        "answered",
        "batch",
        "closed_until",
        "enough",
        "following",
        "is_first",
        "is_heard",
        "left",
        "queue",
        "sent",
        "wire",
    )

    def __init__(self) -> None:
        self.wire: Any = None
        self.queue: Queue | None = None
        self.batch: list[RemoteCall] = []
        self.following: list[RemoteCall] = []
        self.answered = 0
        self.is_first = False
        self.enough = TOO_MANY
        self.sent = 0.0
        self.left = (0.0, 0.0)
        self.is_heard = False
        self.closed_until = 0.0


class Batcher:
    """The calls of one event loop, or of all threads, to one server.

    Args:
        peer: The server.
        deadline: Seconds after which a connection that is silent is given up.
        new_lane: Makes a lane.
        follows: Whether a batch may leave on a connection while another one is under way there.

    Attributes:
        lanes: All lanes.
        alarm: When `expire` has something to do, at the earliest.
        is_ending: Whether no more calls come, so that all that wait may leave at once.
    """

    def __init__(
        self, peer: Peer, deadline: float, new_lane: Callable[[], Any], follows: bool = False
    ) -> None:
        self.lanes: list[Any] = [new_lane() for _ in range(peer.lanes)]
        self.alarm = _NEVER
        self.is_ending = False
        self._peer = peer
        self._deadline = deadline
        self._follows = follows
        self._quick = Queue()
        self._slow: dict[str, Queue] = {}
        self._heard = -_NEVER
        self._usual = 0.0
        self._patience = SLOW if peer.lanes > 1 else _NEVER

    def add(self, call: RemoteCall) -> bool:
        """Take a call; return whether it might leave at once."""
        queue = self._queue_of(call) if self._slow else self._quick
        queue.waiting.append(call)
        due, lane = call.due, queue.lane
        if lane is not None and lane.batch and lane.sent + self._patience < due:
            due = lane.sent + self._patience
        if due < self.alarm:
            self.alarm = due
        return lane is None or len(queue.waiting) == lane.enough

    def next_lane(self, now: float) -> Any:
        """Return a lane on which calls can leave now, or follow; it is theirs until `finish` or `lose`."""
        for queue in self._queues() if self._slow else (self._quick,):
            lane = queue.lane
            if lane is not None and len(queue.waiting) >= lane.enough:
                lane.enough = TOO_MANY
                return lane
            if queue.waiting and lane is None:
                lane = self._idle_lane(now, queue is self._quick)
                if lane is not None:
                    lane.queue, queue.lane = queue, lane
                    return lane
        return None

    def take(self, lane: Lane, now: float, after_pause: bool = False) -> list[RemoteCall]:
        """Return the calls that leave on a lane now; if there are none, the lane is idle again."""
        queue, peer = lane.queue, self._peer
        assert queue is not None
        waiting, most, room = queue.waiting, peer.most, peer.most_bytes
        batch: list[RemoteCall] = []
        if follows := bool(lane.batch):
            lane.following = batch
            lane.left = lane.left[0], now
        else:
            lane.batch = batch
            lane.sent, lane.is_heard, lane.left = now, False, (now, now)
            lane.is_first = after_pause
            most = min(most, self._share(lane, len(waiting)))
        while waiting and len(batch) < most:
            call = waiting[0]
            is_usual = call.state == WAITING and now < call.due and not (self._slow or call.is_abandoned())
            if not is_usual and self._stays(call, queue, now):
                waiting.popleft()
                continue
            if room is not None:
                room -= peer.size(call.request)
                if batch and room < 0:
                    break
            if batch and (call.alone or batch[0].alone):
                break
            batch.append(call)
            waiting.popleft()
            call.lane, call.state = lane, SENT
        if not follows:
            if not batch:
                self.finish(lane)
                return batch
            self._let_follow(lane)
        if waiting and now + self._patience < self.alarm:
            self.alarm = now + self._patience
        return batch

    def leave(self, lane: Lane, now: float) -> None:
        """Take note that the next message on a lane is on its way: so far it was packed here, or waited for a core."""
        if not lane.following:
            lane.sent = now

    def hear(self, lane: Lane, now: float) -> None:
        """Take note that the server has said something on a lane."""
        self._heard = now
        if not lane.is_heard:
            lane.is_heard = True
            if len(self.lanes) > 1:
                self._measure(lane, now)
        # From now on it works on what it is asked next, as after it has said that it does not know the script.
        lane.sent = now

    def finish(self, lane: Lane, again: Iterable[RemoteCall] = (), alone: bool = True) -> None:
        """Take note that all of a batch is answered, but for those that leave once more, normally each alone."""
        if not lane.following and lane.queue is not None and lane.queue.lane is lane:
            lane.queue.lane = None
        for call in reversed([call for call in again if call.state == SENT]):
            call.state, call.alone = WAITING, alone or call.alone
            self._queue_of(call).waiting.appendleft(call)
        for call in lane.batch:
            if call.state == SENT:
                call.fail(self._peer.failure(ValueError("there was no reply to this call")))
        lane.answered = 0 if lane.is_first else len(lane.batch)
        lane.batch, lane.following = lane.following, []
        if lane.batch:
            lane.sent, lane.is_heard, lane.left = self._heard, False, (lane.left[1], lane.left[1])
            self._let_follow(lane)
        else:
            lane.queue, lane.enough = None, TOO_MANY

    def swap(self, lane: Lane) -> None:
        """Take note that the reply to the batch that follows comes before the next one to the batch itself."""
        if lane.following:
            lane.batch, lane.following = lane.following, lane.batch
            lane.sent, lane.is_heard, lane.left = self._heard, False, (lane.left[1], self._heard)

    def lose(self, lane: Lane, cause: BaseException | None) -> None:
        """Take note that the connection of a lane is lost, and fail the calls whose replies are lost with it.

        Without a cause the server was silent for too long.
        """
        lane.wire = None
        lane.batch, lane.following = lane.batch + lane.following, []
        again = []
        for call in lane.batch:
            if cause and not call.has_left_before and self._peer.may_repeat(call.request, cause):
                call.has_left_before = True
                again.append(call)
            else:
                call.fail(self._failure(cause))
        self.finish(lane, again, alone=False)  # none of them is to blame

    def time_to_connect(self, lane: Lane, now: float) -> float:
        """Return the seconds after which a connection under way is given up: not before all that wait for it are due."""
        lane.sent = now
        waiting = lane.queue.waiting if lane.queue else ()
        return max(self._deadline, max((call.due for call in waiting), default=now) - now)

    def cannot_connect(self, lane: Lane, cause: BaseException, now: float) -> None:
        """Take note that there is no connection to be had; all fail that wait, unless another lane has one."""
        self.finish(lane)
        if any(other.wire is not None for other in self.lanes):
            lane.closed_until = now + RECONNECT_PAUSE
        else:
            self.fail_waiting(cause)

    def fail_waiting(self, cause: BaseException | None) -> None:
        """Fail all calls that have not left."""
        for queue in self._queues():
            while queue.waiting:
                queue.waiting.popleft().fail(self._failure(cause))

    def expire(self, now: float, late: float = 0.0, busy: float = 0.0) -> list[Any]:
        """Fail the calls that are due, and return the lanes that the driver has to `give_up`.

        For `late` seconds this process was too busy to look. They do not count as time that the server had: a connection
        or a reply may be there and unnoticed. For `busy` seconds it has looked, and at much else in between: any reply has
        been read, but a connection takes many steps.
        """
        for lane in self.lanes:
            lane.sent = min(lane.sent + (late if lane.wire is not None else late + busy), now)
        for queue in self._queues():
            if any(call.due <= now for call in queue.waiting):
                queue.waiting = deque(call for call in queue.waiting if not self._is_expired(call, now))
        silent = []
        for lane in self.lanes:
            for call in (*lane.batch, *lane.following):
                if call.due <= now:
                    call.fail(self._failure(None) if _had_time(lane, call) else self._overload())
            if lane.batch and now >= self._given_up_at(lane):
                silent.append(lane)
            elif self._holds_up(lane) and now >= lane.sent + self._patience:
                self._isolate(lane)
        self.alarm = max(self._next_due(), now + EXPIRY_PAUSE)
        return silent

    def give_up(self, lane: Lane) -> None:
        """Fail what is under way on a lane.

        If the server has said nothing to anybody since that left, those that wait fail too: they would only find out once
        more that is not answered.
        """
        is_silent = self._heard <= lane.sent  # equal if it has followed: it counts from the reply before
        self.lose(lane, None)
        if is_silent:
            self.fail_waiting(None)

    def crowd(self) -> int:
        """Return how many calls wait to leave."""
        return sum(len(queue.waiting) for queue in self._queues())

    def main_lane(self) -> Any:
        """Return the lane of those calls whose limiters are not slow; `None` if nothing is under way there."""
        return self._quick.lane

    def lane_of(self, call: RemoteCall) -> Any:
        """Return the lane on which a call is under way, or for which it waits; `None` if there is none."""
        return call.lane if call.state == SENT else self._queue_of(call).lane

    def someone_on(self, lane: Lane) -> RemoteCall | None:
        """Return a call whose caller waits for what happens on a lane; `None` if there is none."""
        calls = (*lane.batch, *lane.queue.waiting) if lane.queue else ()
        return next((call for call in calls if call.state != OVER and not call.is_abandoned()), None)

    def _queues(self) -> Iterable[Queue]:
        return (self._quick, *self._slow.values()) if self._slow else (self._quick,)

    def _queue_of(self, call: RemoteCall) -> Queue:
        return self._slow.get(call.source, self._quick) if self._slow else self._quick

    def _let_follow(self, lane: Lane) -> None:
        """Say how many calls have to wait until they follow a batch: as many as it has, so that both are alike."""
        lane.enough = max(MANY // 2, len(lane.batch)) if self._follows else TOO_MANY

    def _share(self, lane: Lane, waiting: int) -> int:
        """Return how many of the calls that wait may leave.

        Where there are many, half of them should be at the server while the other half is worked on here: otherwise the two
        take turns, and each waits for the other. After a pause the others follow. Where none can follow, those that a batch
        has just answered are likely to call again, and so belong to the other half; unless this is the end.
        """
        if lane.is_first:
            return (waiting + 1) // 2 if waiting >= MANY else waiting
        if self._follows or self.is_ending or not lane.answered or waiting + lane.answered < MANY:
            return waiting
        return (waiting + lane.answered + 1) // 2

    def _idle_lane(self, now: float, is_quick: bool) -> Any:
        """Return an idle lane, preferably one with a connection; the last one is kept for what is quick."""
        if not is_quick and self._quick.lane is None and sum(lane.queue is None for lane in self.lanes) == 1:
            return None
        unconnected = None
        for lane in self.lanes:
            if lane.queue is None:
                if lane.wire is not None:
                    return lane
                if unconnected is None and lane.closed_until <= now:
                    unconnected = lane
        return unconnected

    def _stays(self, call: RemoteCall, queue: Queue, now: float) -> bool:
        """Return whether the next call of a queue stays behind, and see to it that none waits for it there."""
        if call.state != WAITING:
            return True
        if call.due <= now:  # it could leave, so it is this process that comes late
            call.fail(self._overload())
            return True
        if call.is_abandoned() and not call.must_leave:
            call.state = OVER
            return True
        own = self._queue_of(call)
        if own is queue:
            return False
        own.waiting.append(call)  # its limiter has become slow
        return True

    def _is_expired(self, call: RemoteCall, now: float) -> bool:
        """Fail a call that was not sent by its deadline."""
        if call.due > now:
            return False
        is_asked = any(
            lane.queue and (lane.batch or lane.wire is None) and _had_time(lane, call) for lane in self.lanes
        )
        call.fail(self._failure(None) if is_asked and self._heard < call.since else self._overload())
        return True

    def _next_due(self) -> float:
        dues = [call.due for queue in self._queues() for call in queue.waiting]
        for lane in self.lanes:
            if lane.batch:
                dues += [call.due for call in (*lane.batch, *lane.following) if call.state == SENT]
                dues.append(self._given_up_at(lane))
                if self._holds_up(lane):
                    dues.append(lane.sent + self._patience)
        return min(dues, default=_NEVER)

    def _overload(self) -> StoreOverloaded:
        return StoreOverloaded(f"{self._peer.name} could not be asked in time: this process is too busy")

    def _failure(self, cause: BaseException | None) -> StoreError:
        if cause is None:
            cause = TimeoutError("no answer in time")
        if isinstance(
            cause, InterruptedError
        ):  # this process has broken it off: that is no fault of the server's
            return StoreError(f"{self._peer.name}: {cause}")
        return self._peer.failure(cause)

    def _given_up_at(self, lane: Lane) -> float:
        """Return when the connection of a lane is given up: not before all that is under way there is due."""
        return max(lane.sent + self._deadline, max(call.due for call in lane.batch))

    def _holds_up(self, lane: Lane) -> bool:
        """Tell whether calls wait for a batch that is under way."""
        queue = lane.queue
        return bool(lane.batch and queue is not None and queue.lane is lane and queue.waiting)

    def _measure(self, lane: Lane, now: float) -> None:
        """Compare what a batch took the server with what a round trip usually takes, to know which limiters are slow."""
        took, round_trip = now - lane.sent, now - lane.left[0]
        is_isolated = lane.queue is None or lane.queue.lane is not lane
        if not self._usual and not is_isolated:
            self._usual = round_trip  # the server may be far away
        elif took > self._patience:
            self._isolate(lane)
        elif self._slow and len(sources := {call.source for call in lane.batch}) == 1:
            self._mix_again(*sources)
        # Quick ones count at once, slow ones little by little: otherwise what is slow all the time would be usual.
        self._usual += (round_trip - self._usual) / (4 if round_trip < self._usual else 64)
        self._patience = max(SLOW, 4 * self._usual)

    def _isolate(self, lane: Lane) -> None:
        """Give each limiter of a slow batch a queue of its own, and let those that wait for it leave on another lane."""
        for call in lane.batch:
            if call.source not in self._slow:
                self._slow[call.source] = Queue()
        if lane.queue is not None and lane.queue.lane is lane:
            lane.queue.lane = None
            lane.queue = Queue()  # of no limiter: it is busy until its batch is answered

    def _mix_again(self, source: str) -> None:
        """Let a limiter that is quick again leave with all others."""
        queue = self._slow.get(source)
        if queue is not None and queue.lane is not None:
            del self._slow[source]
            self._quick.waiting.extend(queue.waiting)
            queue.waiting.clear()


def _had_time(lane: Lane, call: RemoteCall) -> bool:
    """Return whether the server had half of a call's time, or more, to answer on a lane."""
    return 2 * (call.due - lane.sent) >= call.due - call.since
