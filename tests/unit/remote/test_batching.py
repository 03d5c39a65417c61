"""Which calls leave when, and what becomes of them; with times of the test's own and no connection at all."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.errors import StoreError, StoreOverloaded, StoreTimeout, StoreUnavailable
from headgate.stores.remote.batching import (
    EXPIRY_PAUSE,
    MANY,
    OVER,
    RECONNECT_PAUSE,
    SLOW,
    Batcher,
    Lane,
    RemoteCall,
)
from tests.unit.remote.scripted import ScriptedPeer

DEADLINE = 1.0


class NotedCall(RemoteCall):
    """A call that keeps what it is told."""

    __slots__ = ("error", "has_left", "reply")

    def __init__(
        self, request: str, now: float = 0.0, deadline: float = DEADLINE, source: str = "", **rest: Any
    ) -> None:
        super().__init__(request, now, now + deadline, source, **rest)
        self.has_left = False
        self.reply: Any = None
        self.error: BaseException | None = None

    def is_abandoned(self) -> bool:
        return self.has_left

    def deliver(self, reply: Any, error: BaseException | None) -> None:
        self.reply, self.error, self.state = reply, error, OVER


class Traffic:
    """A batcher whose lanes are driven by hand."""

    def __init__(
        self, lanes: int = 1, most: int = 128, *, connected: bool = True, follows: bool = False
    ) -> None:
        self.peer = ScriptedPeer(lanes, most)
        self.batcher = Batcher(self.peer, DEADLINE, Lane, follows)
        for lane in self.batcher.lanes if connected else ():
            lane.wire = object()

    def add(self, *calls: NotedCall) -> None:
        for call in calls:
            self.batcher.add(call)

    def depart(self, now: float = 0.0, *, after_pause: bool = False) -> list[Lane]:
        """Have all calls leave that can, and return the lanes on which they did."""
        lanes = []
        while (lane := self.batcher.next_lane(now)) is not None:
            if self.batcher.take(lane, now, after_pause=after_pause):
                lanes.append(lane)
        return lanes

    def reply(self, lane: Lane, now: float = 0.0) -> None:
        """Answer all that is under way on a lane."""
        self.batcher.hear(lane, now)
        for call in lane.batch:
            call.answer(call.request)
        self.batcher.finish(lane)


def requests(lane: Lane) -> list[str]:
    return [call.request for call in lane.batch]


def calls(names: str, now: float = 0.0, **rest: Any) -> list[NotedCall]:
    return [NotedCall(name, now, **rest) for name in names]


# --- Together --------------------------------------------------------------------------------------------------------


def test_a_lone_call_leaves_at_once_and_alone() -> None:
    traffic = Traffic()
    [a] = calls("a")
    traffic.add(a)
    [lane] = traffic.depart()
    assert requests(lane) == ["a"]
    traffic.reply(lane)
    assert a.reply == "a"
    assert traffic.depart() == []


def test_calls_that_come_while_a_round_trip_is_under_way_leave_together_in_order() -> None:
    traffic = Traffic()
    traffic.add(*calls("a"))
    [lane] = traffic.depart()
    for call in calls("bcd"):
        traffic.add(call)
        assert traffic.depart() == []
    traffic.reply(lane)
    [lane] = traffic.depart()
    assert requests(lane) == ["b", "c", "d"]


def test_a_batch_is_bounded_by_number_and_by_size() -> None:
    traffic = Traffic(most=3)
    traffic.add(*calls("abcd"))
    [lane] = traffic.depart()
    assert requests(lane) == ["a", "b", "c"]
    traffic = Traffic()
    traffic.peer.most_bytes = 5
    traffic.add(NotedCall("aa"), NotedCall("bb"), NotedCall("cc"), NotedCall("ddddddd"), NotedCall("e"))
    for expected in (["aa", "bb"], ["cc"], ["ddddddd"], ["e"]):
        [lane] = traffic.depart()
        assert requests(lane) == expected
        traffic.reply(lane)


def test_of_many_that_have_gathered_in_a_pause_the_first_half_leaves_first() -> None:
    traffic = Traffic()
    traffic.add(*(NotedCall(f"{number}") for number in range(MANY)))
    [lane] = traffic.depart(after_pause=True)
    assert len(lane.batch) == MANY // 2
    traffic.reply(lane)
    [lane] = traffic.depart()
    assert len(lane.batch) == MANY // 2


HALF = MANY // 2


def under_way(traffic: Traffic, lane: Lane, returning: bool) -> int:
    """Answer what is under way, have its callers call again if they do, and return how many leave next."""
    answered = len(lane.batch)
    traffic.reply(lane)
    [lane] = traffic.depart()
    traffic.add(*numbered(0, answered if returning else 0))
    return len(lane.batch)


def test_of_many_that_call_again_and_again_half_are_under_way_where_none_can_follow() -> None:
    traffic = Traffic()
    traffic.add(NotedCall("first"))
    [lane] = traffic.depart(after_pause=True)
    traffic.add(*numbered(0, MANY - 1))
    sizes = [under_way(traffic, lane, returning=True) for _ in range(6)]
    assert sizes == [MANY - 1, 1, HALF, HALF, HALF, HALF]


@pytest.mark.parametrize("count", [MANY - 1, 3 * MANY])
def test_those_that_call_once_all_leave_with_the_second_round_trip(count: int) -> None:
    traffic = Traffic()
    traffic.add(NotedCall("first"))
    [lane] = traffic.depart(after_pause=True)
    traffic.add(*numbered(0, count))
    assert under_way(traffic, lane, returning=False) == count


def test_at_the_end_all_that_wait_leave() -> None:
    traffic = Traffic()
    traffic.add(*numbered(0, MANY))
    [lane] = traffic.depart()
    traffic.add(*numbered(0, MANY))
    traffic.batcher.is_ending = True
    assert under_way(traffic, lane, returning=False) == MANY


def test_of_few_all_that_wait_are_under_way_next() -> None:
    traffic = Traffic()
    traffic.add(NotedCall("first"))
    [lane] = traffic.depart()
    traffic.add(*numbered(0, MANY - 2))
    assert under_way(traffic, lane, returning=False) == MANY - 2


def numbered(first: int, count: int, now: float = 0.0, **rest: Any) -> list[NotedCall]:
    return [NotedCall(str(number), now, **rest) for number in range(first, first + count)]


def following(lanes: int = 1) -> tuple[Traffic, Lane, list[NotedCall]]:
    """Two batches under way on one connection."""
    traffic, calls = Traffic(lanes, follows=True), numbered(0, MANY, source="quick")
    traffic.add(*calls[:HALF])
    [lane] = traffic.depart()
    traffic.add(*calls[HALF:])
    assert traffic.depart(0.1) == [lane]
    return traffic, lane, calls


def test_as_many_as_are_under_way_need_not_wait_for_their_end() -> None:
    traffic, lane, calls = following()
    traffic.add(*numbered(MANY, MANY))
    assert traffic.depart() == []  # one that follows is enough
    assert [call.request for call in (*lane.batch, *lane.following)] == [call.request for call in calls]
    traffic.reply(lane, 0.2)
    assert lane.batch == calls[HALF:]
    assert traffic.depart(0.2) == [lane]
    assert [call.request for call in lane.following] == [str(number) for number in range(MANY, 2 * MANY)]
    traffic.reply(lane, 0.3)
    traffic.reply(lane, 0.4)
    assert [call.reply for call in calls] == [call.request for call in calls]
    assert lane.queue is None
    traffic.add(*numbered(0, HALF))
    assert traffic.depart() == [lane]  # as one whose connection was never used


@pytest.mark.parametrize("under_way", [1, HALF, HALF + 3])
def test_fewer_wait_for_the_reply(under_way: int) -> None:
    traffic = Traffic(follows=True)
    traffic.add(*numbered(0, under_way))
    [lane] = traffic.depart()
    enough = max(under_way, HALF)
    mays = [traffic.batcher.add(call) for call in numbered(0, enough - 1)]
    assert not any(mays)
    assert traffic.depart() == []
    assert traffic.batcher.add(NotedCall("the last"))
    assert traffic.depart() == [lane]


def test_without_leave_to_follow_all_wait_for_the_reply() -> None:
    traffic = Traffic()
    traffic.add(*numbered(0, HALF))
    [lane] = traffic.depart()
    traffic.add(*numbered(0, 10 * MANY))
    assert traffic.depart() == []
    traffic.reply(lane)
    assert traffic.depart() == [lane]


def test_if_all_that_were_to_follow_have_given_up_the_batch_goes_on_alone() -> None:
    traffic = Traffic(follows=True)
    traffic.add(*numbered(0, HALF))
    [lane] = traffic.depart()
    gone = numbered(0, HALF)
    traffic.add(*gone)
    for call in gone:
        call.has_left = True
    assert traffic.depart() == []
    assert len(lane.batch) == HALF
    traffic.reply(lane)
    assert lane.queue is None


def test_a_batch_that_says_more_is_answered_after_the_one_that_follows() -> None:
    traffic, lane, calls = following()
    traffic.batcher.hear(lane, 0.2)
    traffic.batcher.swap(lane)
    traffic.reply(lane, 0.3)
    assert [call.reply for call in calls] == [None] * HALF + [call.request for call in calls[HALF:]]
    traffic.reply(lane, 0.4)
    assert [call.reply for call in calls] == [call.request for call in calls]
    traffic.batcher.swap(lane)  # when nothing follows, nothing changes


def test_a_lost_connection_fails_what_follows_too_or_has_all_of_it_leave_again() -> None:
    traffic, lane, calls = following()
    traffic.batcher.lose(lane, ConnectionResetError("gone"))
    assert all(isinstance(call.error, StoreUnavailable) for call in calls)
    assert lane.queue is None
    traffic = Traffic(follows=True)
    repeated = [NotedCall(f"repeat {number}") for number in range(MANY)]
    traffic.add(*repeated[:HALF])
    [lane] = traffic.depart()
    traffic.add(*repeated[HALF:])
    assert traffic.depart() == [lane]
    traffic.batcher.lose(lane, ConnectionResetError("gone"))
    lane.wire = object()
    assert traffic.depart() == [lane]
    assert lane.batch == repeated  # together: none of them is to blame
    traffic.reply(lane)
    assert all(call.reply for call in repeated)


def test_what_follows_is_due_like_all_others() -> None:
    traffic = Traffic(follows=True)
    traffic.add(*numbered(0, HALF))
    [lane] = traffic.depart()
    late = [NotedCall("hasty", 0.0, 0.3), *numbered(0, HALF - 1)]
    traffic.add(*late)
    traffic.depart(0.1)
    assert traffic.batcher.alarm <= 0.3
    assert traffic.batcher.expire(0.3) == []
    assert isinstance(late[0].error, StoreTimeout)
    assert all(call.error is None for call in (*lane.batch, *late[1:]))
    traffic.reply(lane, 0.9)
    assert traffic.batcher.expire(DEADLINE) == []  # the server has just spoken
    assert lane.sent == 0.9
    [silent] = traffic.batcher.expire(0.9 + DEADLINE)
    traffic.batcher.give_up(silent)
    assert not lane.batch


def test_when_what_follows_gets_no_reply_those_that_wait_fail_too() -> None:
    traffic, lane, calls = following()
    traffic.reply(lane, 0.2)
    waiting = NotedCall("waiting", 0.3)
    traffic.add(waiting)
    [silent] = traffic.batcher.expire(0.2 + DEADLINE)
    traffic.batcher.give_up(silent)
    assert all(isinstance(call.error, StoreTimeout) for call in (*calls[HALF:], waiting))


def test_what_follows_a_slow_batch_is_not_slow_for_it() -> None:
    traffic = Traffic(lanes=3, follows=True)
    traffic.add(*numbered(0, HALF, source="slow"))
    [stuck] = traffic.depart()
    traffic.add(*numbered(0, HALF, source="quick"))
    assert traffic.depart() == [stuck]
    traffic.add(NotedCall("next", source="quick"), NotedCall("slow too", source="slow"))
    traffic.batcher.expire(SLOW)
    assert [requests(lane) for lane in traffic.depart(SLOW)] == [["next"], ["slow too"]]
    traffic.reply(stuck, 0.9)
    assert {call.source for call in stuck.batch} == {"quick"}
    traffic.reply(stuck, 0.9 + SLOW / 2)  # its time counts from the reply to the one before
    assert stuck.queue is None


def test_what_follows_to_a_server_far_away_does_not_make_its_round_trip_look_slow() -> None:
    traffic, far, gap = Traffic(lanes=2, follows=True), 0.1, 0.001
    traffic.add(*numbered(0, HALF))
    [lane] = traffic.depart()
    traffic.add(*numbered(0, HALF))
    assert traffic.depart(gap) == [lane]
    for number in range(1, 50):  # each reply comes `far` after its batch has left, and two of them together
        for now in (number * far, number * far + gap):
            traffic.reply(lane, now)
            traffic.add(*numbered(0, HALF, now))
            assert traffic.depart(now) == [lane]
    assert traffic.batcher.main_lane() is lane
    traffic.add(NotedCall("next", now))
    traffic.batcher.expire(now + far - gap)
    assert traffic.depart(now + far - gap) == []


def test_what_the_server_has_not_done_leaves_once_more_each_alone() -> None:
    traffic = Traffic()
    traffic.add(*calls("ab"))
    [lane] = traffic.depart()
    traffic.add(*calls("c"))
    traffic.batcher.finish(lane, lane.batch)
    for expected in (["a"], ["b"], ["c"]):
        [lane] = traffic.depart()
        assert requests(lane) == expected
        traffic.reply(lane)


def test_a_call_that_a_peer_forgets_to_answer_fails() -> None:
    traffic = Traffic()
    [a] = calls("a")
    traffic.add(a)
    [lane] = traffic.depart()
    traffic.batcher.finish(lane)
    assert isinstance(a.error, StoreUnavailable)


# --- Callers that give up --------------------------------------------------------------------------------------------


def test_a_call_that_is_given_up_before_it_leaves_does_not_leave_unless_it_must() -> None:
    traffic = Traffic()
    hit, record = NotedCall("hit"), NotedCall("record", must_leave=True)
    traffic.add(hit, record)
    hit.has_left = record.has_left = True
    [lane] = traffic.depart()
    assert requests(lane) == ["record"]


def test_if_all_that_waited_have_given_up_the_lane_is_idle_again() -> None:
    traffic = Traffic()
    [a, b] = calls("ab")
    a.has_left = True
    traffic.add(a)
    assert traffic.depart() == []
    traffic.add(b)
    [lane] = traffic.depart()
    assert requests(lane) == ["b"]


def test_the_reply_to_a_call_that_was_given_up_goes_to_who_cleans_up() -> None:
    traffic = Traffic()
    released: list[Any] = []
    hold = NotedCall("hold", abandoned=released.append)
    traffic.add(hold)
    [lane] = traffic.depart()
    hold.has_left = True
    traffic.reply(lane)
    assert released == ["hold"]
    assert hold.reply is None


# --- Deadlines -------------------------------------------------------------------------------------------------------


def test_a_call_fails_when_it_is_due_and_no_other_does() -> None:
    traffic = Traffic()
    tight, patient = NotedCall("tight", deadline=0.003), NotedCall("patient")
    traffic.add(tight, patient)
    [lane] = traffic.depart()
    assert traffic.batcher.alarm == 0.003
    assert traffic.batcher.expire(0.003) == []
    assert isinstance(tight.error, StoreTimeout)
    assert patient.state != OVER
    traffic.reply(lane, 0.5)
    assert patient.reply == "patient"
    assert tight.reply is None  # it came too late


def test_a_server_that_has_just_asked_for_more_is_not_silent() -> None:
    """As Redis does for a script that it does not know; this process may have come late to read that."""
    traffic = Traffic()
    call = NotedCall("a", deadline=0.02)
    traffic.add(call)
    [lane] = traffic.depart()
    traffic.batcher.hear(lane, 0.02)
    assert traffic.batcher.expire(0.02) == []
    assert isinstance(call.error, StoreOverloaded)


def test_a_tight_deadline_does_not_cost_the_connection() -> None:
    """It says nothing about the server: only the store's own deadline does."""
    traffic = Traffic()
    traffic.add(NotedCall("tight", deadline=0.003))
    [lane] = traffic.depart()
    assert traffic.batcher.expire(0.1) == []
    assert traffic.batcher.expire(DEADLINE) == [lane]


