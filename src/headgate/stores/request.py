"""What a limiter asks of a store: one small value, made on every call and so compiled where it can be."""

from __future__ import annotations

from typing import Any

from headgate._checks import check_text
from headgate.algorithms.base import Operation, Receipts
from headgate.costs import Costs
from headgate.keys import Key
from headgate.quota import Quotas


class Request:
    """One question to a gate.

    A request with quotas or receipts to replace has its costs in a tuple: a store that finds a plain number has found the
    plainest request there is.

    Attributes:
        operation: What is asked.
        key: Whose units.
        cost: How many, of every rule or of each.
        tier: The caller's tier.
        now: When, in microseconds since the epoch; `None` for the store's own clock.
        quotas: By which quotas, where they are not those of the tier.
        replaces: Receipts of a hold whose units are given back first, in the same step; after a refusal nothing has changed.
            Of a `renew`: the receipts of the leases, which stay valid.
    """

    __slots__ = ("cost", "key", "now", "operation", "quotas", "replaces", "tier")

    def __init__(
        self,
        operation: Operation,
        key: Key | None,
        cost: Costs = 1,
        tier: str | None = None,
        now: int | None = None,
        quotas: Quotas | None = None,
        replaces: Receipts | None = None,
    ) -> None:
        self.operation: Operation = operation
        self.key = key
        # `Costs`; most stores look whether it is a plain number, and then go on with that.
        self.cost: Any = cost
        self.tier = tier if tier is None or type(tier) is str else check_text("a tier", tier, 0)
        self.now = now
        self.quotas = quotas
        self.replaces = replaces

    @property
    def charges(self) -> bool:
        """Whether it costs anything."""
        return any(self.cost) if isinstance(self.cost, tuple) else self.cost > 0

    @property
    def is_given_up(self) -> bool:
        """Whether what it takes is given back if its caller is cancelled: a new hold, which no one would end."""
        return self.operation == "hold" and self.replaces is None

    @property
    def is_completed(self) -> bool:
        """Whether it is carried out even if its caller is cancelled: it says what has been done."""
        return self.operation == "record" or (self.replaces is not None and self.operation != "renew")

    def costs(self, rules: int) -> tuple[int, ...]:
        """Return the cost for each of so many rules."""
        return self.cost if isinstance(self.cost, tuple) else (self.cost,) * rules

    def at(self, now: int) -> Request:
        """Return the same request at a time of the caller's own, if it has none."""
        if self.now is not None:
            return self
        return Request(self.operation, self.key, self.cost, self.tier, now, self.quotas, self.replaces)

    def for_key(self, key: Key | None, tier: str | None) -> Request:
        """Return the same request about another key and tier."""
        return Request(self.operation, key, self.cost, tier, self.now, self.quotas, self.replaces)

    def with_costs(self, costs: Costs) -> Request:
        """Return the same request with other costs."""
        return Request(self.operation, self.key, costs, self.tier, self.now, self.quotas, self.replaces)

    def replacing(self, receipts: Receipts | None) -> Request:
        """Return the same request in place of another hold, or of none."""
        return Request(self.operation, self.key, self.cost, self.tier, self.now, self.quotas, receipts)

    def with_quotas(self, quotas: Quotas | None) -> Request:
        """Return the same request by these quotas, if there are any."""
        if quotas is None:
            return self
        costs = self.costs(len(quotas))
        return Request(self.operation, self.key, costs, self.tier, self.now, quotas, self.replaces)

    def __repr__(self) -> str:
        more = f", {self.quotas}, {self.replaces}" if self.quotas or self.replaces else ""
        return f"Request({self.operation!r}, {self.key!r}, {self.cost}, {self.tier!r}, {self.now}{more})"


def new_request(
    operation: Operation, key: Key | None, cost: int, tier: str | None, now: int | None
) -> Request:
    """Return a plain request; where it is compiled, without a detour over the arguments of the class."""
    request = Request.__new__(Request)
    request.operation = operation
    request.key = key
    request.cost = cost
    request.tier = tier if tier is None or type(tier) is str else check_text("a tier", tier, 0)
    request.now = now
    request.quotas = None
    request.replaces = None
    return request
