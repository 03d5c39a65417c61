"""A connection for tasks, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from redis.exceptions import InvalidResponse

from headgate.stores.redis.peer import AsyncRedisWire, RedisMessage


class RecordingReceiver:
    """Keeps replies and the cause of a loss; closes the lost connection, as the engine does."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.cause: BaseException | None = None
        self.wire = AsyncRedisWire(asyncio.StreamReader(), Mock(), self)

    def receive(self, reply: Any) -> None:
        self.replies.append(reply)

    def lose(self, cause: BaseException) -> None:
        assert self.cause is None
        self.cause = cause
        self.wire.close()


async def test_replies_match_messages_in_order_and_extra_replies_are_errors() -> None:
    receiver = RecordingReceiver()
    for replies in (1, 2, 1):
        receiver.wire.send(RedisMessage(b"", replies))
    receiver.wire.data_received(b":1\r\n:2\r")
    receiver.wire.data_received(b"\n:3\r\n:4\r\n:5\r\n")
    assert receiver.replies == [[1], [2, 3], [4]]
    assert isinstance(receiver.cause, InvalidResponse)
    assert str(receiver.cause) == "more replies than commands"


@pytest.mark.parametrize(
    "happens",
    [
        lambda wire: wire.data_received(b"+OK\r\n"),
        lambda wire: wire.data_received(b"HTTP/1.1 400 Bad Request\r\n"),
        lambda wire: (wire.eof_received(), wire.connection_lost(None)),
        lambda wire: wire.connection_lost(ConnectionResetError()),
    ],
    ids=["reply", "invalid", "end", "reset"],
)
async def test_any_event_on_an_idle_connection_closes_it(
    happens: Callable[[AsyncRedisWire], object],
) -> None:
    receiver = RecordingReceiver()
    happens(receiver.wire)
    assert receiver.cause is not None
    assert not receiver.replies


async def test_a_closed_connection_reports_nothing() -> None:
    receiver = RecordingReceiver()
    receiver.wire.send(RedisMessage(b"", 1))
    receiver.wire.close()
    receiver.wire.data_received(b":1\r\n")
    receiver.wire.connection_lost(None)
    assert (receiver.replies, receiver.cause) == ([], None)


async def test_a_connection_that_ended_during_opening_is_over() -> None:
    stream = asyncio.StreamReader()
    stream.feed_eof()
    assert AsyncRedisWire(stream, Mock(), RecordingReceiver()).is_over()
