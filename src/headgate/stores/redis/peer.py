"""Connections to a server, and the commands and replies of a batch of calls.

All calls of a batch are one command; in a cluster one command per slot, sent together.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from hiredis import Reader
from redis.exceptions import AskError, InvalidResponse, NoScriptError, RedisError

from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.codec import ASKING, BY_SHA, BY_SOURCE, ScriptCall, script_command
from headgate.stores.redis.endpoint import (
    Connection,
    RedisEndpoint,
    error_of,
    is_read_only,
    socket_of,
    take_streams,
)
from headgate.stores.redis.slots import slot_of
from headgate.stores.remote.batching import RemoteCall
from headgate.stores.remote.peer import ALONE, PENDING, Conversation, Receiver
from headgate.stores.remote.polling import Poller

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class RedisMessage(NamedTuple):
    """Commands that are sent together, and the number of their replies."""

    commands: bytes
    replies: int


class Command(NamedTuple):
    """A request other than a call of the script."""

    packed: bytes


class AskingCall(ScriptCall):
    """A call to a node to which the slot is being moved."""

    __slots__ = ()


class Redirected(StoreUnavailable):
    """A node of a cluster named another node for a slot, and did nothing.

    Attributes:
        error: The node's reply.
    """

    def __init__(self, error: AskError) -> None:
        super().__init__(str(error))
        self.error = error


class RedisPeer:
    """A server; see `Peer`."""

    follows = True
    failures = (RedisError,)

    def __init__(self, endpoint: RedisEndpoint) -> None:
        self.name = endpoint.name
        self._endpoint = endpoint

    def share(self, request: ScriptCall | Command) -> float:
        return 0 if type(request) is ScriptCall else ALONE

    def connect(self, seconds: float) -> RedisWire:
        connection = self._endpoint.connection(seconds)
        connection.connect()
        return RedisWire(connection)

    async def connect_async(self, seconds: float, receiver: Receiver) -> AsyncRedisWire:
        connection = self._endpoint.async_connection(seconds)
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return AsyncRedisWire(*take_streams(connection), receiver)

    def failure(self, cause: BaseException) -> StoreError:
        error = self._endpoint.error(cause)
        error.__cause__ = self._endpoint.presentable(cause)
        return error

    def may_repeat(self, request: ScriptCall | Command, cause: BaseException) -> bool:
        return False

    def converse(self, calls: Sequence[RemoteCall]) -> Conversation:
        requests = [call.request for call in calls]
        if isinstance(requests[0], Command):
            return self._answer(calls, (yield RedisMessage(requests[0].packed, 1)))
        [reply] = yield RedisMessage(script_command(BY_SHA, requests), 1)
        if isinstance(reply, NoScriptError):
            # A new server, or one after SCRIPT FLUSH; it did nothing.
            [reply] = yield RedisMessage(script_command(BY_SOURCE, requests), 1)
        return self._answer(calls, reply)

    def _answer(self, calls: Sequence[RemoteCall], reply: Any) -> list[RemoteCall]:
        """Answer the calls of one command, and return the calls to send again with other calendar windows.

        Raises:
            RedisError: The server is no longer the primary; the connection is closed, and the next one finds the primary.
        """
        again: list[RemoteCall] = []
        demoted: RedisError | None = None
        if isinstance(reply, RedisError):
            reply = [reply] * len(calls)
        for call, own in zip(calls, reply, strict=True):
            if not isinstance(own, RedisError):
                call.answer(own)
            elif isinstance(call.request, ScriptCall) and (instead := call.request.after(own)):
                call.request = instead
                again.append(call)
            else:
                call.fail(self.failure(own))
                if is_read_only(own):
                    demoted = own
        if demoted is not None:
            raise demoted  # the same error for the batches that follow on this connection
        return again


class NodePeer(RedisPeer):
    """A node of a cluster, which has only some of the slots. Each slot has a separate command; all are sent together."""

    def failure(self, cause: BaseException) -> StoreError:
        # `MovedError` is a subclass.
        return Redirected(cause) if isinstance(cause, AskError) else super().failure(cause)

    def converse(self, calls: Sequence[RemoteCall]) -> Conversation:
        if isinstance(calls[0].request, Command):
            return (yield from super().converse(calls))
        # The reply to ASKING comes first; such a call is sent alone.
        asking = ASKING if isinstance(calls[0].request, AskingCall) else b""
        groups: dict[int, list[RemoteCall]] = {}
        for call in calls:
            groups.setdefault(slot_of(call.request), []).append(call)
        pending, opening, again = list(groups.values()), BY_SHA, list[RemoteCall]()
        while pending:
            commands = [asking + script_command(opening, [call.request for call in some]) for some in pending]
            replies = yield RedisMessage(b"".join(commands), len(pending) + bool(asking))
            forgotten = []
            for some, reply in zip(pending, replies[bool(asking) :], strict=True):
                if isinstance(reply, NoScriptError):
                    forgotten.append(some)
                else:
                    again += self._answer(some, reply)
            pending, opening = forgotten, BY_SOURCE
        return again


class RedisWire:
    """A connection for threads. redis-py opens it; then only its socket is used.

    redis-py would apply the timeout to each part of a reply instead of the whole reply.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._socket = socket_of(connection)
        self._socket.setblocking(False)
        self._poller = Poller(self._socket.fileno())
        self._unsent = b""
        self._reader = Reader(protocolError=InvalidResponse, replyError=error_of)
        self._replies: list[Any] = []
        self._expected = 0

    def is_over(self) -> bool:
        try:
            # Either the server closed the connection, or it sent data that was not requested.
            self._socket.recv(1)
        except _NOT_NOW:
            return False
        except OSError:
            pass
        return True

    def send(self, message: RedisMessage) -> None:
        self._unsent, self._expected = message
        self._replies = []
        self._flush()

    def wait(self, seconds: float) -> bool:
        return self._poller.wait(seconds, for_writing=bool(self._unsent))

    def receive(self) -> Any:
        if self._unsent:
            self._flush()
        while True:
            try:
                data = self._socket.recv(65536)
            except _NOT_NOW:
                return PENDING
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._replies.append(reply)
            if len(self._replies) >= self._expected:
                return self._replies

    def close(self) -> None:
        self._connection.disconnect()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except _NOT_NOW:
            return