def test_a_limiters_longer_deadline_keeps_the_connection() -> None:
    traffic = Traffic()
    traffic.add(NotedCall("patient", deadline=30))
    [lane] = traffic.depart()
    assert traffic.batcher.expire(29.9) == []
    assert traffic.batcher.expire(30) == [lane]


def test_when_a_silent_connection_is_given_up_those_that_wait_fail_too() -> None:
    """They would only find out once more that nobody answers, one time-out after the other."""
    traffic = Traffic()
    sent, waiting = NotedCall("sent"), NotedCall("waiting", 0.5)
    traffic.add(sent)
    traffic.depart()
    traffic.add(waiting)
    [lane] = traffic.batcher.expire(DEADLINE)
    traffic.batcher.give_up(lane)
    assert isinstance(sent.error, StoreTimeout)
    assert isinstance(waiting.error, StoreTimeout)
    assert sent.error is not waiting.error


def test_what_this_process_could_not_send_in_time_is_not_the_servers_fault() -> None:
    traffic = Traffic(most=1)
    late = NotedCall("late")
    traffic.add(NotedCall("a"), NotedCall("b"), late)
    [lane] = traffic.depart()
    traffic.reply(lane, 0.6)  # the server answers
    traffic.depart(0.6)
    traffic.batcher.expire(DEADLINE)
    assert isinstance(late.error, StoreOverloaded)


