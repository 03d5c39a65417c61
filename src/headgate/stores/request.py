"""The request of a limiter to a gate. Every call creates one, so this file is also compiled."""

from __future__ import annotations

from typing import Any

from headgate._checks import check_text
from headgate.algorithms.base import Operation, Receipts
from headgate.costs import Costs
from headgate.keys import Key
from headgate.quota import Quotas


class Request:
    """A request to a gate.

    The cost is a tuple if there are quotas or receipts to replace. So a store can recognise a plain request by its cost.

    Attributes:
        operation: The operation.
        key: The key.
        cost: One number for every rule, or one number per rule.
        tier: The caller's tier.
        now: Time in microseconds since the epoch; `None` for the store's clock.
        quotas: Quotas per rule that replace those of the tier.
        replaces: Receipts of a hold whose units are given back first, in the same step; a refusal changes nothing. For a
            `renew`: the receipts of the leases, which stay valid.
        is_final: Whether penalties count a refusal; false for an attempt that is repeated.
    """

    __slots__ = ("cost", "is_final", "key", "now", "operation", "quotas", "replaces", "tier")

    def __init__(
        self,
        operation: Operation,
        key: Key | None,
        cost: Costs = 1,
        tier: str | None = None,
        now: int | None = None,
        quotas: Quotas | None = None,
        replaces: Receipts | None = None,
        is_final: bool = True,
    ) -> None:
        self.operation: Operation = operation
        self.key = key
        # `Costs`; most stores check first whether it is a number.
        self.cost: Any = cost
        self.tier = tier if tier is None or type(tier) is str else check_text("a tier", tier, 0)
        self.now = now
        self.quotas = quotas
        self.replaces = replaces
        self.is_final: bool = is_final

    @property
    def charges(self) -> bool:
        """Whether the cost is above 0."""
        return any(self.cost) if isinstance(self.cost, tuple) else self.cost > 0

    @property
    def is_punishable(self) -> bool:
        """Whether penalties count its refusal: a hit or a new hold that is not repeated."""
        return self.is_final and self.operation in ("hit", "hold") and self.replaces is None

    @property
    def is_given_up(self) -> bool:
        """Whether its units are given back if its caller is cancelled: a new hold, which would otherwise stay open."""
        return self.operation == "hold" and self.replaces is None

    @property
    def is_completed(self) -> bool:
        """Whether it is completed even if its caller is cancelled, because it reports work that is done."""
        return self.operation == "record" or (self.replaces is not None and self.operation != "renew")

    def costs(self, rules: int) -> tuple[int, ...]:
        """Return the cost of each rule."""
        return self.cost if isinstance(self.cost, tuple) else (self.cost,) * rules

    def at(self, now: int) -> Request:
        """Return the request with this time, unless it has a time already."""
        if self.now is not None:
            return self
        return Request(
            self.operation, self.key, self.cost, self.tier, now, self.quotas, self.replaces, self.is_final
        )

    def for_key(self, key: Key | None, tier: str | None) -> Request:
        """Return the request with another key and tier."""
        return Request(
            self.operation, key, self.cost, tier, self.now, self.quotas, self.replaces, self.is_final
        )

    def with_costs(self, costs: Costs) -> Request:
        """Return the request with other costs."""
        return Request(
            self.operation, self.key, costs, self.tier, self.now, self.quotas, self.replaces, self.is_final
        )

    def replacing(self, receipts: Receipts | None) -> Request:
        """Return the request with other receipts to replace."""
        return Request(
            self.operation, self.key, self.cost, self.tier, self.now, self.quotas, receipts, self.is_final
        )

    def with_quotas(self, quotas: Quotas | None) -> Request:
        """Return the request with these quotas, or unchanged for `None`."""
        if quotas is None:
            return self
        costs = self.costs(len(quotas))
        return Request(
            self.operation, self.key, costs, self.tier, self.now, quotas, self.replaces, self.is_final
        )

    def as_attempt(self) -> Request:
        """Return the request for an attempt that is repeated, whose refusal no penalty counts."""
        return Request(
            self.operation, self.key, self.cost, self.tier, self.now, self.quotas, self.replaces, False
        )

    def __repr__(self) -> str:
        more = f", {self.quotas}, {self.replaces}" if self.quotas or self.replaces else ""
        return f"Request({self.operation!r}, {self.key!r}, {self.cost}, {self.tier!r}, {self.now}{more})"


def new_request(
    operation: Operation, key: Key | None, cost: int, tier: str | None, now: int | None
) -> Request:
    """Return a plain request; if compiled, faster than the constructor."""
    request = Request.__new__(Request)
    request.operation = operation
    request.key = key
    request.cost = cost
    request.tier = tier if tier is None or type(tier) is str else check_text("a tier", tier, 0)
    request.now = now
    request.quotas = None
    request.replaces = None
    request.is_final = True
    return request
