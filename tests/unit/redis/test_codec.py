"""Encoding of calls of the script and decoding of its replies, without a server."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import (
    ConfigError,
    CostTooHigh,
    Quota,
    Rule,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.decision import Verdict
from headgate.keys import storage_keys
from headgate.quota import MAX_UNITS
from headgate.stores.port_parameters import ServerTime
from headgate.stores.redis.cluster_operations import Tag, tagged_keys
from headgate.stores.redis.codec import (
    ASKING,
    BY_SHA,
    BY_SOURCE,
    Operation,
    RedisPlan,
    ScriptCall,
    command,
    plans,
    reset,
    script_command,
)
from headgate.stores.redis.operations import StateKeys
from headgate.stores.redis.script import SHA, SOURCE
from headgate.stores.request import Request
from headgate.testing import FakeClock

RULES = (fixed_window("5/minute"), sliding_window("6/minute"), token_bucket("1/day", burst=7))
ALICE = (b"key of alice",)


def plan_of(*rules: Rule, tier: str | None = None) -> RedisPlan:
    return plans(rules).of(tier)


# --- Requests --------------------------------------------------------------------------------------------------------


def test_a_request_encodes_operation_time_cost_and_rules() -> None:
    keys = (b"a", b"b", b"c")
    request = plan_of(*RULES).decide(Operation.HOLD, keys, 3, 1_700_000_000_000_001)
    assert request.keys == keys
    operation, size, now, cost, birth = struct.unpack_from("<BHddd", request.body)
    assert (operation, size, now, cost) == (3, 3, 1_700_000_000_000_001, 3)
    assert 0 < birth <= MAX_UNITS
    shapes = [struct.unpack_from("<Bdddd", request.body, 27 + 33 * i) for i in range(3)]
    assert shapes == [
        (1, 5, 60_000_000, 0, 0),
        (2, 6, 1_000_000, 61_000_000, 0),
        (3, 7, 1, 86_400_000, 1_000),
    ]
    assert len(request.body) == 27 + 3 * 33


def test_without_a_time_the_server_clock_is_used() -> None:
    request = plan_of(RULES[0]).decide(Operation.HIT, ALICE, 1, None)
    assert struct.unpack_from("<BHddd", request.body)[2] < 0
    at_the_epoch = plan_of(RULES[0]).decide(Operation.HIT, ALICE, 1, 0)
    assert struct.unpack_from("<BHddd", at_the_epoch.body)[2] == 0


@given(st.integers(0, MAX_UNITS), st.integers(0, MAX_UNITS))
def test_numbers_are_encoded_exactly(cost: int, now: int) -> None:
    body = plan_of(RULES[0]).decide(Operation.RECORD, ALICE, cost, now).body
    _, _, sent_now, sent_cost, _ = struct.unpack_from("<BHddd", body)
    assert (int(sent_now), int(sent_cost)) == (now, cost)


def test_every_request_has_a_unique_birth() -> None:
    plan = plan_of(RULES[0])
    bodies = {plan.decide(Operation.HIT, ALICE, 1, 0).body for _ in range(100)}
    assert len(bodies) == 100


def test_tiers_have_their_own_shapes() -> None:
    by_tier = plans((sliding_window("6/minute", tiers={"pro": "60/minute"}),))

    def limit(tier: str | None, *quotas: Quota) -> float:
        plan = by_tier.of(tier, quotas or None)
        shape: tuple[float, ...] = struct.unpack_from(
            "<Bdddd", plan.decide(Operation.HIT, ALICE, 1, 0).body, 27
        )
        return shape[1]

    assert (limit(None), limit("pro"), limit("unheard of")) == (6, 60, 6)
    assert limit("pro", Quota(70, 60_000_000)) == 70


def test_invalid_costs_are_refused_before_sending() -> None:
    by_tier = plans((fixed_window("5/minute"), fixed_window("0/hour")))
    assert by_tier.for_request(Request("hit", "alice", 5)) is by_tier.own
    with pytest.raises(CostTooHigh):
        by_tier.for_request(Request("hit", "alice", 6))
    for cost in (-1, True, (1, -1)):
        with pytest.raises(ConfigError):
            by_tier.for_request(Request("hit", "alice", cost))


def own_of(body: bytes, place: int) -> tuple[float, ...]:
    cost, size = struct.unpack_from("<dB", body, place)
    return (cost, *struct.unpack_from(f"<{size}d", body, place + 9))


def test_costs_per_rule_and_replaced_receipts_follow_the_shapes() -> None:
    old = ((b"a", (11, 12, 13)), (b"b", ()), (b"c", tuple(range(31, 40))))
    body = plan_of(*RULES).decide(Operation.HOLD, (b"a", b"b", b"c"), (1, 0, 800), 5, old).body
    assert struct.unpack_from("<BHddd", body)[3] < 0
    places = 27 + 3 * 33, 27 + 3 * 33 + 9 + 24, 27 + 3 * 33 + 9 + 24 + 9
    assert [own_of(body, place) for place in places] == [(1, 11, 12, 13), (0,), (800, *range(31, 40))]
    assert len(body) == places[2] + 9 + 72


def test_equal_costs_are_encoded_as_one_number() -> None:
    body = plan_of(*RULES).decide(Operation.HIT, (b"a", b"b", b"c"), (4, 4, 4), 5).body
    assert (struct.unpack_from("<BHddd", body)[3], len(body)) == (4, 27 + 3 * 33)


DAY = 86_400_000_000


def windows(call: ScriptCall) -> tuple[float, ...]:
    shape: tuple[float, ...] = struct.unpack_from("<Bdddd", call.body, 27)
    return shape[2:]


@pytest.mark.parametrize(("hours", "first"), [(0, -1), (11.99, -1), (12, 0), (23.99, 0)])
def test_a_calendar_sends_the_current_window_and_its_nearest_neighbour(hours: float, first: int) -> None:
    today = 19_000 * DAY
    now = today + round(hours * 3_600_000_000)
    call = plan_of(calendar("5/day")).decide(Operation.HIT, ALICE, 1, now)
    assert windows(call) == tuple(today + DAY * (first + i) for i in range(3))
    assert call.body_at is None


def test_without_a_time_local_windows_are_used_until_the_server_corrects_them() -> None:
    clock = FakeClock(19_000.25 * DAY / 1_000_000)
    plan = plans((calendar("5/day"), concurrent(3, lease="60s")), ServerTime(clock)).own
    call = plan.decide(Operation.HOLD, (b"a", b"b"), (1, 0), None)
    assert windows(call) == (18_999 * DAY, 19_000 * DAY, 19_001 * DAY)
    assert call.after(ValueError("EDGESOME")) is None

    server_now = 20_000 * DAY + 13 * 3_600_000_000
    again = call.after(ValueError(f"EDGES {server_now}"))
    assert again is not None
    assert windows(again) == (20_000 * DAY, 20_001 * DAY, 20_002 * DAY)
    assert (again.keys, again.body[:27], again.body[60:]) == (call.keys, call.body[:27], call.body[60:])
    assert again.after(ValueError(f"EDGES {server_now}")) is None  # it is repeated once

    clock.advance_us(DAY)
    assert windows(plan.decide(Operation.HOLD, (b"a", b"b"), 1, None))[0] == 20_001 * DAY


def test_a_request_without_calendars_is_not_repeated_with_new_windows() -> None:
    call = plan_of(*RULES, concurrent(3, lease="60s")).decide(
        Operation.HIT, (b"a", b"b", b"c", b"d"), 1, None
    )
    assert call.after(ValueError("EDGES 1")) is None


def test_a_reset_contains_only_keys() -> None:
    request = reset((b"a", b"b", b"c"))
    assert struct.unpack("<BHddd", request.body)[:2] == (6, 3)


def test_a_refund_contains_the_receipts() -> None:
    receipts = ((b"a", (11, 12, 13)), (b"b", (21, 22, 23)), (b"c", (31, 32, 33, 34, 35, 36, 37, 38, 39)))
    request = plan_of(*RULES).refund(receipts, (2, 3, 4), None)
    assert request.keys == (b"a", b"b", b"c")
    places = 27 + 3 * 33, 27 + 3 * 33 + 33, 27 + 3 * 33 + 66
    own = [own_of(request.body, place) for place in places]
    assert own == [(2, 11, 12, 13), (3, 21, 22, 23), (4, *range(31, 40))]


def test_several_requests_are_sent_in_one_command() -> None:
    requests = [ScriptCall((b"a", b"b"), b"one"), ScriptCall((b"c",), b"\r\n")]
    assert script_command(BY_SHA, requests) == (
        b"*8\r\n$7\r\nEVALSHA\r\n$40\r\n" + SHA + b"\r\n$1\r\n3\r\n"
        b"$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n$3\r\none\r\n$2\r\n\r\n\r\n"
    )
    assert SOURCE in script_command(BY_SOURCE, requests)
    assert ASKING == command(b"ASKING") == b"*1\r\n$6\r\nASKING\r\n"


def packed(allowed: int, remaining: int, retry_after: int | None, reset_after: int | None, lag: int) -> bytes:
    """Return a verdict as the script replies it."""
    flags = allowed + 2 * (retry_after is not None) + 4 * (reset_after is not None)
    return struct.pack("<Bqqqq", flags, remaining, retry_after or 0, reset_after or 0, lag)


# --- Replies ---------------------------------------------------------------------------------------------------------


def test_one_rule_admits() -> None:
    decision = plan_of(fixed_window("5/minute")).answer(packed(1, 4, None, 60_000_000, 0))[0]
    assert decision.allowed
    assert (decision.limit, decision.remaining) == (5, 4)
    assert (decision.retry_after, decision.reset_after) == (None, 60.0)
    assert not decision.degraded


def test_one_rule_refuses() -> None:
    decision = plan_of(fixed_window("5/minute")).answer(packed(0, 0, 1, 2, 0))[0]
    assert not decision
    assert (decision.retry_after_us, decision.reset_after_us) == (1, 2)
    assert decision.denied_by == "per-minute"


def test_a_bucket_replies_in_ticks() -> None:
    plan = plan_of(token_bucket("1/day"))
    decision, _ = plan.answer(packed(0, 0, 86_400_000, 86_400_000, -999))
    assert decision.retry_after_us == 86_400_000_000 - 999
    assert decision.reset_after_us == 86_400_000_000 - 999


def test_times_beyond_the_exact_range_of_doubles_are_exact() -> None:
    plan = plan_of(token_bucket("1/day", burst=10_000_000))
    decision, _ = plan.answer(packed(0, 0, 2**53 - 1, 2**53 - 1, -1))
    assert decision.retry_after_us == (2**53 - 1) * 1000 - 1


def test_a_fresh_bucket_has_a_reset_time_of_0() -> None:
    assert plan_of(token_bucket("1/day")).answer(packed(1, 1, None, 0, -999))[0].reset_after_us == 0


def test_a_rule_that_admits_nothing_has_no_times() -> None:
    decision = plan_of(token_bucket("0/day")).answer(packed(0, 0, None, None, 0))[0]
    assert (decision.retry_after_us, decision.reset_after_us, decision.limit) == (None, None, 0)


def test_replies_of_several_rules_are_in_rule_order() -> None:
    reply = packed(1, 4, None, 10, 0) + packed(0, 0, 20, 30, 0) + packed(1, 7, None, 0, -5)
    plan = plan_of(*RULES)
    assert plan.verdicts(reply) == (
        Verdict(True, 5, 4, None, 10),
        Verdict(False, 6, 0, 20, 30),
        Verdict(True, 7, 7, None, 0),
    )
    decision, _ = plan.answer(reply)
    assert decision.denied_by == "per-minute"
    assert decision.verdicts == plan.verdicts(reply)


def test_a_hold_that_charges_nothing_has_no_receipts() -> None:
    assert plan_of(RULES[0]).receipts(ALICE, packed(0, 0, 1, 2, 0), 3) is None


def test_receipts_of_a_hold_match_those_of_the_pure_functions() -> None:
    reply = packed(1, 2, None, 10, 0) * 3 + struct.pack("<9q", 11, 12, 21, 22, 31, 32, 33, 34, 35)
    receipts = plan_of(*RULES).receipts((b"a", b"b", b"c"), reply, 3)
    assert receipts == (
        (b"a", (11, 12, 3)),
        (b"b", (21, 22, 3)),
        (b"c", (31, 32, 33, 34, 35, 1, 86_400_000, 7, 3)),
    )


def test_a_rule_that_was_not_charged_has_an_empty_receipt() -> None:
    reply = packed(1, 2, None, 10, 0) * 3 + struct.pack("<7q", 21, 22, 31, 32, 33, 34, 35)
    receipts = plan_of(*RULES).receipts((b"a", b"b", b"c"), reply, (0, 2, 3))
    assert receipts == (
        (b"a", ()),
        (b"b", (21, 22, 2)),
        (b"c", (31, 32, 33, 34, 35, 1, 86_400_000, 7, 3)),
    )


def test_a_failed_record_reports_the_capacity_in_units() -> None:
    plan = plan_of(*RULES)
    plan.recorded(5, 0)
    with pytest.raises(CostTooHigh) as window:
        plan.recorded(5, [2, MAX_UNITS - 3])
    assert (window.value.cost, window.value.capacity, window.value.rule) == (5, 3, "per-minute")
    with pytest.raises(CostTooHigh) as bucket:
        plan.recorded(5, [3, MAX_UNITS - 2 * 86_400_000 - 1])
    assert bucket.value.capacity == 2
    with pytest.raises(CostTooHigh) as beyond:
        plan.recorded((0, 0, 7), [3, MAX_UNITS + 1])
    assert (beyond.value.cost, beyond.value.capacity) == (7, 0)


def test_parts_of_a_plan_keep_the_names_and_the_order() -> None:
    part = plan_of(*RULES).part([2, 0])
    assert part.names == ("per-day", "per-minute")
    assert part.verdicts(packed(1, 7, None, 1, -1) + packed(1, 5, None, 1, 0))[0][-1] == 999


# --- Keys ------------------------------------------------------------------------------------------------------------


def keys_of(limiter: str, rules: tuple[Rule, ...], tag: Tag | None = None) -> StateKeys:
    return tagged_keys("space", limiter, rules, tag) if tag else storage_keys("space", limiter, rules)


def test_each_rule_has_a_separate_key() -> None:
    keys = keys_of("limiter", RULES)("alice")
    assert len(set(keys)) == 3
    assert all(key.startswith(b"5:space7:limiter") and key.endswith(b"talice") for key in keys)
    assert keys_of("limiter", RULES[:1])("alice") == keys[:1]


def test_invalid_keys_are_refused() -> None:
    for keys in (keys_of("limiter", RULES), keys_of("limiter", RULES[:1])):
        with pytest.raises(ConfigError):
            keys(None)


@given(st.text(), st.text(), st.text(), st.text())
def test_storage_keys_are_unique(one: str, other: str, limiter: str, another: str) -> None:
    rules = (sliding_log("5/minute"),)
    tags: tuple[Tag | None, ...] = (None, "key", "limiter")
    for tag in tags:
        first, second = keys_of(limiter, rules, tag)(one), keys_of(another, rules, tag)(other)
        assert (first == second) is ((one, limiter) == (other, another))


def test_text_and_bytes_are_different_keys_in_a_cluster_too() -> None:
    keys = keys_of("limiter", RULES, "key")
    assert not set(keys("alice")) & set(keys(b"alice"))


def tag_of(key: bytes) -> bytes:
    assert key.startswith(b"{")
    return key[: key.index(b"}") + 1]


def test_tags_decide_which_states_share_a_slot() -> None:
    by_key, by_limiter = keys_of("limiter", RULES, "key"), keys_of("limiter", RULES, "limiter")
    assert len({tag_of(key) for key in by_key("{alice}")}) == 1
    assert {tag_of(key) for key in by_key("alice")} != {tag_of(key) for key in by_key("bob")}
    assert {tag_of(key) for key in by_limiter("alice")} == {tag_of(key) for key in by_limiter("bob")}
    another = keys_of("another", RULES, "limiter")
    assert {tag_of(key) for key in by_limiter("alice")} != {tag_of(key) for key in another("alice")}