def test_what_was_not_sent_because_the_server_is_silent_is_a_time_out() -> None:
    traffic = Traffic()
    traffic.add(NotedCall("a", deadline=30))
    traffic.depart()
    waiting = NotedCall("waiting", 0.1)
    traffic.add(waiting)
    traffic.batcher.expire(0.1 + DEADLINE)
    assert isinstance(waiting.error, StoreTimeout)


def test_what_was_sent_late_and_has_no_reply_in_time_says_nothing_about_the_server() -> None:
    traffic = Traffic(most=1)
    early, late = NotedCall("early", 0.3), NotedCall("late")
    traffic.add(NotedCall("a"), late)
    [lane] = traffic.depart()
    traffic.reply(lane, 0.9)
    traffic.depart(0.9)
    traffic.batcher.expire(DEADLINE)
    assert isinstance(late.error, StoreOverloaded)
    # Where the server had most of the time, it is the one that did not answer.
    traffic = Traffic(most=1)
    traffic.add(NotedCall("a"), early)
    [lane] = traffic.depart()
    traffic.reply(lane, 0.4)
    traffic.depart(0.4)
    traffic.batcher.expire(0.3 + DEADLINE)
    assert isinstance(early.error, StoreTimeout)


def test_a_process_that_came_late_to_connect_or_to_send_does_not_blame_the_server() -> None:
    """As when an event loop starts 40,000 tasks at once."""
    traffic = Traffic(most=1, connected=False)
    waiting = NotedCall("waiting")
    traffic.add(NotedCall("a"), waiting)
    lane = traffic.batcher.next_lane(0)
    assert lane is not None
    traffic.batcher.time_to_connect(lane, 0.9)
    traffic.batcher.expire(DEADLINE)
    assert isinstance(waiting.error, StoreOverloaded)
    traffic = Traffic(most=1)
    sent, waiting = NotedCall("sent"), NotedCall("waiting")
    traffic.add(sent, waiting)
    traffic.depart(0.9)
    traffic.batcher.expire(DEADLINE)
    assert isinstance(sent.error, StoreOverloaded)
    assert isinstance(waiting.error, StoreOverloaded)


