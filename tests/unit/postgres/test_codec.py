"""Encoding of requests and decoding of replies, without a database."""

from __future__ import annotations

import struct

import pytest

from headgate import (
    CostTooHigh,
    StoreConflict,
    sliding_window,
    token_bucket,
)
from headgate.stores.postgres.codec import many
from headgate.stores.postgres.operations import PostgresOperations
from headgate.stores.remote.encoding import decode
from headgate.stores.request import Request

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


def array(numbers: bytes) -> bytes:
    return struct.pack(">iiiii", 1, 0, 20, len(numbers) // 12, 1) + numbers


def test_recording_too_many_units_raises() -> None:
    request = PostgresOperations("x", (WINDOW,), "app").decide(Request("record", "ada", 7))[0]
    request.plan.check_recorded(request, (-1, 0, 0, 0, 0, 0, 0, 0, 0))
    with pytest.raises(CostTooHigh) as caught:
        request.plan.check_recorded(request, (-3, 5, 0, 0, 0, 0, 0, 0, 0))
    assert (caught.value.cost, caught.value.capacity) == (7, 5)
    with pytest.raises(StoreConflict):
        request.plan.check_recorded(request, (-4, 0, 0, 0, 0, 0, 0, 0, 0))


@pytest.mark.parametrize("reply", [(7,), (), (0, 0, 0, 0, 0, 0, 0, 0, 0)])
def test_invalid_reply_to_a_record_is_a_store_conflict(reply: tuple[int, ...]) -> None:
    _, decoder = PostgresOperations("x", (WINDOW,), "app").decide(Request("record", "ada", 7))
    with pytest.raises(StoreConflict, match="invalid reply"):
        decode("PostgreSQL", decoder, reply)
