"""Rate limiting with a key-value store, which needs only `get` and `put` with a time to live.

KV              the interface: `get` and `put`
SwappingKV      … with compare-and-swap: exact, even if several processes share the store
ListingKV       … with listing and deletion
MemoryKV        in this process
SQLiteKV        in a file
RedisKV         `headgate.stores.kv.redis`, needs `headgate[redis]`
CloudflareKV    `headgate.stores.kv.cloudflare`, needs httpx
KVStore         the store for `AsyncLimiter` on top of any of them
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
    """Return the key-value store of a URL: `memory://`, `sqlite:///path.db` or `redis://host/database`.

    Cloudflare's has no URL, because it needs a secret token: use `CloudflareKV(account, namespace, token)`.

    Raises:
        ConfigError: The scheme of the URL is unknown.
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
        f"{scheme!r} is not a scheme of a key-value store; write for example 'memory://', 'sqlite:///limits.db' or "
        f"'redis://localhost/1'"
    )