def test_time_in_which_the_process_did_not_look_is_no_silence_of_the_server() -> None:
    traffic = Traffic(most=1)
    sent, waiting = NotedCall("sent"), NotedCall("waiting")
    traffic.add(sent, waiting)
    [lane] = traffic.depart()
    assert traffic.batcher.expire(DEADLINE, late=0.6) == []
    assert isinstance(sent.error, StoreOverloaded)
    assert isinstance(waiting.error, StoreOverloaded)
    # The server has its whole time, however often the process does not look.
    assert traffic.batcher.expire(0.5 + DEADLINE) == []
    assert traffic.batcher.expire(0.6 + DEADLINE) == [lane]


def test_time_in_which_a_message_was_not_on_its_way_yet_is_no_silence_of_the_server() -> None:
    traffic = Traffic()
    call = NotedCall("a")
    traffic.add(call)
    [lane] = traffic.depart()
    traffic.batcher.leave(lane, 0.6)
    traffic.batcher.expire(DEADLINE)
    assert isinstance(call.error, StoreOverloaded)


def test_what_follows_does_not_give_the_server_more_time_for_what_is_before_it() -> None:
    traffic = Traffic(follows=True)
    traffic.add(*calls("a" * HALF))
    [lane] = traffic.depart()
    traffic.add(*calls("b" * HALF, deadline=30))
    assert traffic.batcher.next_lane(0.6) is lane
    traffic.batcher.take(lane, 0.6)
    traffic.batcher.leave(lane, 0.6)
    assert traffic.batcher.expire(DEADLINE) == [lane]


