"""Where the database is, and what its failures mean."""

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
_NOT_PREPARED = ("26000", "42P05")  # a prepared statement that is not there, or is there already
# What the database is short of or busy with, or how it says that it is going or refuses us.
_UNAVAILABLE = ("08", "40", "53", "55", "57", "58")
_NOT_LET_IN = ("28", "3D")  # wrong credentials; no such database
# The same when a connection is refused, for libpq hands over no code then.
_NOT_LET_IN_TEXT = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|(role|database) .* does not exist|"
    rf"permission denied for database|not permitted to log in|SSL was required|(?i:{WRONG_TLS})|"
    r"invalid port number|"
    # A setting in the URL, refused by libpq or by the server.
    r"invalid \S+ value|unrecognized configuration parameter|invalid (value for parameter|command-line argument)|"
    r"cannot be changed|definition of service|required,? but|method requirement|"
    # PgBouncer, whose code for whatever it refuses is 08P01; its console is no database.
    r"bouncer config error|no such (user|database)|FATAL: not allowed|login rejected|SSL required|"
    r"unsupported (options )?startup parameter|not supported by admin console|wrong password type"
)
_INVALID_REPLY = re.compile(r"invalid response to|expected authentication request")
_QUOTED = re.compile(r'"[^"]*"')  # in such a text: names, which say nothing about why it fails


class QueryRefused(Exception):
    """The database answered with an error, and so has done nothing.

    Attributes:
        sqlstate: PostgreSQL's code for it.
    """

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


def spares_connection(error: BaseException) -> bool:
    """Tell whether a connection can be used again after a failure.

    Not that of a server that is no longer the primary, so that the next call looks for it anew.
    """
    return isinstance(error, QueryRefused) and error.sqlstate != _READ_ONLY


def blames_one(error: BaseException) -> bool:
    """Tell whether the failure of several requests may be the fault of one of them.

    The database has done nothing then, so each may be sent again, alone.
    """
    if not isinstance(error, QueryRefused):
        return False
    return error.sqlstate[:2] in ("22", "23", "54", "P0", "XX") or error.sqlstate == "53200"  # too many locks


class PostgresEndpoint:
    """A database, by its URL or connection string.

    Attributes:
        name: What it is called in messages; without credentials.
        conninfo: How to connect to it; with credentials.
    """

    def __init__(self, target: str) -> None:
        self.name, self.conninfo = _read(target)

    def error(self, cause: BaseException) -> StoreError:
        """Return what a failure means to callers."""
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
                f"ON headgate_states, headgate_notes"
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
