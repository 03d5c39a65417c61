"""Whether there is room for another petition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headgate_services.petitions.domain.errors import QueueOverflowError


class QueueCapacityPort(Protocol):
    """Knows how many petitions wait, and refuses more above a threshold."""

    async def is_accepting_submissions(self) -> bool:
        """Tell whether there is room."""

    async def get_queue_depth(self) -> int:
        """Return how many petitions wait, as far as is known."""

    async def take_place(self) -> None:
        """Take a place in the queue for a petition, in the transaction under way, in which it has been saved.

        Raises:
            QueueOverflowError: Others were faster since there was room. The transaction is to be rolled back.
        """

    def refuse(self) -> QueueOverflowError:
        """Take note of a petition that is refused for lack of room, and return the error that says so."""


@dataclass(frozen=True, slots=True)
class QueueMeasure:
    """How many petitions wait, and how many seconds ago they were counted; those taken in since are included."""

    depth: int
    age: float


class QueueStorePort(Protocol):
    """Keeps the number of waiting petitions that all instances share."""

    async def measure(self, max_age: float) -> QueueMeasure:
        """Return how many petitions wait; they are counted anew if that was done longer ago than so many seconds."""

    async def take_place(self, threshold: int) -> int | None:
        """Add one if fewer than `threshold` wait, in the transaction under way, and return how many wait then.

        `None` if there is no room. Others who take a place wait until that transaction has ended.
        """


class QueueObserver(Protocol):
    """Hears of the queue's depth and of refusals."""

    def queue_measured(self, depth: int, threshold: int) -> None:
        """Take note of how many wait."""

    def queue_rejected(self) -> None:
        """Take note of a refusal."""
