# Generated from src/headgate/stores/remote/_async/queues.py by tools/unasync.py. Do not edit.
"""A limiter's queues of waiting calls on a network store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Any

from headgate._checks import Unpicklable
from headgate.clock import to_microseconds
from headgate.errors import StoreError, StoreMisconfigured
from headgate.stores.queues import KeyParts, QueueNames, WakeUps

EncodeQueueRequest = Callable[[bytes, str, int, int], Any]
"""Returns the request of a ticket, from the queue, the ticket, its priority and its lifetime in microseconds."""


class RemoteQueues(Unpicklable):
    """See `Queues`.

    Args:
        names: The names of the queues.
        wake_ups: The waiters of this process.
        encode: Returns the request of a ticket.
        engine: Sends requests.
        deadline: Seconds after which a call fails.
    """

    is_remote = True

    def __init__(
        self, names: QueueNames, wake_ups: WakeUps, encode: EncodeQueueRequest, engine: Any, deadline: float
    ) -> None:
        self.of_key = names.of_key
        self.of_places = names.of_places
        self.new_ticket = wake_ups.new_ticket
        self._wake_ups = wake_ups
        self._encode = encode
        self._engine = engine
        self._deadline = deadline

    def enter(self, queue: bytes, ticket: str, priority: int) -> bool:
        lasting_us = to_microseconds(self._wake_ups.lifetime())
        request = self._encode(queue, ticket, priority, lasting_us)
        try:
            is_first = bool(self._engine.call(request, monotonic() + self._deadline))
        except StoreMisconfigured as error:
            self._wake_ups.report(error)
            raise
        if not is_first:
            self._wake_ups.listen()
        return is_first

    def leave(self, queue: bytes, ticket: str) -> None:
        with contextlib.suppress(
            StoreError, RuntimeError
        ):  # without a store or an event loop, the ticket expires
            self._engine.call(self._encode(queue, ticket, 1, 0), monotonic() + self._deadline)

    def released(self, parts: KeyParts) -> None:
        """Do nothing: the store wakes the waiter of a place."""

    def pause(self, queue: bytes, *, is_place: bool = False) -> float:
        if is_place:
            self._wake_ups.listen()
        return self._wake_ups.pause()

    def missed(self) -> None:
        self._wake_ups.works = False
