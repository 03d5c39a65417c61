"""Encoding of requests and decoding of replies, without a database."""

from __future__ import annotations

import struct

import pytest

from headgate import (
    ConfigError,
    CostTooHigh,
    Quota,
    StoreConflict,
    calendar,
    concurrent,
    fixed_window,
    sliding_window,
    token_bucket,
)
from headgate.stores.postgres.codec import HIT, MOVE, PEEK, StateCall, many, numbers, one, outcomes
from headgate.stores.postgres.operations import PostgresOperations
from headgate.stores.request import Request
from headgate.testing import FakeClock

WINDOW = sliding_window("10/hour")
BUCKET = token_bucket("60/minute", burst=5)


def bigints(value: bytes | None) -> list[int]:
    """Return the numbers of a binary array."""
    assert value is not None
    dimensions, nulls, kind, count, first = struct.unpack(">iiiii", value[:20])
    assert (dimensions, nulls, kind, first) == (1, 0, 20, 1)
    entries = struct.unpack(">" + "iq" * count, value[20:])
    assert set(entries[::2]) <= {8}
    return list(entries[1::2])


def byteas(value: bytes | None) -> list[bytes]:
    assert value is not None
    dimensions, nulls, kind, count, first = struct.unpack(">iiiii", value[:20])
    assert (dimensions, nulls, kind, first) == (1, 0, 17, 1)
    rest, found = value[20:], []
    for _ in range(count):
        (length,) = struct.unpack(">i", rest[:4])
        found.append(rest[4 : 4 + length])
        rest = rest[4 + length :]
    assert rest == b""
    return found


def encoded(value: list[int]) -> bytes:
    entries = [entry for number in value for entry in (8, number)]
    return struct.pack(">iiiii" + "iq" * len(value), 1, 0, 20, len(value), 1, *entries)


def test_a_request_for_one_key_has_plain_arguments() -> None:
    request = PostgresOperations("login", (WINDOW,), "app").decide(Request("hit", "ada", 3, None, 17))[0]
    key, *rest = one(request, b"f")
    assert key == b"3:app5:login" + b"%d:" % len(WINDOW.identity) + WINDOW.identity.encode() + b"tada"
    assert rest == [
        *(b"1", b"2", b"10", b"60000000", b"3660000000", b"0"),
        *(b"17", b"3", b"%d" % request.birth, b"f"),
    ]


def test_several_requests_list_each_key_once_with_written_keys_first() -> None:
    operations = PostgresOperations("x", (WINDOW, BUCKET), "app")
    look = operations.decide(Request("peek", "ada"))[0]
    other = operations.decide(Request("peek", "bob"))[0]
    hit = operations.decide(Request("hit", "ada", 2, None, 5))[0]
    keys, locks, program, durable = many([look, other, hit], b"t")
    assert hit.keys[0] > hit.keys[1]
    assert byteas(keys) == [*sorted(hit.keys), *other.keys]
    assert (locks, durable) == (b"2", b"t")
    window, bucket = [2, 10, 60_000_000, 3_660_000_000, 0], [3, 5, 1, 1_000_000, 1]
    assert bigints(program) == [
        *(0, -1, look.birth, 2, 2, *window, 1, 1, *bucket, 1),
        *(0, -1, other.birth, 2, 3, *window, 1, 4, *bucket, 1),
        *(1, 5, hit.birth, 2, 2, *window, 2, 1, *bucket, 2),
    ]


def test_a_refund_contains_the_receipt_and_a_reset_only_keys() -> None:
    operations = PostgresOperations("x", (WINDOW, BUCKET), "app")
    refund = operations.refund(((b"k1", (7, 8, 2)), (b"k2", (1, 2, 3, 4, 5, 6, 7, 9, 2))), 1, 50)[0]
    assert refund is not None
    _, locks, program, _ = many([refund], b"f")
    assert locks == b"2"
    assert bigints(program) == [
        *(3, 50, 0, 2),
        *(1, 2, 10, 60_000_000, 3_660_000_000, 0, 1, 7, 8, 0, 0, 0, 0, 0, 0, 2),
        *(2, 3, 5, 1, 1_000_000, 1, 1, 1, 2, 3, 4, 5, 6, 7, 9, 2),
    ]
    _, locks, program, _ = many([operations.reset("ada")[0]], b"f")
    assert (locks, bigints(program)) == (b"2", [4, -1, 0, 2, 2, 1])


