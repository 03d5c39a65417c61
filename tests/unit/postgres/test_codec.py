"""What is sent to the database and what is made of its replies, without a database."""

from __future__ import annotations

import struct

import pytest

from headgate import ConfigError, CostTooHigh, StoreConflict, fixed_window, sliding_window, token_bucket
from headgate.stores.postgres.codec import HIT, PEEK, Codec, StateCall, many, numbers, one, split
from headgate.stores.request import Request
from headgate.testing import FakeClock

WINDOW = sliding_window("10/hour")
BUCKET = token_bucket("60/minute", burst=5)


def bigints(value: bytes | None) -> list[int]:
    """Return the numbers of a binary array, as its format says."""
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


def test_a_request_about_one_key_is_told_in_plain_arguments() -> None:
    request = Codec("login", (WINDOW,), "app").ask(Request("hit", "ada", 3, None, 17))
    key, *rest = one(request, b"f")
    assert key == b"3:app5:login" + b"%d:" % len(WINDOW.identity) + WINDOW.identity.encode() + b"tada"
    assert rest == [
        *(b"1", b"2", b"10", b"60000000", b"3660000000", b"0"),
        *(b"17", b"3", b"%d" % request.birth, b"f"),
    ]


def test_several_requests_name_each_key_once_and_those_to_be_written_first_in_order() -> None:
    codec = Codec("x", (WINDOW, BUCKET), "app")
    look = codec.ask(Request("peek", "ada"))
    other = codec.ask(Request("peek", "bob"))
    hit = codec.ask(Request("hit", "ada", 2, None, 5))
    keys, locks, program, durable = many([look, other, hit], b"t")
    assert hit.keys[0] > hit.keys[1]
    assert byteas(keys) == [*sorted(hit.keys), *other.keys]
    assert (locks, durable) == (b"2", b"t")
    window, bucket = [2, 10, 60_000_000, 3_660_000_000, 0], [3, 5, 1, 1_000_000, 1]
    assert bigints(program) == [
        *(0, -1, 1, look.birth, 2, 2, *window, 1, *bucket),
        *(0, -1, 1, other.birth, 2, 3, *window, 4, *bucket),
        *(1, 5, 2, hit.birth, 2, 2, *window, 1, *bucket),
    ]


def test_a_refund_carries_the_receipt_and_a_reset_nothing_but_its_keys() -> None:
    codec = Codec("x", (WINDOW, BUCKET), "app")
    refund = codec.refund(((b"k1", (7, 8, 2)), (b"k2", (1, 2, 3, 4, 5, 6, 7, 9, 2))), 1, 50)
    _, locks, program, _ = many([refund], b"f")
    assert locks == b"2"
    assert bigints(program) == [
        *(3, 50, 1, 0, 2),
        *(1, 2, 10, 60_000_000, 3_660_000_000, 0, 7, 8, 0, 0, 0, 0, 0, 0, 2),
        *(2, 3, 5, 1, 1_000_000, 1, 1, 2, 3, 4, 5, 6, 7, 9, 2),
    ]
    _, locks, program, _ = many([codec.reset("ada")], b"f")
    assert (locks, bigints(program)) == (b"2", [4, -1, 0, 0, 2, 2, 1])


def test_a_reply_is_cut_into_what_belongs_to_each_request() -> None:
    codec = Codec("x", (WINDOW, BUCKET), "app")
    requests = [
        codec.ask(Request("hit", "a")),
        codec.reset("a"),
        codec.ask(Request("peek", "a")),
    ]
    parts = split(requests, numbers(encoded(list(range(36)))))
    assert [list(part) for part in parts] == [list(range(18)), [], list(range(18, 36))]
    assert numbers(None) == ()


