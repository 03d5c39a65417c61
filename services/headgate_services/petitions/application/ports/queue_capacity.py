"""Whether there is room for another petition."""

from __future__ import annotations

from typing import Protocol

from headgate_services.petitions.domain.errors import QueueOverflowError


class QueueCapacityPort(Protocol):
    """Knows how many petitions wait, and refuses more above a threshold."""

    async def is_accepting_submissions(self) -> bool:
        """Tell whether there is room."""

    async def get_queue_depth(self) -> int:
        """Return how many petitions wait, as far as is known."""

    async def take_place(self) -> None:
        """Take a place in the queue for a petition, in the transaction that has saved it.

        Raises:
            QueueOverflowError: The queue is full by now. The transaction must be rolled back.
        """

    def refuse(self) -> QueueOverflowError:
        """Log and count a petition that is refused because the queue is full; return the error."""
