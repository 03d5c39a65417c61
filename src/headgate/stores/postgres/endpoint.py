"""Where the database is, how to get there, and what its failures mean.

Connections are libpq's, through psycopg's wrapper of it (`psycopg.pq`): a statement is sent once, its reply is waited for
no longer than the caller can wait, and nothing is repeated behind our back. After a lost reply nobody knows whether a
call was counted.
"""

from __future__ import annotations

import re
import select
import time
from typing import Any, NamedTuple

from psycopg import Error, OperationalError, ProgrammingError, conninfo, pq
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, PollingStatus

from headgate.errors import (
    ConfigError,
    StoreConflict,
    StoreError,
    StoreMisconfigured,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.stores.postgres.codec import Arguments
from headgate.stores.postgres.sql import query

_READ_ONLY = "25006"
_MISSING = ("3F000", "42883", "42P01", "42704")  # schema, function, table, type
_FORBIDDEN = "42501"
_WRONG_ISOLATION = "25000"
_NOT_PREPARED = ("26000", "42P05")  # a prepared statement that is not there, or is there already
# What the database is short of or busy with, or how it says that it is going or refuses us.
_UNAVAILABLE = ("08", "40", "53", "55", "57", "58")
_NOT_LET_IN = ("28", "3D")  # wrong credentials; no such database
# The same when a connection is refused, for libpq hands over no code then.
_NOT_LET_IN_TEXT = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|(role|database) .* does not exist|"
    r"permission denied for database|not permitted to log in|certificate verify failed"
)

_BINARY = 1
_TUPLES_OK, _COMMAND_OK = int(ExecStatus.TUPLES_OK), int(ExecStatus.COMMAND_OK)


class Statement(NamedTuple):
    """A statement with one value in its result, both binary."""

    name: bytes
    text: bytes
    formats: list[int]
    """Of the arguments: 0 text, 1 binary."""
    is_frequent: bool = True
    """Whether it is worth having it parsed when a connection begins."""


def _statement(name: str, formats: list[int]) -> Statement:
    return Statement(name.encode(), query(name).encode(), formats)


ONE = _statement("one", [1] + [0] * 10)
MANY = _statement("many", [1, 0, 1, 0])
CLEAN = _statement("clean", [1, 0])
# Parsed when it is sent: so decisions go on in a database that was not migrated since there are notes.
NOTE = _statement("note", [1, 1, 0, 0])._replace(is_frequent=False)


class Overdue(Exception):
    """The time was up."""


class Refused(Exception):
    """The database answered with an error, and so has done nothing.

    Attributes:
        sqlstate: PostgreSQL's code for it.
    """

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


FAILURES = (Error, OSError, Overdue, Refused)
"""What using a connection may raise."""


def spares_connection(error: BaseException) -> bool:
    """Tell whether a connection can be used again after a failure.

    Not that of a server that is no longer the primary, so that the next call looks for it anew.
    """
    return isinstance(error, Refused) and error.sqlstate != _READ_ONLY


def blames_one(error: BaseException) -> bool:
    """Tell whether the failure of several requests may be the fault of one of them.

    The database has done nothing then, so each may be sent again, alone.
    """
    if not isinstance(error, Refused):
        return False
    return error.sqlstate[:2] in ("22", "23", "54", "P0", "XX") or error.sqlstate == "53200"  # too many locks


class Endpoint:
    """A database, by its URL or connection string.

    Attributes:
        name: What it is called in messages; without credentials.
        conninfo: How to connect to it; with credentials.
    """

    def __init__(self, target: str, prepare: bool) -> None:
        self.name, self.conninfo = _read(target)
        self._prepare = prepare

    def connect(self, due: float) -> Wire:
        """Return a new connection, by the time that is due on the monotonic clock."""
        pgconn = pq.PGconn.connect_start(self.conninfo.encode())
        try:
            while (step := pgconn.connect_poll()) != PollingStatus.OK:
                if step == PollingStatus.FAILED or pgconn.status == ConnStatus.BAD:
                    raise OperationalError(pgconn.get_error_message())
                events = select.POLLIN if step == PollingStatus.READING else select.POLLOUT
                _wait(pgconn.socket, events, due)
            wire = Wire(pgconn, self._prepare)
            if self._prepare:
                wire.prepare(due)
        except BaseException:
            pgconn.finish()
            raise
        return wire

    def error(self, cause: BaseException) -> StoreError:
        """Return what a failure means to callers."""
        if isinstance(cause, Overdue):
            return StoreTimeout(f"{self.name}: no answer in time")
        sqlstate: str | None = getattr(cause, "sqlstate", None)
        text = " ".join(str(cause).split()) or type(cause).__name__
        if sqlstate in _MISSING:
            return StoreMisconfigured(
                f"{self.name}: Headgate's tables and functions are missing or old; run 'headgate migrate' ({text})"
            )
        if sqlstate == _FORBIDDEN:
            return StoreMisconfigured(
                f"{self.name}: {text}; whoever ran 'headgate migrate' can GRANT SELECT, INSERT, UPDATE, DELETE "
                f"ON headgate_states, headgate_chunks, headgate_notes"
            )
        if sqlstate == _WRONG_ISOLATION:
            return StoreMisconfigured(
                f"{self.name}: {text}; ALTER ROLE ... SET default_transaction_isolation = 'read committed'"
            )
        if sqlstate in _NOT_PREPARED:
            return StoreMisconfigured(
                f"{self.name}: {text}; behind a pooler in transaction mode set prepare=False"
            )
        if sqlstate == _READ_ONLY:
            return StoreMisconfigured(
                f"{self.name}: {text}; it is a replica, or default_transaction_read_only is on"
            )
        if sqlstate.startswith(_NOT_LET_IN) if sqlstate else _NOT_LET_IN_TEXT.search(text):
            return StoreMisconfigured(f"{self.name}: {text}")
        if sqlstate is None or sqlstate.startswith(_UNAVAILABLE):
            return StoreUnavailable(f"{self.name}: {text}")
        return StoreConflict(f"{self.name}: {text} ({sqlstate})")