def test_a_busy_process_has_read_every_reply_but_may_not_have_come_to_connect() -> None:
    traffic = Traffic()
    sent, unsent = NotedCall("sent"), NotedCall("unsent")
    traffic.add(sent)
    traffic.depart()
    traffic.batcher.expire(DEADLINE, busy=0.6)
    assert isinstance(sent.error, StoreTimeout)
    traffic = Traffic(connected=False)
    traffic.add(unsent)
    traffic.depart()
    traffic.batcher.expire(DEADLINE, busy=0.6)
    assert isinstance(unsent.error, StoreOverloaded)


def test_a_server_that_is_silent_most_of_the_time_is_to_blame_though_the_process_looked_away() -> None:
    traffic = Traffic()
    call = NotedCall("a")
    traffic.add(call)
    traffic.depart()
    traffic.batcher.expire(DEADLINE, late=0.4)
    assert isinstance(call.error, StoreTimeout)


def test_what_was_not_sent_because_there_is_no_connection_yet_is_a_time_out() -> None:
    traffic = Traffic(connected=False)
    call = NotedCall("a")
    traffic.add(call)
    assert traffic.batcher.next_lane(0) is not None
    traffic.batcher.expire(DEADLINE)
    assert isinstance(call.error, StoreTimeout)


def test_what_a_blocked_process_never_came_to_send_is_overload_and_is_not_sent_late() -> None:
    traffic = Traffic()
    call = NotedCall("a")
    traffic.add(call)
    lane = traffic.batcher.next_lane(0)
    assert lane is not None
    assert traffic.batcher.take(lane, DEADLINE) == []
    assert isinstance(call.error, StoreOverloaded)


