"""What a key-value store is, at the least, and what some can do besides.

Keys and values are text, and every value has a time to live. Nothing else is asked, so that even a store that offers
nothing else can count; what it cannot do then, `headgate.stores.kv.store` says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class KV(Protocol):
    """The interface of a key-value store.

    One that also has a `guarantees` attribute says there what it keeps; without it, the least is assumed.
    """

    async def get(self, key: str) -> str | None:
        """Return the value, or `None` if there is none or its time is up.

        Raises:
            StoreUnavailable: It could not be read.
        """

    async def put(self, key: str, value: str, ttl: int) -> None:
        """Keep a value for so many whole seconds, instead of the one before.

        Raises:
            StoreUnavailable: It was not written, or that is unknown.
        """


@runtime_checkable
class SwappingKV(KV, Protocol):
    """A key-value store that can look and put in one step."""

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        """Put the value if the key still has the expected one (`None`: no value); return whether it was put."""


@runtime_checkable
class ListingKV(KV, Protocol):
    """A key-value store that can be looked through and cleared."""

    def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        """Yield the keys that begin with the prefix and have a value."""

    async def delete(self, key: str) -> None:
        """Remove a value, if there is one."""

    async def aclose(self) -> None:
        """Let go of connections and files."""


async def purge(kv: ListingKV, prefix: str = "") -> int:
    """Remove every value whose key begins with the prefix; return how many there were."""
    found = [key async for key in kv.list_keys(prefix)]
    for key in found:
        await kv.delete(key)
    return len(found)
