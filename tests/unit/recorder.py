"""A hook that stores all events."""

from __future__ import annotations

from typing import Any

from headgate import Decision
from headgate.costs import Cost
from headgate.hooks import Call, Hook

Event = tuple[Any, ...]


class Recorder(Hook):
    """Stores the name and the arguments of each event, except the durations, which are in `seconds`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.seconds: list[float] = []

    def attached(self, limiter: Any) -> None:
        self.events.append(("attached", limiter, limiter.store))

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        self.events.append(("decided", call, decision))
        self.seconds.append(seconds)

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        self.events.append(("completed", call, degraded))
        self.seconds.append(seconds)

    def settled(self, call: Call, cost: Cost | None) -> None:
        self.events.append(("settled", call, cost))

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        self.events.append(("failed", call, type(error)))
        self.seconds.append(seconds)

    def arguments(self, name: str) -> list[Event]:
        """Return the arguments of all events with this name."""
        return [event[1:] for event in self.events if event[0] == name]