def test_what_could_have_followed_in_time_is_overload_though_the_server_was_asked_meanwhile() -> None:
    """As when very many calls have to be failed before those that are left can follow."""
    traffic = Traffic(follows=True)
    traffic.add(*calls("a" * MANY, deadline=30))
    [lane] = traffic.depart()
    late = calls("b" * MANY)
    traffic.add(*late)
    assert traffic.batcher.next_lane(0) is lane
    assert traffic.batcher.take(lane, DEADLINE) == []
    assert all(isinstance(call.error, StoreOverloaded) for call in late)


def test_a_connection_is_waited_for_as_long_as_anybody_does() -> None:
    traffic = Traffic(connected=False)
    traffic.add(NotedCall("a"), NotedCall("b", deadline=30))
    lane = traffic.batcher.next_lane(0)
    assert lane is not None
    assert traffic.batcher.time_to_connect(lane, 10) == 20
    assert traffic.batcher.time_to_connect(lane, 29.5) == DEADLINE


# --- Connections that break ------------------------------------------------------------------------------------------


def test_a_lost_connection_fails_what_is_under_way_and_nothing_else() -> None:
    traffic = Traffic()
    [a, b, c] = calls("abc")
    traffic.add(a, b)
    [lane] = traffic.depart()
    traffic.add(c)
    traffic.batcher.lose(lane, ConnectionResetError("gone"))
    assert isinstance(a.error, StoreUnavailable)
    assert a.error is not b.error
    assert lane.wire is None
    [lane] = traffic.depart()
    assert requests(lane) == ["c"]


