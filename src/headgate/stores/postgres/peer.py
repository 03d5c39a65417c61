"""Connections to a database, and the statements and replies of a batch of calls.

Connections use psycopg's wrapper of libpq (`psycopg.pq`), which never repeats a statement: after a lost reply it is unknown
whether a call was counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from psycopg import Error, NotSupportedError, OperationalError, capabilities, pq
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, PollingStatus

from headgate.errors import ConfigError, StoreError
from headgate.stores.postgres.codec import (
    Arguments,
    NoteCall,
    QueueCall,
    StateCall,
    many,
    numbers,
    one,
    outcomes,
)
from headgate.stores.postgres.endpoint import PostgresEndpoint, QueryRefused, blames_one, spares_connection
from headgate.stores.postgres.janitor import Janitor
from headgate.stores.postgres.sql import query
from headgate.stores.remote.batching import RemoteCall
from headgate.stores.remote.connecting import in_thread
from headgate.stores.remote.peer import ALONE, PENDING, Conversation, Receiver
from headgate.stores.remote.polling import Poller

logger = logging.getLogger("headgate")

LEAST_WAIT = 0.02
"""Minimum seconds for each step of connecting, even if this process was busy and is late."""

_TERMINATED = (b"57P01", b"57P05")  # by an administrator or a shutdown; because of an idle timeout
_BINARY = 1
_TUPLES_OK, _COMMAND_OK, _FATAL_ERROR, _SYNC = map(
    int, (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_SYNC)
)


class Statement(NamedTuple):
    """A statement whose result is one binary value."""

    name: bytes
    text: bytes
    formats: list[int]
    """The formats of the arguments: 0 text, 1 binary."""
    is_frequent: bool = True
    """Whether to prepare the statement when a connection is opened."""


def _statement(name: str, formats: list[int]) -> Statement:
    return Statement(name.encode(), query(name).encode(), formats)


ONE = _statement("one", [1] + [0] * 10)
MANY = _statement("many", [1, 0, 1, 0])
CLEAN = _statement("clean", [1, 0])
# Not prepared, because few applications use notes and queues.
NOTE = _statement("note", [1, 1, 0, 0, 1])._replace(is_frequent=False)
QUEUE = _statement("queue", [1, 0, 0, 0])._replace(is_frequent=False)

_TRUE = b"\1"


Call = StateCall | NoteCall | QueueCall
Message = tuple[Statement, Arguments]


class Terminated(OperationalError):
    """The database ended the connection instead of answering, and rolled the statement back.

    After a commit, the result would have arrived before this error.
    """


class PostgresPeer:
    """A database; see `Peer`.

    Args:
        endpoint: The address of the database.
        durable: Whether a call waits until its changes are on disk.
        prepare: Whether to prepare the statements once per connection.
    """

    failures = (Error, QueryRefused)

    def __init__(self, endpoint: PostgresEndpoint, durable: bool, prepare: bool) -> None:
        try:
            capabilities.has_pipeline(check=True)
        except NotSupportedError as error:
            raise ConfigError(f"PostgresStore needs libpq 14 or later: {error}") from None
        self.name = endpoint.name
        self._endpoint = endpoint
        self._durable = b"t" if durable else b"f"
        self._prepare = self.follows = prepare  # not every pooler supports pipelines
        self._janitor = Janitor()

    def share(self, request: Call) -> float:
        return 0 if isinstance(request, StateCall) else ALONE  # it is another statement

    def connect(self, seconds: float) -> PostgresWire:
        due = time.monotonic() + seconds
        pgconn = pq.PGconn.connect_start(self._endpoint.conninfo.encode())
        try:
            while True:
                step = pgconn.connect_poll()
                if step == PollingStatus.OK:
                    break
                if step == PollingStatus.FAILED or pgconn.status == ConnStatus.BAD:
                    raise OperationalError(pgconn.get_error_message())
                _wait_until(pgconn.socket, due, for_writing=step != PollingStatus.READING)
            wire = PostgresWire(pgconn, self._prepare)
            if self._prepare:
                wire.prepare(due)
        except BaseException:
            pgconn.finish()
            raise
        return wire

    async def connect_async(self, seconds: float, receiver: Receiver) -> AsyncPostgresWire:
        # In a thread, because libpq blocks while it resolves the host.
        return AsyncPostgresWire(await in_thread(lambda: self.connect(seconds)), receiver)

    def failure(self, cause: BaseException) -> StoreError:
        error = self._endpoint.error(cause)
        error.__cause__ = cause
        return error

    def may_repeat(self, request: Call, cause: BaseException) -> bool:
        return isinstance(cause, Terminated)

    def converse(self, calls: Sequence[RemoteCall]) -> Conversation:
        value = yield self._message(calls)
        if isinstance(value, QueryRefused):
            if len(calls) > 1 and blames_one(value):
                return calls
            for call in calls:
                call.fail(self.failure(value))
            if not spares_connection(value):
                raise value
            return ()
        if isinstance(calls[0].request, NoteCall):
            calls[0].answer(value)
            return ()
        if isinstance(calls[0].request, QueueCall):
            calls[0].answer(value == _TRUE)
            return ()
        new, again = self._hand_over(calls, value)
        arguments = self._janitor.next(new)
        if arguments is not None:
            # States that equal a fresh one are removed occasionally, in a separate round trip.
            last = yield CLEAN, arguments
            if isinstance(last, QueryRefused):
                logger.warning("%s", self.failure(last))
            else:
                self._janitor.cleaned(last)
        return again

    def _message(self, calls: Sequence[RemoteCall]) -> Message:
        request = calls[0].request
        if isinstance(request, NoteCall):
            return NOTE, request.arguments(self._durable)
        if isinstance(request, QueueCall):
            return QUEUE, request.arguments()
        if len(calls) == 1 and request.is_single:
            return ONE, one(request, self._durable)
        return MANY, many([call.request for call in calls], self._durable)

    def _hand_over(self, calls: Sequence[RemoteCall], value: bytes | None) -> tuple[int, list[RemoteCall]]:
        """Answer calls, and return the number of new states and the calls to send again."""
        new, found = outcomes([call.request for call in calls], numbers(value))
        again = []
        for call, outcome in zip(calls, found, strict=True):
            if isinstance(outcome, StateCall):
                call.request = outcome
                again.append(call)
            else:
                call.answer(outcome)
        return new, again


class PostgresWire:
    """A connection for threads.

    Attributes:
        is_unsent: Whether a part of the message is not yet sent.
    """

    def __init__(self, pgconn: Any, prepare: bool) -> None:
        self.fileno: int = pgconn.socket
        self.pgconn = pgconn
        self._poller = Poller(self.fileno)
        self._prepared = prepare
        self._result: Any = None
        self.is_unsent = False
        pgconn.nonblocking = 1
        pgconn.enter_pipeline_mode()

    def prepare(self, due: float) -> None:
        """Prepare the statements before the monotonic time `due`."""
        for statement in (ONE, MANY, CLEAN):
            self.pgconn.send_prepare(statement.name, statement.text)
            self._end_message()
            while (reply := self.receive()) is PENDING:
                _wait_until(self.fileno, due, for_writing=self.is_unsent)
            if isinstance(reply, QueryRefused):
                raise reply

    def is_over(self) -> bool:
        # After that, libpq has closed the socket, and another file may have its number.
        try:
            while self.pgconn.status == ConnStatus.OK and self._poller.wait(0):
                self.pgconn.consume_input()  # an error that ends the connection, or a notice
        except OperationalError:
            return True
        return bool(self.pgconn.status != ConnStatus.OK)

    def send(self, message: Message) -> None:
        pgconn, ((name, text, formats, is_frequent), arguments) = self.pgconn, message
        if self._prepared and is_frequent:
            pgconn.send_query_prepared(name, arguments, formats, _BINARY)
        else:
            pgconn.send_query_params(text, arguments, None, formats, _BINARY)
        self._end_message()

    def wait(self, seconds: float) -> bool:
        return self._poller.wait(seconds, for_writing=self.is_unsent)

    def receive(self) -> Any:
        if (reply := self._read()) is not PENDING:
            return reply  # it arrived with the previous reply; the connection may be closed already
        pgconn = self.pgconn
        try:
            pgconn.consume_input()
        except OperationalError as error:
            if self._result is None or self._result.status != _FATAL_ERROR:
                raise
            sqlstate = self._result.error_field(DiagnosticField.SQLSTATE)
            kind = Terminated if sqlstate in _TERMINATED else OperationalError
            # The server's message has the reason; libpq's has not.
            raise kind(self._result.get_error_message()) from error
        if self.is_unsent:
            self.is_unsent = bool(pgconn.flush())
        return self._read()

    def _read(self) -> Any:
        """Return the reply, or `PENDING` if it has not arrived completely."""
        pgconn, has_ended = self.pgconn, False
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                if has_ended:
                    break
                has_ended = True  # the end of a statement
            elif result.status == _SYNC:
                return self._reply()
            elif self._result is None:
                self._result = result
        return PENDING

    def close(self) -> None:
        self.pgconn.finish()

    def _end_message(self) -> None:
        """End the message; the server runs it as a separate transaction."""
        self.pgconn.pipeline_sync()
        self.is_unsent = bool(self.pgconn.flush())

    def _reply(self) -> bytes | QueryRefused | None:
        """Return the value of the reply, or the error of the database.

        Raises:
            OperationalError: The connection is lost; it is unknown whether the statement was run.
        """
        result, self._result = self._result, None
        if result is None:
            raise OperationalError("the reply was empty")
        if result.status == _TUPLES_OK:
            value: bytes | None = result.get_value(0, 0)
            return value
        if result.status == _COMMAND_OK:
            return None
        message = result.get_error_message()
        sqlstate = result.error_field(DiagnosticField.SQLSTATE)
        severity = result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED)
        if sqlstate is None or severity != b"ERROR":
            raise OperationalError(message)
        primary = result.error_field(DiagnosticField.MESSAGE_PRIMARY) or message.encode()
        return QueryRefused(primary.decode("utf-8", "replace"), sqlstate.decode())


class AsyncPostgresWire:
    """A connection for tasks of the running event loop."""

    def __init__(self, wire: PostgresWire, receiver: Receiver) -> None:
        self._wire = wire
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._is_open = True
        self._is_writing = False
        self._loop.add_reader(wire.fileno, self._on_news)

    def is_over(self) -> bool:
        return self._wire.is_over()

    def send(self, message: Message) -> None:
        self._wire.send(message)
        self._unanswered += 1
        self._watch_writing()

    def close(self) -> None:
        # The socket is no longer watched from now on, because its number may be reused.
        if self._is_open and not self._loop.is_closed():
            self._loop.remove_reader(self._wire.fileno)
            self._loop.remove_writer(self._wire.fileno)
        self._is_open = False
        self._wire.close()

    async def wait_closed(self) -> None:
        pass

    def abandon(self) -> None:
        """See `AsyncWire.abandon`; this connection has no tasks."""

    def _watch_writing(self) -> None:
        """Watch for writing while a part of the message is not yet sent."""
        if self._wire.is_unsent == self._is_writing:
            return
        self._is_writing = self._wire.is_unsent
        if self._is_writing:
            self._loop.add_writer(self._wire.fileno, self._on_news)
        else:
            self._loop.remove_writer(self._wire.fileno)

    def _on_news(self) -> None:
        """Read replies, or send the rest of a message."""
        if not self._unanswered and self._wire.is_over():
            self._receiver.lose(OperationalError("the server closed the connection"))
            return
        for _ in range(self._unanswered):
            try:
                reply = self._wire.receive()
            except Exception as cause:  # noqa: BLE001  # no caller may wait for ever
                self._receiver.lose(cause)
                return
            if reply is PENDING:
                break
            self._unanswered -= 1
            self._receiver.receive(reply)
            if not self._is_open:
                return
        self._watch_writing()


def _wait_until(fileno: int, due: float, *, for_writing: bool) -> None:
    if not Poller(fileno).wait(max(due - time.monotonic(), LEAST_WAIT), for_writing=for_writing):
        raise TimeoutError
