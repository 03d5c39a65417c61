"""What a limiter asks of a store: one small value, made on every call and so compiled where it can be."""

from __future__ import annotations

from typing import Literal

from headgate.keys import Key

Operation = Literal["hit", "peek", "hold", "record"]
"""Take units; only look; take units that may be given back; count units that have been used already."""


class Request:
    """One question to a gate.

    Attributes:
        operation: What is asked.
        key: Whose units.
        cost: How many.
        tier: The caller's tier.
        now: When, in microseconds since the epoch; `None` for the store's own clock.
    """

    __slots__ = ("cost", "key", "now", "operation", "tier")

    def __init__(
        self,
        operation: Operation,
        key: Key | None,
        cost: int = 1,
        tier: str | None = None,
        now: int | None = None,
    ) -> None:
        self.operation: Operation = operation
        self.key = key
        self.cost = cost
        self.tier = tier
        self.now = now

    def at(self, now: int) -> Request:
        """Return the same request at a time of the caller's own, if it has none."""
        return self if self.now is not None else Request(self.operation, self.key, self.cost, self.tier, now)

    def for_key(self, key: Key | None, tier: str | None) -> Request:
        """Return the same request about another key and tier."""
        return Request(self.operation, key, self.cost, tier, self.now)

    def __repr__(self) -> str:
        return f"Request({self.operation!r}, {self.key!r}, {self.cost}, {self.tier!r}, {self.now})"


def new_request(
    operation: Operation, key: Key | None, cost: int, tier: str | None, now: int | None
) -> Request:
    """Return a request; where it is compiled, without a detour over the arguments of the class."""
    request = Request.__new__(Request)
    request.operation = operation
    request.key = key
    request.cost = cost
    request.tier = tier
    request.now = now
    return request
