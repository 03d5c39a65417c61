"""Tests of batching: which calls are sent together, and how they end. Times are passed in, without a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from headgate.errors import StoreError, StoreOverloaded, StoreTimeout, StoreUnavailable
from headgate.stores.remote.batching import (
    EXPIRY_PAUSE,
    GRACE,
    LATE,
    MOST_PER_BATCH,
    OVER,
    Batcher,
    RemoteCall,
)
from headgate.stores.remote.peer import Conversation
from tests.unit.remote.scripted import ScriptedPeer

DEADLINE = 1.0


class RecordedCall(RemoteCall):
    """A call that keeps its reply or error."""

    __slots__ = ("error", "reply")

    def __init__(
        self,
        request: str,
        now: float = 0.0,
        deadline: float = DEADLINE,
        must_send: bool = False,
        abandoned: Any = None,
    ) -> None:
        super().__init__(request, now, now + deadline, must_send, abandoned)
        self.reply: Any = None
        self.error: BaseException | None = None

    def deliver(self, reply: Any, error: BaseException | None) -> bool:
        self.state = OVER
        if not self.has_given_up:
            self.reply, self.error = reply, error
        return not self.has_given_up


class Traffic:
    """A batcher and its connection, driven by hand."""

    def __init__(self, *, follows: bool = False) -> None:
        self.peer = ScriptedPeer(follows=follows)
        self.batcher = Batcher(self.peer, DEADLINE, follows=follows)

    def add(self, *calls: RecordedCall) -> None:
        for call in calls:
            self.batcher.add(call)

    def send(self, now: float = 0.0) -> list[list[str]]:
        """Send all batches that may be sent, and return the requests of each batch."""
        sent = []
        while (message := self.batcher.next_message(now)) is not None:
            sent.append(message)
        return sent

    def reply(self, now: float = 0.0) -> None:
        """Answer the first batch: each call with its request."""
        requests = [call.request for call in self.batcher.batches[0].calls]
        assert self.batcher.receive(requests, now) is None


def calls(names: str, now: float = 0.0, **rest: Any) -> list[RecordedCall]:
    return [RecordedCall(name, now, **rest) for name in names]


def in_two_steps(converse: Callable[..., Conversation]) -> Callable[..., Conversation]:
    """Return a conversation with another message and reply before the usual ones."""

    def conversation(calls: Any) -> Conversation:
        assert (yield "first") == "first"
        return (yield from converse(calls))

    return conversation


def ignore_reply(calls: Any) -> Conversation:
    yield [call.request for call in calls]
    return ()


def numbered(count: int, now: float = 0.0) -> list[RecordedCall]:
    return [RecordedCall(f"{number}", now) for number in range(count)]


# --- Batches ---------------------------------------------------------------------------------------------------------


def test_calls_during_a_round_trip_are_sent_together_in_order() -> None:
    traffic = Traffic()
    traffic.add(*calls("a"))
    traffic.send()
    traffic.add(*calls("bcd"))
    assert traffic.send() == []
    traffic.reply()
    assert traffic.send() == [["b", "c", "d"]]


def test_a_batch_is_capped_by_number_and_size() -> None:
    traffic = Traffic()
    traffic.add(*numbered(MOST_PER_BATCH + 1))
    assert [len(batch) for batch in traffic.send()] == [MOST_PER_BATCH]
    traffic.reply()
    assert [len(batch) for batch in traffic.send()] == [1]
    traffic.reply()
    traffic.peer.most_bytes = 3
    traffic.add(*(RecordedCall(name) for name in ("aa", "b", "c", "dddd")))
    sent = []
    while traffic.batcher.waiting:
        sent += traffic.send()
        traffic.reply()
    assert sent == [["aa", "b"], ["c"], ["dddd"]]


@pytest.mark.parametrize("follows", [False, True])
def test_a_second_full_batch_is_pipelined(follows: bool) -> None:
    traffic = Traffic(follows=follows)
    traffic.add(*calls("a"))
    traffic.send()
    traffic.add(*numbered(MOST_PER_BATCH - 1))
    assert traffic.send() == []
    traffic.add(RecordedCall("last"))
    assert [len(batch) for batch in traffic.send()] == ([MOST_PER_BATCH] if follows else [])
    traffic.add(*numbered(MOST_PER_BATCH))
    assert traffic.send() == []  # there is no third
    traffic.reply()
    assert [len(batch) for batch in traffic.send()] == [MOST_PER_BATCH]


def test_a_batch_with_two_messages_is_answered_after_the_next_batch() -> None:
    traffic = Traffic(follows=True)
    traffic.peer.converse = in_two_steps(traffic.peer.converse)
    [a] = calls("a")
    traffic.add(a)
    assert traffic.send() == ["first"]
    traffic.add(*numbered(MOST_PER_BATCH))
    assert traffic.send() == ["first"]
    assert traffic.batcher.receive("first", 0.0) == ["a"]
    assert [len(batch.calls) for batch in traffic.batcher.batches] == [MOST_PER_BATCH, 1]


def test_calls_not_executed_by_the_server_are_resent_one_by_one() -> None:
    traffic = Traffic()
    a, b, c = calls("abc")
    traffic.add(a, b, c)
    traffic.send()
    traffic.add(*calls("d"))
    a.answer("a")
    traffic.batcher.receive("too large", 0.0)
    sent = []
    while traffic.batcher.waiting:
        sent += traffic.send()
        traffic.reply()
    assert sent == [["b"], ["c"], ["d"]]
    assert [call.reply for call in (a, b, c)] == ["a", "b", "c"]


def test_a_call_without_a_reply_fails() -> None:
    traffic = Traffic()
    traffic.peer.converse = ignore_reply
    [a] = calls("a")
    traffic.add(a)
    traffic.batcher.next_message(0.0)
    traffic.batcher.receive("nothing", 0.0)
    assert isinstance(a.error, StoreUnavailable)


# --- Abandoned calls -------------------------------------------------------------------------------------------------


def test_only_abandoned_calls_leave_the_connection_idle() -> None:
    traffic = Traffic()
    [hit] = calls("a")
    hit.has_given_up = True
    traffic.add(hit)
    assert traffic.send() == []
    assert not traffic.batcher.is_busy


@pytest.mark.parametrize("reason", ["gone", "expired"])
def test_a_reply_without_a_caller_is_passed_to_abandoned(reason: str) -> None:
    traffic, released = Traffic(), []
    hold = RecordedCall("hold", abandoned=released.append)
    traffic.add(hold)
    traffic.send()
    if reason == "gone":
        hold.has_given_up = True
    else:
        traffic.batcher.expire(DEADLINE)
        assert isinstance(hold.error, StoreTimeout)
    traffic.reply()
    assert released == ["hold"]
    assert hold.reply is None


# --- Deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("heard", [False, True])
def test_an_expired_call_is_a_timeout_if_nothing_was_received(is_sent: bool, heard: bool) -> None:
    traffic = Traffic(follows=True)
    traffic.peer.converse = in_two_steps(traffic.peer.converse)
    traffic.add(*calls("a", now=1.0, deadline=10))
    traffic.send(1.0)
    expired = [RecordedCall(f"{number}", 2.0) for number in range(MOST_PER_BATCH if is_sent else 1)]
    traffic.add(*expired)
    assert bool(traffic.send(2.0)) is is_sent
    if heard:
        traffic.batcher.receive("first", 2.5)
    traffic.batcher.expire(3.0)
    assert {type(call.error) for call in expired} == {StoreOverloaded if heard else StoreTimeout}


def test_a_silent_connection_is_closed_after_the_store_deadline() -> None:
    traffic = Traffic()
    traffic.add(RecordedCall("a", deadline=0.1))
    traffic.send()
    assert not traffic.batcher.expire(0.1)  # a tight deadline of one call does not cost the connection
    assert not traffic.batcher.expire(0.99)
    assert traffic.batcher.expire(DEADLINE)


def test_a_call_with_a_longer_deadline_keeps_the_connection_open() -> None:
    traffic = Traffic()
    traffic.add(RecordedCall("a", deadline=3 * DEADLINE))
    traffic.send()
    assert not traffic.batcher.expire(2 * DEADLINE)
    assert traffic.batcher.expire(3 * DEADLINE)


def test_silence_is_measured_from_the_last_reply() -> None:
    traffic = Traffic()
    traffic.peer.converse = in_two_steps(traffic.peer.converse)
    traffic.add(RecordedCall("a", deadline=0.1))
    traffic.send()
    traffic.batcher.receive("first", 0.9)  # the batch then sends its second message
    assert not traffic.batcher.expire(DEADLINE)
    assert traffic.batcher.expire(0.9 + DEADLINE)


def test_a_deadline_noticed_late_has_one_grace_period() -> None:
    traffic = Traffic()
    [a] = calls("a")
    traffic.add(a)
    traffic.send()
    late = DEADLINE + GRACE + 2
    assert not traffic.batcher.expire(late)
    assert a.error is None
    assert traffic.batcher.alarm == late + GRACE
    assert traffic.batcher.expire(late + 3 * GRACE)
    assert isinstance(a.error, StoreTimeout)


def test_a_deadline_noticed_slightly_late_has_a_short_grace_period() -> None:
    traffic = Traffic()
    [a] = calls("a")
    traffic.add(a)
    traffic.send()
    assert not traffic.batcher.expire(DEADLINE + 2 * LATE)
    assert a.error is None
    assert traffic.batcher.alarm == pytest.approx(DEADLINE + 4 * LATE)
    assert traffic.batcher.expire(DEADLINE + 4 * LATE)
    assert isinstance(a.error, StoreTimeout)


def test_a_timer_of_earlier_calls_gives_later_calls_no_grace_period() -> None:
    traffic = Traffic()
    traffic.add(*calls("a"))
    traffic.send()
    traffic.reply()
    later = RecordedCall("b", now=100.0)
    traffic.add(later)
    assert traffic.batcher.alarm == later.due
    traffic.send(100.0)
    traffic.batcher.expire(later.due)
    assert isinstance(later.error, StoreTimeout)


def test_calls_that_expire_shortly_after_each_other_fail_together() -> None:
    traffic = Traffic()
    waiting = [RecordedCall("x", deadline=0.1 + number * EXPIRY_PAUSE / 10) for number in range(10)]
    traffic.add(*waiting)
    traffic.batcher.expire(0.1)
    assert traffic.batcher.alarm == 0.1 + EXPIRY_PAUSE
    traffic.batcher.expire(traffic.batcher.alarm)
    assert all(call.error for call in waiting)


def test_without_calls_no_timer_is_set() -> None:
    traffic = Traffic()
    traffic.add(*calls("a"))
    traffic.send()
    traffic.reply()
    traffic.batcher.expire(DEADLINE)
    assert traffic.batcher.alarm == float("inf")


# --- Connections -----------------------------------------------------------------------------------------------------


def test_connecting_may_last_until_the_latest_deadline() -> None:
    traffic = Traffic()
    traffic.add(RecordedCall("tight", deadline=0.1), RecordedCall("patient", deadline=3.0))
    assert traffic.batcher.time_to_connect(0.0) == 3.0
    assert not traffic.batcher.expire(0.1)
    assert traffic.batcher.expire(3.0)


def test_connecting_may_last_until_the_store_deadline() -> None:
    traffic = Traffic()
    traffic.add(RecordedCall("tight", deadline=0.1))
    assert traffic.batcher.time_to_connect(0.0) == DEADLINE


def test_all_waiting_calls_fail_if_connecting_fails() -> None:
    traffic = Traffic()
    waiting = calls("ab")
    traffic.add(*waiting)
    traffic.batcher.time_to_connect(0.0)
    traffic.batcher.cannot_connect(OSError("refused"))
    assert [str(call.error) for call in waiting] == ["OSError: refused"] * 2
    assert waiting[0].error is not waiting[1].error


def test_an_interrupted_failure_loses_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may raise in a thread that tells the others that connecting failed."""
    traffic, [call] = Traffic(), calls("a")
    traffic.add(call)
    monkeypatch.setattr(RecordedCall, "deliver", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        traffic.batcher.cannot_connect(OSError("refused"))
    assert list(traffic.batcher.waiting) == [call]


def test_a_lost_connection_fails_sent_calls() -> None:
    traffic = Traffic(follows=True)
    sent, waiting = [*calls("a"), *numbered(MOST_PER_BATCH)], RecordedCall("waiting")
    for call in sent:
        traffic.add(call)
        traffic.send()
    traffic.add(waiting)
    traffic.batcher.lose(ConnectionResetError("gone"))
    assert {str(call.error) for call in sent} == {"ConnectionResetError: gone"}
    assert traffic.send() == [["waiting"]]


def test_a_connection_closed_by_this_process_is_not_a_server_failure() -> None:
    traffic = Traffic()
    [a] = calls("a")
    traffic.add(a)
    traffic.send()
    traffic.batcher.lose(InterruptedError("a signal handler raised"))
    assert type(a.error) is StoreError


def test_a_repeatable_call_is_repeated_once() -> None:
    traffic = Traffic()
    repeated = RecordedCall("repeat")
    traffic.add(repeated)
    traffic.send()
    traffic.batcher.lose(ConnectionResetError("gone"))
    assert traffic.send() == [["repeat"]]
    traffic.batcher.lose(ConnectionResetError("gone again"))
    assert str(repeated.error) == "ConnectionResetError: gone again"
