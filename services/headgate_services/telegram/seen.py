"""The updates that were dispatched or refused: Telegram delivers one again whenever it is not sure of our answer.

The ids are kept in memory and, so that they survive a restart and processes share them, in a key-value store of their own:
the one of the limit holds nothing but counts. A key-value store cannot lock, so an update that is delivered again to another
process while the first still works on it is dispatched by both.
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
"""Telegram gives up on an update after a day."""

_logger = logging.getLogger(__name__)


class SeenUpdates:
    """The last updates that were dispatched or refused.

    Args:
        kv: A store for their ids, or `None` for this process's memory only. While it is down, it is not waited for, and
            memory has to do.
        capacity: How many are kept in memory; the oldest is forgotten first.
    """

    def __init__(self, kv: KV | None = None, capacity: int = DEFAULT_CAPACITY) -> None:
        self._kv = kv
        self._circuit = AsyncCircuit(Breaker(kv), self._probe)
        self._capacity = capacity
        self._done: OrderedDict[int, None] = OrderedDict()
        self._turns = KeyTurns()

    @asynccontextmanager
    async def turn(self, update_id: int) -> AsyncIterator[bool]:
        """Yield whether the update is still to be dispatched; a redelivery to this process waits meanwhile.

        Waiting matters: a redelivery must do nothing if the delivery under way succeeds, and must try again if it fails.
        """
        async with self._turns.take(str(update_id)):
            yield update_id not in self._done and not await self._is_kept(update_id)

    async def add(self, update_id: int) -> None:
        """Remember an update."""
        self._done[update_id] = None
        if len(self._done) > self._capacity:
            self._done.popitem(last=False)
        if self._kv is not None:
            try:
                await self._circuit.call(True, self._kv.put, _key(update_id), "1", KEPT_SECONDS)
            except StoreError as error:
                _logger.warning("update %s is remembered in memory only: %s", update_id, error)

    async def _is_kept(self, update_id: int) -> bool:
        if self._kv is None:
            return False
        try:
            return await self._circuit.call(False, self._kv.get, _key(update_id)) is not None
        except StoreError as error:
            _logger.warning("update %s could not be looked up, and is taken for new: %s", update_id, error)
            return False

    async def _probe(self) -> None:
        if self._kv is not None:
            await self._kv.get(_key(0))

    def stop(self) -> None:
        """End the probes of a store that is down."""
        self._circuit.breaker.stop()


def _key(update_id: int) -> str:
    return f"update:{update_id}"
