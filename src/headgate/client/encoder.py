"""Encode the calls of a limiter as requests to a server."""

from __future__ import annotations

import logging
from functools import partial
from operator import gt, sub
from types import NoneType
from typing import Any, TypeVar

from headgate.client.wire import (
    NOT_FOUND,
    Response,
    alone,
    hold_request,
    limiter_request,
    packed_quotas,
    read_decision,
    reading,
    success,
)
from headgate.costs import Cost, Costs, Units, check_whole
from headgate.decision import Decision
from headgate.errors import ConfigError
from headgate.keys import Key, key_picker, key_to_data
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Receipts
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

T = TypeVar("T")

_PATHS = {"hit": "hit", "peek": "check", "hold": "hold", "record": "record", "renew": "check"}
"""The name of each operation in the server's URLs."""


class Held:
    """A hold on the server.

    Attributes:
        hold: Its id.
        costs: The units charged to each rule.
    """

    __slots__ = ("costs", "hold")

    def __init__(self, hold: str, costs: tuple[int, ...]) -> None:
        self.hold = hold
        self.costs = costs


class LimiterEncoder:
    """Encodes the operations of a limiter's gate as requests to the server.

    The server decides by the rules of its own policy file. With the first decision, the names of its rules are compared
    with this limiter's; if they differ, no further request that charges is sent. If the policy changes later, the server's
    decisions are returned unchanged and the change is logged: a policy change must not break every client.

    Args:
        server: The server's name in messages.
        limiter: The limiter's name.
        rules: The limiter's rules as known to the client.
    """

    def __init__(self, server: str, limiter: str, rules: tuple[Rule, ...]) -> None:
        self._server = server
        self._limiter = limiter
        self._pick = key_picker(rules)
        self._rules = rules
        self._units = Units(limiter, rules)
        self._names = tuple(rule.name for rule in rules)
        self._is_checked = False
        self._mismatch: str | None = None
        self._read_decision = reading(server, self._decision)
        self._read_hold = reading(server, self._decision_and_hold)
        self._read_degraded = reading(server, lambda body: body["degraded"])
        self._read_nothing = reading(server, lambda body: None)

    def decide(self, request: Request) -> EncodedRequest[Answer]:
        """Return the encoded request and the function that reads its answer.

        Raises:
            ConfigError: The key does not fit the rules, the cost is not a whole number, or the server has other rules.
        """
        if self._mismatch is not None:
            raise ConfigError(self._mismatch)  # do not charge again by the wrong rules
        _check_time(request.now)
        self._check_cost(request.cost)
        self._pick(request.key)  # raises if the key does not fit, before anything is sent
        # The costs of a hold are equal for all rules with the same unit; those of a record above a hold are not.
        by_rule = request.operation == "record" and isinstance(request.cost, tuple)
        members = {
            "key": key_to_data(request.key),
            "cost": request.cost if by_rule else self._units.by_unit(request.cost),
            "tier": request.tier,
            "quota": packed_quotas(self._rules, request.quotas),
        }
        if self._units.has_penalties and not request.is_final:
            members["final"] = False  # older servers do not know it, so only with a penalty
        question = limiter_request(self._limiter, _PATHS[request.operation], members)
        if request.operation == "record":
            return question, self._read_recorded
        # The limiter may have only shadow rules, which are unknown to the client.
        costs = request.costs(len(self._rules) or 1)
        held = request.replaces[0][0] if request.replaces else None
        if request.operation == "renew" and isinstance(held, Held):
            return hold_request(held.hold, "renew", {}), partial(self._renewed, costs)
        if request.operation != "hold":
            return question, self._without_receipts
        if not isinstance(held, Held):
            return question, partial(self._with_receipts, costs)
        # If the server no longer has the hold, it takes the units again.
        anew = {**members, "cost": self._units.by_unit(held.costs), "limiter": self._limiter}
        confirmation = hold_request(held.hold, "confirm", {"cost": self._final(costs), "anew": anew})
        return confirmation, self._without_receipts

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        """Return the request that refunds units; no request if they do not belong to this hold."""
        _check_time(now)
        held = receipts[0][0]
        costs = cost if isinstance(cost, tuple) else (cost,) * len(receipts)
        if not isinstance(held, Held) or any(map(gt, costs, held.costs)):
            return None, _nothing
        final = self._final(tuple(map(sub, held.costs, costs)))
        return hold_request(held.hold, "settle", {"cost": final}), self._read_settled

    def _final(self, costs: tuple[int, ...]) -> Cost:
        """Return the final cost of a hold, without its places, which are released when it ends."""
        if len(set(costs)) == 1 and not self._units.has_places:
            return costs[0]
        every = zip(self._rules, costs, strict=True)
        return {rule.unit: cost for rule, cost in every if rule.is_rate}

    def _check_cost(self, cost: Costs) -> None:
        for units in cost if isinstance(cost, tuple) else (cost,):
            check_whole(units)

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        self._pick(key)
        request = limiter_request(self._limiter, "reset", {"key": key_to_data(key)})
        return alone(request), self._read_nothing  # needs a permission that a batch may lack

    def _without_receipts(self, response: Response) -> Answer:
        return self._read_decision(response), None

    def _with_receipts(self, costs: tuple[int, ...], response: Response) -> Answer:
        decision, hold = self._read_hold(response)
        return decision, None if hold is None else _receipts(Held(hold, costs), costs)

    def _renewed(self, costs: tuple[int, ...], response: Response) -> Answer:
        if response.status != NOT_FOUND:
            return self._read_hold(response)[0], None
        # The server no longer has the hold: its leases ended long ago.
        every = zip(self._rules, costs, strict=True)
        names = tuple(rule.name for rule in self._rules)
        return Decision.make(
            names, [(not cost, rule.quota.limit, 0, None, None) for rule, cost in every]
        ), None

    def _read_recorded(self, response: Response) -> Answer:
        return (RECORDED[0].as_degraded(), None) if self._read_degraded(response) else RECORDED

    def _read_settled(self, answer: Response) -> None:
        # The server no longer has the hold: its units have expired, so there is nothing to return.
        if answer.status != NOT_FOUND:
            success(self._server, answer)

    def _decision_and_hold(self, body: dict[str, Any]) -> tuple[Decision, str | None]:
        hold = body["hold"]
        if not isinstance(hold, (str, NoneType)):
            raise TypeError("the id of a hold must be text")
        return self._decision(body["decision"]), hold

    def _decision(self, body: dict[str, Any]) -> Decision:
        decision = read_decision(body)
        if decision.names != self._names or not self._is_checked:
            self._check_names(decision.names)
        return decision

    def _check_names(self, names: tuple[str, ...]) -> None:
        if names == self._names:
            self._is_checked = True
        elif self._is_checked:
            self._names = names
            logger.warning("%s: limiter %r now has the rules %s", self._server, self._limiter, _listed(names))
        else:
            self._mismatch = (
                f"limiter {self._limiter!r} has the rules {_listed(names)} on {self._server}, but "
                f"{_listed(self._names)} here; use store.limiter({self._limiter!r}) to get the server's rules"
            )
            raise ConfigError(self._mismatch)


def _receipts(held: Held, costs: tuple[int, ...]) -> Receipts:
    return tuple((held, (units,) if units else ()) for units in costs)


def _check_time(now: int | None) -> None:
    if now is not None:
        raise ConfigError("a server uses its own clock: leave out now= and clock=")


def _nothing(response: Response) -> None:
    """Ignore an answer that is not needed."""


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names)) or "(none)"
