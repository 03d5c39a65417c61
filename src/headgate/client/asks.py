"""What a limiter asks of a server."""

from __future__ import annotations

import logging
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from headgate.client.wire import (
    NOT_FOUND,
    Response,
    alone,
    limiter_request,
    packed_key,
    read_decision,
    reading,
    settle_request,
    success,
)
from headgate.costs import Costs
from headgate.decision import Decision
from headgate.errors import ConfigError
from headgate.keys import Key, key_picker
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Receipts, check_whole, plain_cost
from headgate.stores.remote.gates import Ask
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

T = TypeVar("T")

_PATHS = {"hit": "hit", "peek": "check", "hold": "hold", "record": "record"}
"""What each operation is called in the server's addresses."""


class Held(NamedTuple):
    """Where units are held: under this id, on the server."""

    hold: str
    cost: int


class LimiterAsks:
    """The operations of a limiter's gate, as what is to be asked of the server.

    The server decides by the rules of its own policy file. That they are those of this limiter is checked by their names,
    with the first decision; if they are not, nothing that charges is sent any more. When the policy is changed later, the
    server's decisions are passed on as they are, and that is logged: a change there must not break every process here.

    Args:
        server: What the server is called in messages.
        limiter: The limiter's name.
        rules: Its rules, as they are believed to be.
    """

    def __init__(self, server: str, limiter: str, rules: tuple[Rule, ...]) -> None:
        self._server = server
        self._limiter = limiter
        self._pick = key_picker(rules)
        self._names = tuple(rule.name for rule in rules)
        self._is_checked = False
        self._mismatch: str | None = None
        self._read_decision = reading(server, self._decision)
        self._read_hold = reading(server, self._decision_and_hold)
        self._read_nothing = reading(server, lambda body: None)

    def ask(self, request: Request) -> Ask[Answer]:
        """Return what answers a request.

        Raises:
            ConfigError: The key does not fit the rules, the cost is not a whole number, or the server has other rules.
        """
        if self._mismatch is not None:
            raise ConfigError(self._mismatch)  # before it charges once more by rules that are not meant here
        _check_time(request.now)
        check_whole(request.cost)
        self._pick(request.key)  # says what is wrong with it, before anything is sent
        members = {"key": packed_key(request.key), "cost": request.cost, "tier": request.tier}
        question = limiter_request(self._limiter, _PATHS[request.operation], members)
        if request.operation == "record":
            return Ask(question, self._read_recorded)
        read = (
            partial(self._with_receipts, request.cost)
            if request.operation == "hold"
            else self._without_receipts
        )
        return Ask(question, read)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> Ask[None]:
        """Return what gives units back; nothing is asked if they do not belong to this hold."""
        _check_time(now)
        held, units = receipts[0][0], plain_cost(cost)
        if not isinstance(held, Held) or units > held.cost:
            return Ask(None, _nothing)
        return Ask(settle_request(held.hold, held.cost - units), self._read_settled)

    def reset(self, key: Key | None) -> Ask[None]:
        self._pick(key)
        request = limiter_request(self._limiter, "reset", {"key": packed_key(key)})
        return Ask(alone(request), self._read_nothing)  # it takes a permission that a batch need not have

    def _without_receipts(self, response: Response) -> Answer:
        return self._read_decision(response), None

    def _with_receipts(self, cost: int, response: Response) -> Answer:
        decision, hold = self._read_hold(response)
        return decision, None if hold is None else ((Held(hold, cost), ()),)

    def _read_recorded(self, response: Response) -> Answer:
        self._read_nothing(response)
        return RECORDED

    def _read_settled(self, answer: Response) -> None:
        if (
            answer.status != NOT_FOUND
        ):  # forgotten there: its units have expired, so there is nothing to give back
            success(self._server, answer)

    def _decision_and_hold(self, body: dict[str, Any]) -> tuple[Decision, str | None]:
        hold = body["hold"]
        if not isinstance(hold, (str, NoneType)):
            raise TypeError("the id of a hold is a text")
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
                f"{_listed(self._names)} here; let store.limiter({self._limiter!r}) ask for them"
            )
            raise ConfigError(self._mismatch)


def _check_time(now: int | None) -> None:
    if now is not None:
        raise ConfigError("a server decides by its own time: leave out now= and clock=")


def _nothing(response: Response) -> None:
    """Read what was not asked for."""


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names)) or "(none)"
