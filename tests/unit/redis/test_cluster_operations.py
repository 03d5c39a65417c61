"""Operations in a cluster, slot by slot, against a fake server."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import pytest

from headgate import (
    CostTooHigh,
    Rule,
    StoreError,
    StoreUnavailable,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.costs import Costs
from headgate.quota import MAX_UNITS
from headgate.stores.base import Answer, Receipts
from headgate.stores.redis.cluster_operations import ClusterOperations, Steps, slot_of, tagged_keys
from headgate.stores.redis.codec import Operation, Reply, ScriptCall
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.request import Request
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
BUCKET_KEY = tagged_keys("space", "limiter", RULES, "key")(WHO)[0]


def send(call: ScriptCall) -> Steps[Reply]:
    return (yield call)


def run(encoded: EncodedRequest[T], server: FakeServer) -> T:
    steps = encoded[0]
    try:
        request = next(steps)
        while True:
            try:
                reply = server.call(request)
            except StoreError as error:
                request = steps.throw(error)
            else:
                request = steps.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def decide(
    these: ClusterOperations,
    operation: Literal["hit", "peek", "hold", "record", "renew"],
    key: Any,
    cost: Costs,
    server: FakeServer,
    now: int | None = None,
    replaces: Receipts | None = None,
) -> Answer:
    return run(these.decide(Request(operation, key, cost, None, now, None, replaces)), server)


def cluster(*rules: Rule, tag: Any = "key", clock: Any = None) -> ClusterOperations:
    return ClusterOperations("limiter", rules or RULES, "space", tag, clock, send)


def operations(server: FakeServer) -> list[tuple[Operation, int]]:
    """Return the operation and the number of rules of each request."""
    return [(Operation(request.body[0]), len(request.keys)) for request in server.requests]


@pytest.mark.parametrize(
    ("these", "key"),
    [
        (cluster(tag="limiter"), WHO),
        (cluster(sliding_window("3/minute"), token_bucket("5/hour")), "alice"),
    ],
    ids=["a limiter in one slot", "a key in one slot"],
)
def test_one_slot_is_one_request(these: ClusterOperations, key: Any) -> None:
    server = FakeServer()
    decide(these, "hit", key, 1, server)
    decide(these, "peek", key, 1, server)
    _, receipts = decide(these, "hold", key, 1, server)
    assert receipts is not None
    decide(these, "record", key, 1, server)
    run(these.refund(receipts, 1, None), server)
    run(these.reset(key), server)
    asked = [operation.name for operation, _ in operations(server)]
    assert asked == ["HIT", "PEEK", "HOLD", "RECORD", "REFUND", "RESET"]


def test_token_buckets_are_charged_last() -> None:
    server = FakeServer()
    decision, receipts = decide(cluster(), "hit", WHO, 1, server)
    assert decision
    assert receipts is None
    assert operations(server) == [(Operation.HOLD, 1)] * 4
    assert server.requests[-1].keys == (BUCKET_KEY,)


def test_charges_that_cannot_be_returned_stay_counted() -> None:
    class DyingServer(FakeServer):
        """Fails for the bucket, and then also for the slot that was charged first."""

        def call(self, request: ScriptCall) -> Any:
            if request.keys == (BUCKET_KEY,):
                self.broken_slots = {slot_of(request), slot_of(self.requests[0])}
            return super().call(request)

    server = DyingServer()
    with pytest.raises(StoreUnavailable, match=str(slot_of(ScriptCall((BUCKET_KEY,), b"")))):
        decide(cluster(), "hit", WHO, 1, server)
    assert set(server.states) == set(server.requests[0].keys)


def test_recording_more_than_the_maximum_count_is_refused() -> None:
    server = FakeServer()
    with pytest.raises(CostTooHigh, match="team"):
        decide(cluster(), "record", WHO, MAX_UNITS, server)


# --- Units, places and moves -----------------------------------------------------------------------------------------

MEMBER = {"user": "alice", "team": "north"}
PLACES = (
    concurrent(2, lease="60s", scope="user", name="places"),
    token_bucket("100/minute", scope="team", unit="tokens", name="tokens"),
    calendar("50/day", scope="*", name="day"),
)


def left(these: ClusterOperations, key: Any, server: FakeServer) -> list[int]:
    return [result.remaining for result in decide(these, "peek", key, 0, server)[0].results]


def test_costs_per_rule_are_charged_by_slot_and_returned_on_refusal() -> None:
    server, these = FakeServer(), cluster(*PLACES)
    _, receipts = decide(these, "hold", MEMBER, (1, 80, 3), server)
    assert left(these, MEMBER, server) == [1, 20, 47]
    before = dict(server.states)
    decision, nothing = decide(these, "hold", MEMBER, (1, 30, 3), server)
    assert (decision.denied_by, nothing, server.states) == ("tokens", None, before)
    assert receipts is not None
    run(these.refund(receipts, (1, 50, 0), None), server)
    assert left(these, MEMBER, server) == [2, 70, 47]


def test_rules_with_cost_0_are_not_charged_in_their_slots() -> None:
    server, these = FakeServer(), cluster(*PLACES)
    decision, receipts = decide(these, "hold", MEMBER, (0, 7, 0), server)
    assert decision.allowed
    assert receipts is not None
    assert [bool(receipt) for _, receipt in receipts] == [False, True, False]
    assert len(server.states) == 1
    decide(these, "record", MEMBER, (0, 0, 4), server)
    assert left(these, MEMBER, server) == [2, 93, 46]
    server.requests.clear()
    run(these.refund(receipts, 7, None), server)
    assert operations(server) == [(Operation.REFUND, 1)]
    assert left(these, MEMBER, server) == [2, 100, 46]


def test_places_in_a_separate_slot_can_be_renewed() -> None:
    server, these = FakeServer(), cluster(*PLACES)
    _, receipts = decide(these, "hold", MEMBER, 1, server)
    assert receipts is not None
    server.now += 59_999_999
    old = (receipts[0], *((key, ()) for key, _ in receipts[1:]))
    decision, new = decide(these, "renew", MEMBER, (1, 0, 0), server, replaces=old)
    assert (decision.allowed, new) == (True, None)
    server.now += 59_999_999
    assert left(these, MEMBER, server)[0] == 1
    run(these.refund(old, (1, 0, 0), None), server)
    assert left(these, MEMBER, server)[0] == 2


def test_a_hold_in_one_slot_is_moved_atomically() -> None:
    server, these = FakeServer(), cluster(*PLACES, tag="limiter")
    _, receipts = decide(these, "hold", MEMBER, 1, server)
    server.requests.clear()
    decision, _ = decide(these, "hold", MEMBER, (0, 5, 1), server, replaces=receipts)
    assert decision.allowed
    assert operations(server) == [(Operation.HOLD, 3)]
    assert left(these, MEMBER, server) == [2, 95, 49]