def test_a_connection_that_this_process_has_given_up_is_no_fault_of_the_server() -> None:
    traffic = Traffic()
    [a] = calls("a")
    traffic.add(a)
    [lane] = traffic.depart()
    traffic.batcher.lose(lane, InterruptedError("a signal handler raised"))
    assert type(a.error) is StoreError


def test_what_may_be_repeated_is_once() -> None:
    traffic = Traffic()
    settle = NotedCall("repeat this")
    traffic.add(settle)
    for _ in range(2):
        assert settle.error is None
        [lane] = traffic.depart()
        traffic.batcher.lose(lane, ConnectionResetError("gone"))
    assert isinstance(settle.error, StoreUnavailable)


def test_without_any_connection_all_that_wait_fail() -> None:
    traffic = Traffic(connected=False)
    [a, b] = calls("ab")
    traffic.add(a, b)
    lane = traffic.batcher.next_lane(0)
    assert lane is not None
    traffic.batcher.cannot_connect(lane, ConnectionRefusedError("no"), 0)
    assert isinstance(a.error, StoreUnavailable)
    assert isinstance(b.error, StoreUnavailable)
    assert traffic.batcher.next_lane(0) is None
    traffic.add(*calls("c"))
    assert traffic.batcher.next_lane(0) is lane  # it is tried again at once


def test_a_further_connection_that_cannot_be_had_fails_nobody() -> None:
    """A server may have no more connections for us; the one that there is carries all calls."""
    traffic = Traffic(lanes=2)
    first, second = traffic.batcher.lanes
    second.wire = None
    waiting = NotedCall("b", deadline=30, source="other")
    traffic.add(*calls("a", deadline=30))
    traffic.depart()
    traffic.add(waiting)
    traffic.batcher.expire(SLOW)
    assert traffic.batcher.next_lane(SLOW) is second
    traffic.batcher.cannot_connect(second, ConnectionRefusedError("no"), SLOW)
    assert waiting.error is None
    assert traffic.batcher.next_lane(SLOW) is None
    assert traffic.batcher.next_lane(SLOW + RECONNECT_PAUSE) is second
    assert requests(first) == ["a"]


# --- Slow limiters ---------------------------------------------------------------------------------------------------


def hold_up(traffic: Traffic) -> Lane:
    """Have calls of two limiters under way in one batch for longer than usual, and return the lane."""
    traffic.add(NotedCall("slow 1", source="slow"), NotedCall("quick 1", source="quick"))
    [lane] = traffic.depart()
    traffic.add(NotedCall("slow 2", source="slow"), NotedCall("other 1", source="other"))
    assert traffic.depart() == []
    assert traffic.batcher.alarm == SLOW
    traffic.batcher.expire(SLOW)
    return lane


