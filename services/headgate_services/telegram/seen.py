"""Which updates have been dealt with: Telegram delivers one again whenever it is not sure of our answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headgate.stores.kv import Turns

DEFAULT_CAPACITY = 10_000


class SeenUpdates:
    """The last updates that were dealt with, in this process's memory.

    Args:
        capacity: How many are remembered; the oldest is forgotten first.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._done: OrderedDict[int, None] = OrderedDict()
        self._turns = Turns()

    @asynccontextmanager
    async def turn(self, update_id: int) -> AsyncIterator[bool]:
        """Yield whether the update is still to be dealt with, and keep its redeliveries waiting meanwhile.

        Waiting matters: a redelivery that comes while the first delivery is being dealt with must do nothing if that
        one succeeds, and must try again if it fails.
        """
        async with self._turns.take(str(update_id)):
            yield update_id not in self._done

    def add(self, update_id: int) -> None:
        """Remember an update as dealt with."""
        self._done[update_id] = None
        if len(self._done) > self._capacity:
            self._done.popitem(last=False)
