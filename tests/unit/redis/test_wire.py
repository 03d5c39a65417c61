"""What a connection for tasks notices before it is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from headgate.stores.redis.peer import AsyncRedisWire


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