class AsyncRedisWire(asyncio.Protocol):
    """A connection for tasks. redis-py opens it; then only its transport is used.

    The rest of redis-py takes as long for a command and its reply as the server takes for a decision.
    """

    def __init__(
        self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter, receiver: Receiver
    ) -> None:
        self._writer = writer  # closes the transport when it is deleted
        self._transport = writer.transport
        self._receiver: Receiver | None = receiver
        self._reader = Reader(protocolError=InvalidResponse, replyError=error_of)
        self._expected: deque[int] = deque()
        self._replies: list[Any] = []
        self._has_ended = stream.at_eof()
        self._transport.set_protocol(self)

    def is_over(self) -> bool:
        return self._has_ended or self._transport.is_closing()

    def send(self, message: RedisMessage) -> None:
        self._expected.append(message.replies)
        self._transport.write(message.commands)

    def close(self) -> None:
        self._receiver = None
        self._transport.close()

    async def wait_closed(self) -> None:
        pass

    def abandon(self) -> None:
        """See `AsyncWire.abandon`; this connection has no tasks."""

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while self._receiver is not None and (reply := self._reader.gets()) is not False:
                if not self._expected:
                    raise InvalidResponse("more replies than commands")
                self._replies.append(reply)
                if len(self._replies) == self._expected[0]:
                    replies, self._replies = self._replies, []
                    self._expected.popleft()
                    self._receiver.receive(replies)
        except RedisError as error:
            self._lose(error)

    def eof_received(self) -> None:
        self._lose(ConnectionResetError("the server closed the connection"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(error or ConnectionResetError("the server closed the connection"))

    def _lose(self, cause: Exception) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.lose(cause)
