"""The operations of a limiter's gate, each encoded as one request to the database."""

from __future__ import annotations

from functools import partial

from headgate.clock import Clock
from headgate.costs import Costs
from headgate.keys import Key, storage_keys
from headgate.rules import Rule
from headgate.stores.base import Answer, Births, Receipts, Tiers, given_back
from headgate.stores.penalties import has_penalty, with_penalty_costs
from headgate.stores.port_parameters import ServerTime
from headgate.stores.postgres.codec import (
    FINAL_HIT,
    HIT,
    MOVE,
    PEEK,
    RECORD,
    REFUND,
    RESET,
    SERVER_CLOCK,
    PostgresPlan,
    Reply,
    StateCall,
    packed_receipt,
)
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.request import Request

_OPERATIONS = {"hit": HIT, "peek": PEEK, "hold": HIT, "record": RECORD, "renew": HIT}


class PostgresOperations:
    """Encodes the operations of a limiter's gate; see `RequestEncoder`."""

    def __init__(
        self, limiter: str, rules: tuple[Rule, ...], namespace: str, clock: Clock | None = None
    ) -> None:
        self._clock = clock
        self._server_time = ServerTime()
        self._rules = rules
        self._has_penalty = has_penalty(rules)
        names = tuple(rule.name for rule in rules)
        self._tiers = Tiers(rules, partial(PostgresPlan, names, self._server_time), shared=True)
        self._keys = storage_keys(namespace, limiter, rules)
        self._new_birth = Births()

    def decide(self, request: Request) -> EncodedRequest[Answer]:
        """Encode a request; one with a cost of 0 is a peek.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
            CostTooHigh: The cost is above a limit, so that waiting does not help.
        """
        if self._has_penalty:
            request = with_penalty_costs(self._rules, request)
        plan = self._tiers.for_request(request)
        keys = self._keys(request.key)
        operation = _OPERATIONS[request.operation] if request.charges else PEEK
        if self._has_penalty and operation == HIT and request.is_punishable:
            operation = FINAL_HIT
        receipts: tuple[bytes, ...] = ()
        if request.replaces is not None:
            operation, receipts = MOVE, plan.replaced(request.replaces)
        at = self._at(request.now)
        shapes = (
            plan.shapes if plan.is_timeless else plan.shapes_at(self._server_time.now() if at < 0 else at)
        )
        costs = request.costs(len(keys))
        call = StateCall(keys, operation, at, costs, self._new_birth(), shapes, receipts, plan)
        return call, partial(plan.answer, request, call)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        """Encode a refund."""
        plan, keys, packed, costs, charged = self._tiers.own, [], [], [], []
        for shape, (key, receipt), units in given_back(plan.shapes.packed, receipts, cost):
            assert isinstance(key, bytes)
            keys.append(key)
            packed.append(shape)
            costs.append(units)
            charged.append(packed_receipt(receipt))
        if not keys:
            return None, _ignore
        shapes = plan.shapes._replace(packed=tuple(packed))
        at = self._at(now)
        return StateCall(tuple(keys), REFUND, at, tuple(costs), 0, shapes, tuple(charged), plan), _ignore

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        """Encode a reset of a key."""
        plan = self._tiers.own
        return StateCall(self._keys(key), RESET, SERVER_CLOCK, (), 0, plan.shapes, (), plan), _ignore

    def _at(self, now: int | None) -> int:
        if now is not None:
            return now
        return SERVER_CLOCK if self._clock is None else self._clock.now_us()


def _ignore(reply: Reply | None) -> None:
    """Decode a reply without content."""
