"""Whether there is room for another petition."""

from __future__ import annotations

from typing import Protocol


class QueueCapacityPort(Protocol):
    """Knows how many petitions wait, and refuses more above a threshold."""

    async def is_accepting_submissions(self) -> bool:
        """Tell whether there is room."""
        ...

    async def get_queue_depth(self) -> int:
        """Return how many petitions wait, as far as is known."""
        ...

    def record_acceptance(self) -> None:
        """Take note of a petition that was saved and waits now."""
        ...

    def record_rejection(self) -> None:
        """Take note of a petition that was refused for lack of room."""
        ...

    def get_threshold(self) -> int:
        """Return how many may wait."""
        ...

    def get_retry_after_seconds(self) -> int:
        """Return what a refused client is told to wait."""
        ...


class QueueObserver(Protocol):
    """Hears of the queue's depth and of refusals."""

    def queue_measured(self, depth: int, threshold: int) -> None:
        """Take note of how many wait."""
        ...

    def queue_rejected(self) -> None:
        """Take note of a refusal."""
        ...
