"""What each operation asks of a cluster, slot by slot, against a server that only exists here."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import (
    CostTooHigh,
    Limiter,
    MemoryStore,
    Rule,
    StoreError,
    StoreUnavailable,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.quota import MAX_UNITS
from headgate.stores.base import Answer
from headgate.stores.redis.codec import Keys, Operation, ScriptCall
from headgate.stores.redis.flows import Flow, Flows, slot_of
from headgate.stores.request import Request
from headgate.testing import FakeClock
from tests.unit.redis.script import FakeServer

T = TypeVar("T")

BUCKET = token_bucket("5/minute", scope="team", name="team")
RULES = (
    BUCKET,
    sliding_window("3/minute", scope="user", name="user"),
    sliding_log("7/minute", scope="place", name="place"),
    fixed_window("9/hour", scope="*", name="all"),
)
WHO = {"user": "alice", "team": "north", "place": "here"}
BUCKET_KEY = Keys("limiter", RULES, "space", "key").of(WHO)[0]


def run(flow: Flow[T], server: FakeServer) -> T:
    try:
        request = next(flow)
        while True:
            try:
                reply = server.call(request)
            except StoreError as error:
                request = flow.throw(error)
            else:
                request = flow.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def ask(
    these: Flows,
    operation: Literal["hit", "peek", "hold", "record"],
    key: Any,
    cost: int,
    server: FakeServer,
    now: int | None = None,
) -> Answer:
    return run(these.ask(Request(operation, key, cost, None, now)), server)


def flows(*rules: Rule, tag: Any = "key", clock: Any = None) -> Flows:
    return Flows("limiter", rules or RULES, "space", tag, clock)


def operations(server: FakeServer) -> list[tuple[Operation, int]]:
    """Return what the server was asked, and how many rules each request was about."""
    return [(Operation(request.body[0]), len(request.keys)) for request in server.requests]


def test_slots_differ_or_these_tests_test_nothing() -> None:
    server = FakeServer()
    ask(flows(), "hit", WHO, 1, server)
    assert len({slot_of(request) for request in server.requests}) == 4


@pytest.mark.parametrize(
    ("these", "key", "in_cluster"),
    [
        (flows(tag=None), WHO, False),
        (flows(tag="limiter"), WHO, True),
        (flows(sliding_window("3/minute"), token_bucket("5/hour")), "alice", True),
    ],
    ids=["no cluster", "a limiter in one slot", "a key in one slot"],
)
def test_one_slot_is_one_request(these: Flows, key: Any, in_cluster: bool) -> None:
    server = FakeServer(in_cluster=in_cluster)
    ask(these, "hit", key, 1, server)
    ask(these, "peek", key, 1, server)
    _, receipts = ask(these, "hold", key, 1, server)
    assert receipts is not None
    ask(these, "record", key, 1, server)
    run(these.refund(receipts, 1, None), server)
    run(these.reset(key), server)
    asked = [operation.name for operation, _ in operations(server)]
    assert asked == ["HIT", "PEEK", "HOLD", "RECORD", "REFUND", "RESET"]


def test_token_buckets_are_charged_last() -> None:
    server = FakeServer()
    decision, receipts = ask(flows(), "hit", WHO, 1, server)
    assert decision
    assert receipts is None
    assert operations(server) == [(Operation.HOLD, 1)] * 4
    assert server.requests[-1].keys == (BUCKET_KEY,)


def test_a_refusal_gives_everything_back() -> None:
    server = FakeServer()
    for _ in range(3):
        assert ask(flows(), "hit", WHO, 1, server)[0]
    before = dict(server.states)
    decision = ask(flows(), "hit", WHO, 1, server)[0]
    assert decision.denied_by == "user"
    assert server.states == before


def test_a_slot_that_fails_gives_back_what_others_have_charged() -> None:
    server = FakeServer()
    server.broken_slots = {slot_of(ScriptCall((BUCKET_KEY,), b""))}
    with pytest.raises(StoreUnavailable):
        ask(flows(), "hit", WHO, 1, server)
    assert server.states == {}


def test_what_cannot_be_given_back_stays_counted() -> None:
    class DyingServer(FakeServer):
        """Fails the bucket, and from then on whoever was charged first."""

        def call(self, request: ScriptCall) -> Any:
            if request.keys == (BUCKET_KEY,):
                self.broken_slots = {slot_of(request), slot_of(self.requests[0])}
            return super().call(request)

    server = DyingServer()
    with pytest.raises(StoreUnavailable, match=str(slot_of(ScriptCall((BUCKET_KEY,), b"")))):
        ask(flows(), "hit", WHO, 1, server)
    assert set(server.states) == set(server.requests[0].keys)


def test_recording_beyond_what_can_be_counted_is_refused() -> None:
    server = FakeServer()
    with pytest.raises(CostTooHigh, match="team"):
        ask(flows(), "record", WHO, MAX_UNITS, server)


def test_recording_nothing_asks_nothing() -> None:
    server = FakeServer()
    ask(flows(), "record", WHO, 0, server)
    assert server.requests == []


def test_a_clock_of_the_stores_decides_if_no_time_is_given() -> None:
    clock, server = FakeClock(), FakeServer(now=0)
    these = flows(sliding_log("1/minute"), clock=clock)
    assert ask(these, "hit", "alice", 1, server)[0]
    clock.advance(59.999999)
    assert not ask(these, "hit", "alice", 1, server)[0]
    assert ask(these, "hit", "alice", 1, server, clock.now_us() + 1)[0]


steps = st.lists(
    st.tuples(
        st.sampled_from(["hit", "hit", "check", "hold", "settle", "record", "reset"]),
        st.integers(0, 3),
        st.sampled_from(["alice", "bob"]),
        st.integers(0, 40_000_000),
    ),
    max_size=25,
)


@given(steps)
def test_alone_several_slots_answer_like_one_store(trace: list[tuple[str, int, str, int]]) -> None:
    """To the microsecond. A bucket that is refunded at once, with nothing in between, is as it was."""
    clock = FakeClock()
    server = FakeServer()
    memory = Limiter(*RULES, name="limiter", store=MemoryStore(clock=clock))
    these = flows(clock=clock)
    holds: list[Any] = []
    for operation, cost, user, pause in trace:
        clock.advance_us(pause)
        who = {**WHO, "user": user}
        if operation == "hit":
            assert ask(these, "hit", who, cost, server)[0] == memory.hit(who, cost)
        elif operation == "check":
            assert ask(these, "peek", who, cost, server)[0] == memory.check(who, cost)
        elif operation == "hold":
            decision, receipts = ask(these, "hold", who, cost, server)
            expected = memory.hold(who, cost)
            assert decision == expected.decision
            if receipts is not None:
                holds.append((receipts, expected, cost))
        elif operation == "settle" and holds:
            receipts, expected, held = holds.pop()
            expected.settle(min(cost, held))
            if cost < held:
                run(these.refund(receipts, held - cost, None), server)
        elif operation == "record":
            ask(these, "record", who, cost, server)
            memory.record(who, cost)
        elif operation == "reset":
            run(these.reset(who), server)
            memory.reset(who)
