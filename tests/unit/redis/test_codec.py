"""Encoding of calls of the script and decoding of its replies, without a server."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import (
    CostTooHigh,
    Rule,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.keys import storage_keys
from headgate.quota import MAX_UNITS
from headgate.stores.port_parameters import ServerTime
from headgate.stores.redis.codec import (
    Operation,
    RedisPlan,
    ScriptCall,
    plans,
)
from headgate.stores.redis.operations import StateKeys
from headgate.stores.redis.slots import Tag, tagged_keys
from headgate.stores.request import Request
from headgate.testing import FakeClock

RULES = (fixed_window("5/minute"), sliding_window("6/minute"), token_bucket("1/day", burst=7))
ALICE = (b"key of alice",)


def plan_of(*rules: Rule, tier: str | None = None) -> RedisPlan:
    return plans(rules).for_request(Request("peek", "a", 0, tier))


# --- Requests --------------------------------------------------------------------------------------------------------


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


# --- Replies ---------------------------------------------------------------------------------------------------------


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


# --- Keys ------------------------------------------------------------------------------------------------------------


def keys_of(limiter: str, rules: tuple[Rule, ...], tag: Tag | None = None) -> StateKeys:
    return tagged_keys("space", limiter, rules, tag) if tag else storage_keys("space", limiter, rules)


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
