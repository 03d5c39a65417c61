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
