"""Checks of a connection for tasks before it is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from redis.exceptions import InvalidResponse

from headgate.stores.redis.peer import AsyncRedisWire, RedisMessage


def nothing(stream: asyncio.StreamReader) -> None:
    """Leave it as it is."""


def reply(stream: asyncio.StreamReader) -> None:
    stream.feed_data(b"+OK\r\n")


def end(stream: asyncio.StreamReader) -> None:
    stream.feed_eof()


def reply_and_end(stream: asyncio.StreamReader) -> None:
    reply(stream)
    end(stream)


def reset(stream: asyncio.StreamReader) -> None:
    stream.set_exception(ConnectionResetError())


async def test_replies_come_in_the_order_of_the_messages_and_no_more_of_them() -> None:
    stream = asyncio.StreamReader()
    wire = AsyncRedisWire(Mock(_reader=stream, _writer=Mock()))
    for replies in (1, 2, 1):
        wire.send(RedisMessage(b"", replies))
    stream.feed_data(b":1\r\n:2\r\n:3\r\n:4\r\n:5\r\n")
    assert [await wire.receive() for _ in range(2)] == [[1], [2, 3]]
    with pytest.raises(InvalidResponse, match="more replies than commands"):
        await wire.receive()


@pytest.mark.parametrize(
    ("happens", "expected"),
    [(nothing, False), (reply, True), (end, True), (reply_and_end, True), (reset, True)],
)
async def test_a_connection_is_over_once_anything_has_come_unasked(
    happens: Callable[[asyncio.StreamReader], None], expected: bool
) -> None:
    stream = asyncio.StreamReader()
    wire = AsyncRedisWire(Mock(_reader=stream, _writer=Mock()))
    happens(stream)
    assert await wire.is_over() is expected
