"""The interfaces of key-value stores.

Keys and values are text, and every value has a time to live. `headgate.stores.kv.store` describes the limitations of a store
that offers only `get` and `put`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class KV(Protocol):
    """The interface of a key-value store.

    It may have an attribute `guarantees`; without it, `KVStore` assumes that it is shared and not exact.
    """

    async def get(self, key: str) -> str | None:
        """Return the value, or `None` if it is missing or expired.

        Raises:
            StoreUnavailable: The value could not be read.
        """

    async def put(self, key: str, value: str, ttl: int) -> None:
        """Set a value that expires after `ttl` seconds.

        Raises:
            StoreUnavailable: The value was not written, or it is unknown whether it was.
        """


@runtime_checkable
class SwappingKV(KV, Protocol):
    """A key-value store with compare-and-swap."""

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        """Set the value if the key has the expected one (`None`: no value); return whether it was set."""


@runtime_checkable
class ListingKV(KV, Protocol):
    """A key-value store with listing and deletion."""

    def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        """Yield the keys with the prefix that have a value."""

    async def delete(self, key: str) -> None:
        """Remove a value, if it exists."""

    async def aclose(self) -> None:
        """Close connections and files."""


async def purge(kv: ListingKV, prefix: str = "") -> int:
    """Remove all values whose keys have the prefix, and return their number."""
    found = [key async for key in kv.list_keys(prefix)]
    for key in found:
        await kv.delete(key)
    return len(found)
