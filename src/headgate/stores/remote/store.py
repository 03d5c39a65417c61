"""What stores over a network have in common."""

from __future__ import annotations

from typing import Any

from headgate.stores.base import Closing


class RemoteStore(Closing):
    """A network store: its engines for threads and for tasks.

    Attributes:
        is_closed: Whether it was closed.
    """

    remote = True
    has_rules = False
    is_closed = False

    endpoint: Any
    _threads: Any
    _tasks: Any

    def close(self) -> None:
        """Close all connections; those of event loops as soon as these run."""
        self.is_closed = True
        self._threads.close()
        self._tasks.close()

    async def aclose(self) -> None:
        """Close all connections; those of other event loops as soon as these run."""
        self.is_closed = True
        await self._tasks.aclose()
        self._threads.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.endpoint.name}>"
