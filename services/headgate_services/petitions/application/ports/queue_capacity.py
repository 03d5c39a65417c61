"""The capacity of the queue."""

from __future__ import annotations

from typing import Protocol

from headgate_services.petitions.domain.errors import QueueOverflowError


class QueueCapacityPort(Protocol):
    """Refuses petitions while too many are waiting."""

    async def is_accepting_submissions(self) -> bool:
        """Return whether the queue has room."""

    async def get_queue_depth(self) -> int:
        """Return the last known number of waiting petitions."""

    async def take_place(self) -> None:
        """Add a petition to the queue, in the transaction that saves it.

        Raises:
            QueueOverflowError: The queue is full. The transaction must be rolled back.
        """

    def refuse(self) -> QueueOverflowError:
        """Log and count a refusal because the queue is full, and return the error."""