class Wire:
    """A connection. It has one statement under way at most."""

    def __init__(self, pgconn: Any, prepare: bool) -> None:
        self._pgconn = pgconn
        self._prepared = prepare
        self._result: Any = None
        self._poll = select.poll()
        self.fileno: int = pgconn.socket
        self._poll.register(self.fileno, select.POLLIN)
        pgconn.nonblocking = 1

    def prepare(self, due: float) -> None:
        """Have the database parse the statements once."""
        for statement in (ONE, MANY, CLEAN):
            self._pgconn.send_prepare(statement.name, statement.text)
            self._pgconn.flush()
            self._finish(due)

    def call(self, statement: Statement, arguments: Arguments, due: float) -> bytes | None:
        """Send a statement, wait for its reply until it is due, and return the value in it."""
        if self.send(statement, arguments):
            self._send_rest(due)
        poll = self._poll.poll
        while True:
            if not poll(max(0, (due - time.monotonic()) * 1000)):
                raise Overdue
            if self.receive():
                return self.value()

    def send(self, statement: Statement, arguments: Arguments) -> bool:
        """Send a statement; true if `flush` must be called for the rest of it."""
        pgconn, (name, text, formats, is_frequent) = self._pgconn, statement
        if self._prepared and is_frequent:
            pgconn.send_query_prepared(name, arguments, formats, _BINARY)
        else:
            pgconn.send_query_params(text, arguments, None, formats, _BINARY)
        return bool(pgconn.flush())

    def flush(self) -> bool:
        """Send as much as the network takes; true if there is more."""
        return bool(self._pgconn.flush())

    def receive(self) -> bool:
        """Read what has come; true if that was all of the reply."""
        pgconn = self._pgconn
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                return True
            self._result = result
        return False

    def value(self) -> bytes | None:
        """Return the value in the reply that has been received.

        Raises:
            Refused: The database answered with an error.
            OperationalError: The connection is lost, and with it what became of the statement.
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
        raise Refused(primary.decode("utf-8", "replace"), sqlstate.decode())

    def is_over(self) -> bool:
        """Tell whether the database has closed this connection, which nobody waits on.

        To notice that before anything is sent is not to send twice.
        """
        try:
            while self._poll.poll(0):
                self._pgconn.consume_input()  # a goodbye, or something harmless
                if self._pgconn.status != ConnStatus.OK:
                    return True
        except OperationalError:
            return True
        return False

    def has_news(self) -> bool:
        """Tell whether something has come that was not read yet."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Hang up."""
        self._pgconn.finish()

    def _finish(self, due: float) -> bytes | None:
        while True:
            if not self._poll.poll(max(0, (due - time.monotonic()) * 1000)):
                raise Overdue
            if self.receive():
                return self.value()

    def _send_rest(self, due: float) -> None:
        while True:
            _wait(self.fileno, select.POLLIN | select.POLLOUT, due)
            self._pgconn.consume_input()
            if not self.flush():
                return


def _wait(fileno: int, events: int, due: float) -> None:
    poll = select.poll()
    poll.register(fileno, events)
    if not poll.poll(max(0, (due - time.monotonic()) * 1000)):
        raise Overdue


def _read(target: str) -> tuple[str, str]:
    """Return the name of a database without credentials, and how to connect to it."""
    try:
        parts = conninfo.conninfo_to_dict(target)
        parts.setdefault("fallback_application_name", "headgate")
        merged = conninfo.make_conninfo("", **parts)
        [int(port or 0) for port in str(parts.get("port") or "").split(",")]
    except (ProgrammingError, AttributeError, TypeError, ValueError):
        # Not chained, and without the URL: the parser quotes parts of a password that it took for something else.
        raise ConfigError(
            "the URL of the database cannot be read; write for example 'postgresql://user:password@host:5432/name', "
            "special characters percent-encoded"
        ) from None
    host = parts.get("host") or parts.get("hostaddr")
    place = f"{host}:{parts['port']}" if host and parts.get("port") else host or ""
    return f"PostgreSQL at {place or 'the default address'}/{parts.get('dbname') or ''}".rstrip("/"), merged
