"""Stores and their URLs.

memory://                     this process
sqlite:///relative/path.db    a file; sqlite:////absolute/path.db; sqlite:///:memory:
redis://host:6379/0           a Redis or Valkey server; rediss:// for TLS, unix:///path.sock, valkey://, valkeys://
redis+sentinel://host:26379,other:26379/primary/0    the primary, found by Sentinel
redis+cluster://host:6379,other:6379                 a cluster, by any of its nodes
postgresql://host/database    a PostgreSQL server
http://host:8080              a Headgate server, which has its own rules; https://:TOKEN@host with a token
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

from headgate.decision import UNLIMITED
from headgate.errors import ConfigError
from headgate.keys import storage_keys
from headgate.stores.base import (
    LONGEST_NOTE,
    RECORDED,
    Answer,
    AsyncGate,
    AsyncNotes,
    AsyncStore,
    Births,
    Gate,
    Guarantees,
    Operation,
    Receipts,
    Store,
    check_deadline,
    given_back,
    plain_tiers,
)
from headgate.stores.counters import OVERFLOW
from headgate.stores.handle import StoreHandle
from headgate.stores.memory import MemoryStore
from headgate.stores.request import Request
from headgate.stores.sqlite import SQLiteStore
from headgate.urls import check_credentials

__all__ = [
    "LONGEST_NOTE",
    "OVERFLOW",
    "RECORDED",
    "UNLIMITED",
    "Answer",
    "AsyncGate",
    "AsyncNotes",
    "AsyncStore",
    "Births",
    "Gate",
    "Guarantees",
    "MemoryStore",
    "Operation",
    "Receipts",
    "Request",
    "SQLiteStore",
    "Store",
    "check_url",
    "given_back",
    "open_async_store",
    "open_store",
    "plain_tiers",
    "storage_keys",
]

_REMOTE = {
    **dict.fromkeys(
        (
            "unix",
            *(
                f"{scheme}{kind}"
                for scheme in ("redis", "rediss", "valkey", "valkeys")
                for kind in ("", "+sentinel", "+cluster")
            ),
        ),
        ("headgate.stores.redis", "RedisStore", "redis"),
    ),
    **dict.fromkeys(("postgres", "postgresql"), ("headgate.stores.postgres", "PostgresStore", "postgres")),
    **dict.fromkeys(("http", "https"), ("headgate.client", "ServerStore", "client")),
}
"""Module, class and extra by scheme.

The modules are imported on demand, so this package depends on none of them. The client is outside of this package, because
it creates limiters, which use stores.
"""

_LOCAL = ("memory", "sqlite")
_SCHEMES = (*_LOCAL, *_REMOTE)


def open_store(url: str, *, deadline: float | None = None) -> Store:
    """Return a new store for a URL; the caller closes it.

    A network store abandons a call after `deadline` seconds, by default 1; other stores have no deadline.

    Raises:
        ConfigError: The URL is invalid, or a package is missing.
    """
    store: Store = _open(url, deadline)
    return store


def open_async_store(url: str, *, deadline: float | None = None) -> AsyncStore:
    """Like `open_store`, for coroutines.

    Raises:
        ConfigError: The URL is invalid, or a package is missing.
    """
    store: AsyncStore = _open(url, deadline)
    return store


def open_handle(url: str) -> StoreHandle:
    """Return a handle on the store of a URL.

    Network stores with equal URLs are shared within the process; the order of options is ignored. Memory and SQLite stores
    are private. An SQLite store has neither a server connection nor, by default, a breaker to share. `sqlite:///:memory:` is
    a new database each time, and the file of a relative path depends on the working directory.

    Raises:
        ConfigError: The URL is invalid, or a package is missing.
    """
    scheme = _scheme(url)
    if scheme not in _REMOTE:
        return StoreHandle(partial(_open, url, None))
    return StoreHandle(partial(_remote_class(scheme), url), _sharing_key(url))


def _sharing_key(url: str) -> str:
    """Return the URL with its scheme in lower case and its options sorted by name; the rest is compared as written."""
    scheme, _, rest = url.partition(":")
    address, _, options = rest.partition("?")
    if "#" not in options:
        options = "&".join(sorted(options.split("&"), key=lambda option: option.partition("=")[0]))
    return f"{scheme.lower()}:{address}?{options}"


def check_url(url: str) -> None:
    """Refuse an invalid URL, without opening a store or importing its package.

    Raises:
        ConfigError: The URL is invalid, or its password needs to be percent-encoded.
    """
    _scheme(url)


def _open(url: str, deadline: float | None) -> Any:
    scheme = _scheme(url)
    if deadline is not None:
        check_deadline(deadline)
    if scheme in _REMOTE:
        return _remote_class(scheme)(url, **({} if deadline is None else {"deadline": deadline}))
    if scheme == "memory":
        return MemoryStore()
    return SQLiteStore.from_url(url)


def _scheme(url: str) -> str:
    scheme, colon, rest = url.partition(":") if isinstance(url, str) else ("", "", "")
    name = scheme.lower()
    if name in _REMOTE and rest.startswith("//"):
        check_credentials(url)
        return name
    if name in _LOCAL:
        return name
    # The URL is not shown, because it may contain a password.
    unknown = f"no store is known for {scheme!r}: " if colon and name not in _REMOTE else ""
    if unknown and (similar := get_close_matches(name, _SCHEMES, 1)):
        raise ConfigError(f"{unknown}write {similar[0]}://")
    raise ConfigError(
        f"{unknown}a store is a URL like 'memory://', 'sqlite:///limits.db', 'redis://localhost' or 'postgresql://host/db'"
    )


def _remote_class(scheme: str) -> Any:
    """Import the store class of a scheme; its packages are extras."""
    module, name, extra = _REMOTE[scheme]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headgate"):
            raise
        raise ConfigError(
            f"a store at {scheme}:// needs the package {error.name!r}: pip install 'headgate[{extra}]'"
        ) from error