def test_uncharged_rules_are_not_refunded() -> None:
    operations = PostgresOperations("x", (WINDOW, BUCKET), "app")
    receipts = ((b"k1", ()), (b"k2", (1, 2, 3, 4, 5, 6, 7, 9, 2)))
    refund = operations.refund(receipts, (3, 1), 50)[0]
    assert refund is not None
    keys, _, program, _ = many([refund], b"f")
    assert byteas(keys) == [b"k2"]
    assert bigints(program) == [3, 50, 0, 1, 1, 3, 5, 1, 1_000_000, 1, 1, 1, 2, 3, 4, 5, 6, 7, 9, 2]
    assert operations.refund(receipts, (3, 0), 50)[0] is None
    assert operations.refund(receipts, 0, 50)[0] is None


def test_each_rule_has_its_cost() -> None:
    operations = PostgresOperations("x", (WINDOW, BUCKET), "app")
    hold = operations.decide(Request("hold", "ada", (0, 4), None, 5))[0]
    assert bigints(many([hold], b"f")[2]) == [
        *(1, 5, hold.birth, 2),
        *(2, 2, 10, 60_000_000, 3_660_000_000, 0, 0),
        *(1, 3, 5, 1, 1_000_000, 1, 4),
    ]
    reply = (-1, 9, 33, 33, 0, 0, 0, 0, 0, -1, 5, 0, 88, 1, 2, 3, 4, 3)
    decision = hold.plan.decision(hold, reply)
    assert [verdict.remaining for verdict in decision.verdicts] == [9, 1]
    assert hold.plan.receipts(hold, reply) == (
        (hold.keys[0], ()),
        (hold.keys[1], (1, 2, 3, 4, 3, 1, 1_000_000, 5, 4)),
    )
    assert operations.decide(Request("hit", "ada", (0, 0)))[0].operation == PEEK


def test_a_replacing_hold_contains_the_old_receipts() -> None:
    operations = PostgresOperations("x", (WINDOW, BUCKET, fixed_window("9/day")), "app")
    receipts = ((b"", (7, 8, 2)), (b"", (1, 2, 3, 4, 5, 1, 1_000_000, 5, 2)), (b"", ()))
    move = operations.decide(Request("hold", "ada", (1, 1, 0), None, 5, None, receipts))[0]
    *_, window, bucket, fixed = (bigints(array(part)) for part in move.receipts)
    assert window == [7, 8, 0, 0, 0, 0, 0, 0, 2]
    assert bucket == [1, 2, 3, 4, 5, 1, 1_000_000, 5, 2]
    assert fixed == [-1, 0, 0, 0, 0, 0, 0, 0, 0]  # no state has this receipt
    other = (receipts[0], (b"", (1, 2, 3, 4, 5, 1, 1_000_000, 6, 2)), receipts[2])
    move = operations.decide(Request("hold", "ada", (0, 0, 0), None, 5, None, other))[0]
    assert bigints(array(move.receipts[1])) == fixed  # a different shape is not moved
    assert (move.operation, move.is_single) == (MOVE, False)


