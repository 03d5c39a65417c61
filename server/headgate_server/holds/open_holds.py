"""Open holds that one process took, bounded in number."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple

from headgate import AsyncHold

MAX_OPEN = 20_000


class OpenHold(NamedTuple):
    """A hold that is open as far as this process knows; after `due` (microseconds) it can no longer be settled."""

    limiter: str
    hold: AsyncHold
    due: int
    caller: str


class OpenHolds:
    """Open holds by id, at most `MAX_OPEN`."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenHold] = {}
        self._by_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def of_caller(self, caller: str) -> int:
        """Return the number of open holds of a caller."""
        return self._by_caller[caller]

    def add(self, hold_id: str, limiter: str, hold: AsyncHold, due: int, caller: str = "") -> None:
        """Remember a hold until it is due; drop the oldest if there are too many."""
        if len(self._by_id) >= MAX_OPEN:
            self.drop(next(iter(self._by_id)))
        self._by_id[hold_id] = OpenHold(limiter, hold, due, caller)
        self._by_caller[caller] += 1

    def get(self, hold_id: str) -> OpenHold | None:
        return self._by_id.get(hold_id)

    def extend(self, hold_id: str, due: int) -> None:
        """Remember a hold for longer, if it is remembered."""
        found = self._by_id.get(hold_id)
        if found is not None and found.due < due:
            self._by_id[hold_id] = found._replace(due=due)

    def disarm(self, hold_id: str) -> None:
        """Drop a hold whose hooks were called by the code that settled it."""
        found = self.drop(hold_id)
        if found is not None:
            found.hold.forget()

    def drop(self, hold_id: str) -> OpenHold | None:
        """Drop a hold, and return it. If it was not settled, its hooks are called when it is garbage-collected."""
        found = self._by_id.pop(hold_id, None)
        if found is not None:
            self._by_caller[found.caller] -= 1
            if not self._by_caller[found.caller]:
                del self._by_caller[found.caller]
        return found

    def due(self, now: int) -> list[str]:
        """Return the ids of the holds that can no longer be settled."""
        return [hold_id for hold_id, hold in self._by_id.items() if hold.due <= now]

    def next_few(self, number: int) -> list[str]:
        """Return the ids that this method has not returned for longest."""
        few = list(islice(self._by_id, number))
        for hold_id in few:
            self._by_id[hold_id] = self._by_id.pop(hold_id)
        return few