def test_nobody_else_waits_for_a_batch_that_takes_long() -> None:
    traffic = Traffic(lanes=4)
    stuck = hold_up(traffic)
    left = traffic.depart(SLOW)
    assert [requests(lane) for lane in left] == [["other 1"], ["slow 2"]]
    assert stuck not in left


def test_a_slow_limiter_shares_no_batch_until_it_is_quick_again() -> None:
    traffic = Traffic(lanes=4)
    stuck = hold_up(traffic)
    [other, slow] = traffic.depart(SLOW)
    traffic.reply(other, SLOW + 0.001)
    for lane in (stuck, slow):
        traffic.reply(lane, 0.9)
    traffic.add(NotedCall("a", 10.0, source="other"), NotedCall("b", 10.0, source="slow"))
    lanes = traffic.depart(10.0)
    assert [requests(lane) for lane in lanes] == [["a"], ["b"]]
    for lane in lanes:
        traffic.reply(lane, 10.001)
    traffic.add(NotedCall("c", 11.0, source="other"), NotedCall("d", 11.0, source="slow"))
    assert [requests(lane) for lane in traffic.depart(11.0)] == [["c", "d"]]


def test_the_last_lane_is_kept_for_limiters_that_are_not_slow() -> None:
    traffic = Traffic(lanes=3)
    hold_up(traffic)  # one lane is stuck
    [other, slow] = traffic.depart(SLOW)
    traffic.reply(other, SLOW)
    traffic.add(NotedCall("quick 2", SLOW, source="quick"))  # it was in the batch that is stuck
    assert traffic.depart(SLOW) == []
    traffic.add(NotedCall("other 2", SLOW, source="other"))
    [lane] = traffic.depart(SLOW)
    assert requests(lane) == ["other 2"]
    assert slow.batch


def test_a_server_that_is_far_away_is_not_slow() -> None:
    """What is usual is measured: a round trip of 50 ms is, if all take as long."""
    traffic = Traffic(lanes=4)
    now = 0.0
    for number in range(50):
        traffic.add(NotedCall("a", now, source="one"), NotedCall("b", now, source="two"))
        lanes = traffic.depart(now)
        assert [requests(lane) for lane in lanes] == [["a", "b"]], f"round {number}"
        now += 0.05
        traffic.batcher.expire(now)
        traffic.reply(lanes[0], now)


def test_with_a_single_lane_nothing_is_slow() -> None:
    traffic = Traffic(lanes=1)
    traffic.add(*calls("a"))
    traffic.depart()
    traffic.add(*calls("b"))
    assert traffic.batcher.alarm == DEADLINE


@pytest.mark.parametrize("lanes", [1, 4])
def test_nothing_to_do_is_never_due(lanes: int) -> None:
    traffic = Traffic(lanes)
    traffic.add(*calls("ab"))
    for lane in traffic.depart():
        traffic.reply(lane, 0.1)
    traffic.batcher.expire(DEADLINE)
    assert traffic.batcher.alarm == float("inf")


def test_calls_that_are_due_one_after_another_fail_together() -> None:
    traffic = Traffic()
    others = [NotedCall("a", deadline=0.1 + i * EXPIRY_PAUSE / 10) for i in range(4)]
    traffic.add(*others)
    traffic.depart()
    waiting = [NotedCall("b", deadline=0.1 + i * EXPIRY_PAUSE / 10) for i in range(4)]
    traffic.add(*waiting)
    traffic.batcher.expire(0.1)
    assert [call.state == OVER for call in others + waiting] == [True, False, False, False] * 2
    assert traffic.batcher.alarm == 0.1 + EXPIRY_PAUSE
    traffic.batcher.expire(traffic.batcher.alarm)
    assert all(call.state == OVER for call in others + waiting)
