"""Stores, by name or by URL.

memory://                     this process
sqlite:///relative/path.db    a file; sqlite:////absolute/path.db; sqlite:///:memory:
redis://host:6379/0           a Redis or Valkey server; rediss:// for TLS, unix:///path.sock, valkey://, valkeys://
postgresql://host/database    a PostgreSQL server
http://host:8080              a Headgate server, which decides by its own rules; https://:TOKEN@host with a token
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from headgate.errors import ConfigError
from headgate.stores.base import AsyncGate, AsyncNotes, AsyncStore, Gate, Guarantees, Store
from headgate.stores.memory import MemoryStore
from headgate.stores.outage import Health, OnStoreError, local
from headgate.stores.sqlite import SQLiteStore
from headgate.urls import check_credentials

__all__ = [
    "AsyncGate",
    "AsyncNotes",
    "AsyncStore",
    "Gate",
    "Guarantees",
    "Health",
    "MemoryStore",
    "OnStoreError",
    "SQLiteStore",
    "Store",
    "check_url",
    "local",
    "open_async_store",
    "open_store",
]

_REMOTE = {
    **dict.fromkeys(
        ("redis", "rediss", "unix", "valkey", "valkeys"), ("headgate.stores.redis", "RedisStore", "redis")
    ),
    **dict.fromkeys(("postgres", "postgresql"), ("headgate.stores.postgres", "PostgresStore", "postgres")),
    **dict.fromkeys(("http", "https"), ("headgate.client", "ServerStore", "client")),
}
"""By scheme: the module, the class, and the extra that it needs.

They are named here and imported on demand, so this package depends on none of them. The client lies outside of it: it makes
limiters, which are made of stores.
"""


def open_store(url: str) -> Store:
    """Return the store that a URL names.

    Raises:
        ConfigError: No store has such URLs, or what it needs is not installed.
    """
    store: Store = _open(url)
    return store


def open_async_store(url: str) -> AsyncStore:
    """Return the store that a URL names, for coroutines.

    Raises:
        ConfigError: No store has such URLs, or what it needs is not installed.
    """
    store: AsyncStore = _open(url)
    return store


def check_url(url: str) -> None:
    """Refuse a URL that no store has. Nothing is opened, and no package needed.

    Raises:
        ConfigError: No store has such URLs, or its password needs to be percent-encoded.
    """
    _scheme(url)


def _open(url: str) -> Any:
    scheme = _scheme(url)
    if scheme == "memory":
        return MemoryStore()
    if scheme == "sqlite":
        return SQLiteStore.from_url(url)
    return _remote_class(scheme)(url)


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    if scheme.lower() in _REMOTE:
        check_credentials(url)
    if scheme.lower() in {"memory", "sqlite", *_REMOTE}:
        return scheme.lower()
    if not colon:  # not quoted: it may be the connection string of a database, with a password in it
        raise ConfigError(
            "a store is a URL, such as 'memory://', 'sqlite:///limits.db' or 'redis://localhost:6379/0'"
        )
    raise ConfigError(
        f"no store is known for {scheme!r}; write for example 'memory://', 'sqlite:///limits.db' or "
        f"'redis://localhost:6379/0'"
    )


def _remote_class(scheme: str) -> Any:
    """Import a store only when it is asked for: its packages are extras."""
    module, name, extra = _REMOTE[scheme]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headgate"):
            raise
        raise ConfigError(
            f"a store at {scheme}:// needs the package {error.name!r}: pip install 'headgate[{extra}]'"
        ) from error
