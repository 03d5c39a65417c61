"""Ids of processed updates, because Telegram delivers an update again if it did not get our response.

The ids are kept in memory and in a key-value store, separate from the counts, so that they survive a restart and processes
share them. A key-value store has no locks: if an update is delivered again to another process while the first one is still
working on it, both dispatch it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headgate import StoreError
from headgate.outage import AsyncCircuit, Breaker
from headgate.stores.kv import KV, KeyTurns

DEFAULT_CAPACITY = 10_000
KEPT_SECONDS = 25 * 3600
"""Telegram drops an update after a day."""

_logger = logging.getLogger(__name__)


class SeenUpdates:
    """The last updates that were dispatched or refused.

    Args:
        kv: A store for their ids, or `None` for memory only. While the store is down, only memory is used.
        capacity: The number of ids in memory; the oldest is removed first.
    """

    def __init__(self, kv: KV | None = None, capacity: int = DEFAULT_CAPACITY) -> None:
        self._kv = kv
        self._circuit = AsyncCircuit(Breaker(kv), self._probe)
        self._capacity = capacity
        self._done: OrderedDict[int, None] = OrderedDict()
        self._turns = KeyTurns()

    @asynccontextmanager
    async def turn(self, update_id: int) -> AsyncIterator[bool]:
        """Yield whether the update is new. A redelivery to this process waits until the block ends.

        The wait is necessary: the redelivery must be ignored if the first delivery succeeds, and dispatched if it fails.
        """
        async with self._turns.take(str(update_id)):
            yield update_id not in self._done and not await self._is_kept(update_id)

    async def add(self, update_id: int) -> None:
        """Store the id of a processed update."""
        self._done[update_id] = None
        if len(self._done) > self._capacity:
            self._done.popitem(last=False)
        if self._kv is not None:
            try:
                await self._circuit.call(True, self._kv.put, _key(update_id), "1", KEPT_SECONDS)
            except StoreError as error:
                _logger.warning("update %s is stored in memory only: %s", update_id, error)

    async def _is_kept(self, update_id: int) -> bool:
        if self._kv is None:
            return False
        try:
            return await self._circuit.call(False, self._kv.get, _key(update_id)) is not None
        except StoreError as error:
            _logger.warning("update %s could not be looked up and is treated as new: %s", update_id, error)
            return False

    async def _probe(self) -> None:
        if self._kv is not None:
            await self._kv.get(_key(0))

    def stop(self) -> None:
        """Stop the probes of a store that is down."""
        self._circuit.breaker.stop()


def _key(update_id: int) -> str:
    return f"update:{update_id}"
