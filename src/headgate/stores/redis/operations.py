"""The operations of a limiter's gate, each encoded as one call of the script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headgate.clock import Clock
from headgate.costs import Costs
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Receipts, given_back
from headgate.stores.penalties import has_penalty, with_penalty_costs
from headgate.stores.redis.codec import Operation, Reply, plans, refund, reset
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.request import Request

StateKeys = Callable[[Key | None], tuple[bytes, ...]]
"""A function from a call's key to the key of each rule's state."""

OPERATIONS = {
    "hit": Operation.HIT,
    "peek": Operation.PEEK,
    "hold": Operation.HOLD,
    "record": Operation.RECORD,
    "renew": Operation.HIT,  # with the receipts of the leases
}
"""The script's operation for each kind of request."""

PUNISHING = {"hit": Operation.FINAL_HIT, "hold": Operation.FINAL_HOLD}
"""The same for requests whose refusals penalties count."""


class RedisOperations:
    """Encodes the operations of a limiter's gate; see `RequestEncoder`.

    Args:
        rules: The limiter's rules.
        keys: The keys of their states; in a cluster in one slot.
        clock: The clock to use instead of the server's.
    """

    def __init__(self, rules: tuple[Rule, ...], keys: StateKeys, clock: Clock | None) -> None:
        self._rules = rules
        self._has_penalty = has_penalty(rules)
        self._plans = plans(rules)
        self._keys = keys
        self._clock = clock

    def decide(self, request: Request) -> EncodedRequest[Answer]:
        """Encode a request.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not valid.
            CostTooHigh: The cost is above a limit, so that waiting does not help.
        """
        operations = OPERATIONS
        if self._has_penalty:
            operations = PUNISHING if request.is_punishable else OPERATIONS
            request = with_penalty_costs(self._rules, request)
        plan, keys = self._plans.for_request(request), self._keys(request.key)
        operation, cost = request.operation, request.cost
        if operation == "record" and not request.charges:
            return plan.decide(Operation.PEEK, keys, cost, self._at(request.now)), lambda _: RECORDED
        call = plan.decide(operations[operation], keys, cost, self._at(request.now), request.replaces)
        if operation == "hold":
            return call, partial(plan.hold, keys, cost)
        return call, partial(plan.recorded, cost) if operation == "record" else plan.answer

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        """Encode a refund."""
        charged = list(given_back(self._plans.own.algorithms, receipts, cost))
        return (refund(charged, self._at(now)) if charged else None), _ignore

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        """Encode a reset of a key."""
        return reset(self._keys(key)), _ignore

    def _at(self, now: int | None) -> int | None:
        """Return the time of a call: `now`, or the clock's time; `None` for the server's clock."""
        return self._clock.now_us() if now is None and self._clock is not None else now


def _ignore(reply: Reply) -> None:
    """Decode a reply without content."""