def array(numbers: bytes) -> bytes:
    return struct.pack(">iiiii", 1, 0, 20, len(numbers) // 12, 1) + numbers


def test_quotas_of_the_call_are_sent() -> None:
    operations = PostgresOperations("x", (sliding_window("10/hour", tiers={"pro": "20/hour"}), BUCKET), "app")
    call = operations.decide(Request("hit", "a", (15, 1), "pro", 5, (None, Quota(30, 60_000_000, 7))))[0]
    assert [bigints(array(shape)) for shape in call.shapes.packed] == [
        [2, 20, 60_000_000, 3_660_000_000, 0],
        [3, 7, 1, 2_000_000, 1],
    ]
    with pytest.raises(CostTooHigh):
        operations.decide(Request("hit", "a", (1, 8), "pro", 5, (None, Quota(30, 60_000_000, 7))))


def test_places_are_sent_with_their_lease() -> None:
    operations = PostgresOperations("x", (concurrent(3, lease="60s"),), "app")
    hold = operations.decide(Request("hold", "a", 2, None, 5))[0]
    assert hold.shapes.arguments == [b"4", b"3", b"60000000", b"0", b"0"]
    reply = (-1, 3, 0, 60_000_000, 7, hold.birth, 0, 0, 0)
    assert hold.plan.receipts(hold, reply) == ((hold.keys[0], (7, hold.birth, 2)),)
    with pytest.raises(ConfigError, match="hold"):
        operations.decide(Request("hit", "a"))


DAY = 24 * 3600 * 1_000_000


def test_a_calendar_sends_the_windows_around_now() -> None:
    operations = PostgresOperations("x", (calendar("9/day"),), "app")

    def edges(now: int) -> list[int]:
        arguments = operations.decide(Request("hit", "a", 1, None, now))[0].shapes.arguments
        assert arguments[:2] == [b"5", b"9"]
        return [int(edge) // DAY for edge in arguments[2:]]

    assert edges(5 * DAY) == edges(5 * DAY + DAY // 2 - 1) == [4, 5, 6]
    assert edges(5 * DAY + DAY // 2) == edges(6 * DAY - 1) == [5, 6, 7]
    assert edges(6 * DAY) == [5, 6, 7]


def test_a_calendar_request_is_repeated_with_windows_around_the_server_time() -> None:
    operations = PostgresOperations("x", (WINDOW, calendar("9/day")), "app")
    call = operations.decide(Request("hit", "a"))[0]
    assert call.repeated((-1, 10, 0, 99, 1, 7, 0, 0, 0, -1, 9, 0, 99, 1, 7, 0, 0, 0)) is None
    again = call.repeated((-1, 10, 0, 99, 1, 7, 0, 0, 0, -5, 8 * DAY, 0, 0, 0, 0, 0, 0, 0))
    assert again is not None
    assert all(
        getattr(again, part) == getattr(call, part)
        for part in ("keys", "operation", "at", "costs", "birth", "receipts", "plan")
    )
    assert bigints(array(again.shapes.packed[1])) == [5, 9, 7 * DAY, 8 * DAY, 9 * DAY]
    # The next call uses the corrected time.
    following = operations.decide(Request("hit", "a"))[0]
    assert following.shapes.packed == again.shapes.packed


def test_a_reply_is_split_by_request() -> None:
    operations = PostgresOperations("x", (WINDOW, BUCKET), "app")
    requests = [
        operations.decide(Request("hit", "a"))[0],
        operations.reset("a")[0],
        operations.decide(Request("peek", "a"))[0],
    ]
    new, parts = outcomes(requests, numbers(encoded(list(range(36)))))
    assert (new, parts) == (0, [tuple(range(18)), (), tuple(range(18, 36))])
    assert numbers(None) == ()


def test_replies_are_decoded_into_decisions() -> None:
    operations = PostgresOperations("x", (WINDOW,), "app")
    request = operations.decide(Request("hit", "ada", 2))[0]
    admitted = request.plan.decision(request, (-1, 10, 0, 99, request.birth, 7, 0, 0, 0))
    assert (admitted.allowed, admitted.remaining, admitted.reset_after_us) == (True, 8, 99)
    refused = request.plan.decision(request, (55, 1, 44, 0, 0, 0, 0, 0, 0))
    assert (refused.allowed, refused.remaining, refused.retry_after_us, refused.reset_after_us) == (
        False,
        1,
        55,
        44,
    )
    never = request.plan.decision(request, (-2, 0, 44, 0, 0, 0, 0, 0, 0))
    assert (never.allowed, never.retry_after) == (False, None)
    with pytest.raises(StoreConflict, match="per-hour"):
        request.plan.decision(request, (-4, 0, 0, 0, 0, 0, 0, 0, 0))


def test_a_refusal_shows_what_remains_in_each_rule() -> None:
    operations = PostgresOperations("x", (WINDOW, BUCKET), "app")
    request = operations.decide(Request("hit", "ada", 2))[0]
    reply = (-1, 9, 33, 77, 5, 6, 0, 0, 0, 12, 1, 44, 0, 0, 0, 0, 0, 0)
    decision = request.plan.decision(request, reply)
    assert decision.denied_by == "per-minute"
    assert [(v.allowed, v.remaining, v.reset_after_us) for v in decision.verdicts] == [
        (True, 9, 33),
        (False, 1, 44),
    ]
    assert request.plan.receipts(request, reply) is None
    admitted = (-1, 9, 33, 77, 5, 6, 0, 0, 0, -1, 4, 44, 88, 1, 2, 3, 4, 3)
    assert request.plan.receipts(request, admitted) == (
        (request.keys[0], (5, 6, 2)),
        (request.keys[1], (1, 2, 3, 4, 3, 1, 1_000_000, 5, 2)),
    )


def test_recording_too_many_units_raises() -> None:
    request = PostgresOperations("x", (WINDOW,), "app").decide(Request("record", "ada", 7))[0]
    request.plan.check_recorded(request, (-1, 0, 0, 0, 0, 0, 0, 0, 0))
    with pytest.raises(CostTooHigh) as caught:
        request.plan.check_recorded(request, (-3, 5, 0, 0, 0, 0, 0, 0, 0))
    assert (caught.value.cost, caught.value.capacity) == (7, 5)
    with pytest.raises(StoreConflict):
        request.plan.check_recorded(request, (-4, 0, 0, 0, 0, 0, 0, 0, 0))


def test_a_token_bucket_with_a_limit_of_0_counts_nothing() -> None:
    request = PostgresOperations("x", (token_bucket("0/minute"),), "app").decide(Request("hit", "ada", 2))[0]
    decision = request.plan.decision(request, (-2, 0, 0, 0, 0, 0, 0, 0, 0))
    assert (decision.allowed, decision.limit, decision.retry_after, decision.reset_after) == (
        False,
        0,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("key", "cost"), [("a", -1), ("a", 1.0), ("a", True), (None, 1), (3, 1), ({"user": "a"}, 1)]
)
def test_invalid_keys_and_costs_are_refused(key: object, cost: object) -> None:
    operations = PostgresOperations("x", (WINDOW,), "app")
    with pytest.raises(ConfigError):
        operations.decide(Request("hit", key, cost))  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        operations.decide(Request("record", key, cost))  # type: ignore[arg-type]


def test_a_cost_above_the_limit_is_refused_and_a_cost_of_0_only_reads() -> None:
    operations = PostgresOperations("x", (sliding_window("10/hour", tiers={"pro": "20/hour"}),), "app")
    with pytest.raises(CostTooHigh):
        operations.decide(Request("hit", "a", 11))
    assert operations.decide(Request("hit", "a", 11, "pro"))[0].operation == HIT
    assert operations.decide(Request("hit", "a", 0))[0].operation == PEEK
    assert operations.decide(Request("record", "a", 0))[0].operation == PEEK


def test_the_request_contains_the_time_if_the_store_has_a_clock() -> None:
    clock = FakeClock(5)
    operations = PostgresOperations("x", (WINDOW,), "app", clock)
    assert operations.decide(Request("hit", "a"))[0].at == 5_000_000
    assert operations.decide(Request("hit", "a", 1, None, 7))[0].at == 7


def test_new_states_are_recognised_by_their_birth() -> None:
    operations = PostgresOperations("x", (WINDOW, fixed_window("5/day")), "app")

    def new(request: StateCall, births: tuple[int, int]) -> int:
        return request.new_states((-1, 0, 0, 0, births[0], 0, 0, 0, 0, -1, 0, 0, 0, births[1], 0, 0, 0, 0))

    hit = operations.decide(Request("hit", "a"))[0]
    assert [new(hit, births) for births in ((1, 2), (hit.birth, 2), (hit.birth, hit.birth))] == [0, 1, 2]
    peek = operations.decide(Request("peek", "a"))[0]
    assert new(peek, (peek.birth, peek.birth)) == 0
