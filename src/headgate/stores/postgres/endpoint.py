"""The address of a database, and the translation of its errors."""

from __future__ import annotations

import re

from psycopg import ProgrammingError, conninfo

from headgate.errors import (
    ConfigError,
    StoreConflict,
    StoreError,
    StoreMisconfigured,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.stores.remote.peer import INVALID_REPLY, WRONG_TLS

_READ_ONLY = "25006"
_MISSING = ("3F000", "42883", "42P01", "42704")  # schema, function, table, type
_FORBIDDEN = "42501"
_WRONG_ISOLATION = "25000"
_NOT_PREPARED = ("26000", "42P05")  # an unknown prepared statement, or one that already exists
# Connection failures, conflicts, missing resources, locks, shutdowns and system errors.
_UNAVAILABLE = ("08", "40", "53", "55", "57", "58")
_NOT_LET_IN = ("28", "3D")  # wrong credentials; no such database
# Texts with the same meaning: libpq has no code for a refused connection.
_NOT_LET_IN_TEXT = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|(role|database) .* does not exist|"
    rf"permission denied for database|not permitted to log in|SSL was required|(?i:{WRONG_TLS})|"
    r"invalid port number|"
    # A setting in the URL, refused by libpq or by the server.
    r"invalid \S+ value|unrecognized configuration parameter|invalid (value for parameter|command-line argument)|"
    r"cannot be changed|definition of service|required,? but|method requirement|"
    # PgBouncer, which uses the code 08P01 for every refusal; its console is not a database.
    r"bouncer config error|no such (user|database)|FATAL: not allowed|login rejected|SSL required|"
    r"unsupported (options )?startup parameter|not supported by admin console|wrong password type"
)
_INVALID_REPLY = re.compile(r"invalid response to|expected authentication request")
_QUOTED = re.compile(r'"[^"]*"')  # names in such a text, which must not be searched for reasons


class QueryRefused(Exception):
    """The database answered with an error, and did nothing.

    Attributes:
        sqlstate: PostgreSQL's code for it.
    """

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


def spares_connection(error: BaseException) -> bool:
    """Return whether a connection can be used again after an error.

    Not if the server is no longer the primary: a new connection may find the primary.
    """
    return isinstance(error, QueryRefused) and error.sqlstate != _READ_ONLY


def blames_one(error: BaseException) -> bool:
    """Return whether one of several requests may have caused an error.

    The database did nothing, so each request may be sent again, alone.
    """
    if not isinstance(error, QueryRefused):
        return False
    return error.sqlstate[:2] in ("22", "23", "54", "P0", "XX") or error.sqlstate == "53200"  # too many locks


class PostgresEndpoint:
    """A database, by its URL or connection string.

    Attributes:
        name: The database's name in messages, without credentials.
        conninfo: The connection string, with credentials.
    """

    def __init__(self, target: str) -> None:
        self.name, self.conninfo = _read(target)

    def error(self, cause: BaseException) -> StoreError:
        """Translate an exception of psycopg."""
        if isinstance(cause, TimeoutError):
            return StoreTimeout(f"{self.name} did not answer in time")
        sqlstate: str | None = getattr(cause, "sqlstate", None)
        text = " ".join(str(cause).split()) or type(cause).__name__
        if sqlstate in _MISSING:
            return StoreMisconfigured(
                f"{self.name}: Headgate's tables and functions are missing or old; run 'headgate migrate' ({text})"
            )
        if sqlstate == _FORBIDDEN:
            return StoreMisconfigured(
                f"{self.name}: {text}; the user who ran 'headgate migrate' can GRANT SELECT, INSERT, UPDATE, DELETE "
                f"ON headgate_states, headgate_notes, headgate_tickets"
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
        if sqlstate is None and _INVALID_REPLY.search(text):
            return StoreMisconfigured(f"{self.name} {INVALID_REPLY} ({text})")
        if sqlstate.startswith(_NOT_LET_IN) if sqlstate else _NOT_LET_IN_TEXT.search(_QUOTED.sub('""', text)):
            return StoreMisconfigured(f"{self.name}: {text}")
        if sqlstate is None or sqlstate.startswith(_UNAVAILABLE):
            return StoreUnavailable(f"{self.name}: {text}")
        return StoreConflict(f"{self.name}: {text} ({sqlstate})")


def _read(target: str) -> tuple[str, str]:
    """Return the name of a database without credentials, and its connection string."""
    try:
        parts = conninfo.conninfo_to_dict(target)
        parts.setdefault("fallback_application_name", "headgate")
        merged = conninfo.make_conninfo("", **parts)
        [int(port or 0) for port in str(parts.get("port") or "").split(",")]
    except (ProgrammingError, AttributeError, TypeError, ValueError):
        # Not chained, and without the URL: the parser may quote parts of a password.
        raise ConfigError(
            "the URL of the database cannot be read; write for example 'postgresql://user:password@host:5432/name'; "
            "percent-encode special characters"
        ) from None
    host = parts.get("host") or parts.get("hostaddr")
    place = f"{host}:{parts['port']}" if host and parts.get("port") else host or ""
    return f"PostgreSQL at {place or 'the default address'}/{parts.get('dbname') or ''}".rstrip("/"), merged