def test_replies_become_decisions() -> None:
    codec = Codec("x", (WINDOW,), "app")
    request = codec.ask(Request("hit", "ada", 2))
    admitted = request.plan.decision((-1, 10, 0, 99, request.birth, 7, 0, 0, 0), 2)
    assert (admitted.allowed, admitted.remaining, admitted.reset_after_us) == (True, 8, 99)
    refused = request.plan.decision((55, 1, 44, 0, 0, 0, 0, 0, 0), 2)
    assert (refused.allowed, refused.remaining, refused.retry_after_us, refused.reset_after_us) == (
        False,
        1,
        55,
        44,
    )
    never = request.plan.decision((-2, 0, 44, 0, 0, 0, 0, 0, 0), 2)
    assert (never.allowed, never.retry_after) == (False, None)
    with pytest.raises(StoreConflict, match="sliding_window/1h"):
        request.plan.decision((-4, 0, 0, 0, 0, 0, 0, 0, 0), 2)


def test_a_refusal_of_several_rules_shows_what_each_has_left_without_the_call() -> None:
    codec = Codec("x", (WINDOW, BUCKET), "app")
    request = codec.ask(Request("hit", "ada", 2))
    reply = (-1, 9, 33, 77, 5, 6, 0, 0, 0, 12, 1, 44, 0, 0, 0, 0, 0, 0)
    decision = request.plan.decision(reply, 2)
    assert decision.denied_by == "token_bucket/1m"
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


def test_units_that_cannot_be_recorded_are_told() -> None:
    request = Codec("x", (WINDOW,), "app").ask(Request("record", "ada", 7))
    request.plan.check_recorded((-1, 0, 0, 0, 0, 0, 0, 0, 0), 7)
    with pytest.raises(CostTooHigh) as caught:
        request.plan.check_recorded((-3, 5, 0, 0, 0, 0, 0, 0, 0), 7)
    assert (caught.value.cost, caught.value.capacity) == (7, 5)
    with pytest.raises(StoreConflict):
        request.plan.check_recorded((-4, 0, 0, 0, 0, 0, 0, 0, 0), 7)


def test_a_token_bucket_with_a_limit_of_0_counts_nothing() -> None:
    request = Codec("x", (token_bucket("0/minute"),), "app").ask(Request("hit", "ada", 2))
    decision = request.plan.decision((-2, 0, 0, 0, 0, 0, 0, 0, 0), 2)
    assert (decision.allowed, decision.limit, decision.retry_after, decision.reset_after) == (
        False,
        0,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("key", "cost"), [("a", -1), ("a", 1.0), ("a", True), (None, 1), (3, 1), ({"user": "a"}, 1)]
)
def test_what_fits_no_rule_is_refused(key: object, cost: object) -> None:
    codec = Codec("x", (WINDOW,), "app")
    with pytest.raises(ConfigError):
        codec.ask(Request("hit", key, cost))  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        codec.ask(Request("record", key, cost))  # type: ignore[arg-type]


def test_a_cost_above_the_limit_is_refused_and_one_of_0_only_looked_at() -> None:
    codec = Codec("x", (sliding_window("10/hour", tiers={"pro": "20/hour"}),), "app")
    with pytest.raises(CostTooHigh):
        codec.ask(Request("hit", "a", 11))
    assert codec.ask(Request("hit", "a", 11, "pro")).operation == HIT
    assert codec.ask(Request("hit", "a", 0)).operation == PEEK
    assert codec.ask(Request("record", "a", 0)).operation == PEEK


def test_time_goes_with_the_request_if_the_store_has_a_clock() -> None:
    clock = FakeClock(5)
    codec = Codec("x", (WINDOW,), "app", clock)
    assert codec.ask(Request("hit", "a")).at == 5_000_000
    assert codec.ask(Request("hit", "a", 1, None, 7)).at == 7


def test_new_states_are_known_by_their_birth() -> None:
    codec = Codec("x", (WINDOW, fixed_window("5/day")), "app")

    def new(request: StateCall, births: tuple[int, int]) -> int:
        return request.new_states((-1, 0, 0, 0, births[0], 0, 0, 0, 0, -1, 0, 0, 0, births[1], 0, 0, 0, 0))

    hit = codec.ask(Request("hit", "a"))
    assert [new(hit, births) for births in ((1, 2), (hit.birth, 2), (hit.birth, hit.birth))] == [0, 1, 2]
    peek = codec.ask(Request("peek", "a"))
    assert new(peek, (peek.birth, peek.birth)) == 0
