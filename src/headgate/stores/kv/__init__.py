"""Counting in a key-value store: one that can get and put, with a time to live, and perhaps nothing else.

KV              what is asked of such a store: `get` and `put`
SwappingKV      … that can also put only if nothing has changed: exact, however many processes share it
ListingKV       … that can also list and delete
MemoryKV        this process
SQLiteKV        a file
RedisKV         `headgate.stores.kv.redis`, needs `headgate[redis]`
CloudflareKV    `headgate.stores.kv.cloudflare`, needs httpx
KVStore         makes any of them a store for `AsyncLimiter`
"""

from __future__ import annotations

from headgate.errors import ConfigError
from headgate.stores.kv.base import KV, ListingKV, SwappingKV, purge
from headgate.stores.kv.memory import MemoryKV
from headgate.stores.kv.sqlite import SQLiteKV
from headgate.stores.kv.store import KVStore
from headgate.stores.kv.turns import KeyTurns
from headgate.urls import check_credentials

__all__ = ["KV", "KVStore", "KeyTurns", "ListingKV", "MemoryKV", "SQLiteKV", "SwappingKV", "open_kv", "purge"]


def open_kv(url: str) -> ListingKV:
    """Return the key-value store that a URL names: `memory://`, `sqlite:///path.db` or `redis://host/database`.

    Cloudflare's needs three secrets, which do not belong in a URL: `CloudflareKV(account, namespace, token)`.

    Raises:
        ConfigError: The URL names no store that is known.
        StoreUnavailable: The file cannot be opened.
    """
    scheme = url.partition(":")[0].lower() if isinstance(url, str) else type(url).__name__
    if scheme == "memory":
        return MemoryKV()
    if scheme == "sqlite":
        return SQLiteKV.from_url(url)
    if scheme in {"redis", "rediss", "unix"}:
        check_credentials(url)
        from headgate.stores.kv.redis import RedisKV

        return RedisKV.from_url(url)
    raise ConfigError(
        f"no key-value store is known for {scheme!r}; write for example 'memory://', 'sqlite:///limits.db' or "
        f"'redis://localhost/1'"
    )
