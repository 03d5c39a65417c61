"""Encoding of calls of the script `gate.lua` and decoding of its replies; no I/O and no clock.

`gate.lua` describes the format. A call has the keys of its states and one packed argument; one command carries several
calls. Numbers are sent as doubles, which represent every number exactly that Headgate counts with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import lru_cache
from struct import Struct, unpack
from typing import Any

from headgate.algorithms import Algorithm, Calendar, Penalty, Receipt, TokenBucket, limit_of
from headgate.costs import Costs
from headgate.decision import Fields, decision_of
from headgate.errors import CostTooHigh
from headgate.quota import MAX_UNITS
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Births, Receipts, Tiers
from headgate.stores.port_parameters import ServerTime, port_parameters
from headgate.stores.redis.script import SHA, SOURCE

Reply = Any
"""The script's reply to one call: packed verdicts, one or two numbers, or the text of a note."""

_HEAD = Struct("<BHddd")
_RULE = Struct("<Bdddd")
_OWN = Struct("<dB")
_SERVER_CLOCK = -1
_OWN_COSTS = -1
_OUTSIDE = "EDGES "
_VERDICT = Struct("<Bqqqq")
_ALLOWED, _RETRY_IS_KNOWN, _RESET_IS_KNOWN = 1, 2, 4


class Operation(IntEnum):
    """Operations of the script."""

    QUEUE = 0
    HIT = 1
    PEEK = 2
    HOLD = 3
    RECORD = 4
    REFUND = 5
    RESET = 6
    NOTE = 7
    FINAL_HIT = 8
    FINAL_HOLD = 10


class ScriptCall:
    """One call of the script.

    Attributes:
        keys: The keys of its states.
        body: The packed argument.
        body_at: Returns the argument with the calendar windows around another time; `None` if the windows must not change.
    """

    __slots__ = ("body", "body_at", "keys")

    def __init__(
        self, keys: tuple[bytes, ...], body: bytes, body_at: Callable[[int], bytes] | None = None
    ) -> None:
        self.keys = keys
        self.body = body
        self.body_at = body_at

    def after(self, error: BaseException) -> ScriptCall | None:
        """Return the call to send instead, once, if the server's time was outside of the calendar windows sent."""
        text = str(error)
        if self.body_at is None or not text.startswith(_OUTSIDE):
            return None
        return type(self)(self.keys, self.body_at(int(text.removeprefix(_OUTSIDE))))


def note(key: bytes, text: bytes, lasting_us: int, replaced: bytes | None) -> ScriptCall:
    """Return the call that stores a note for at least `lasting_us`, unless there is one other than `replaced`."""
    old = -1 if replaced is None else len(replaced)
    head = _HEAD.pack(Operation.NOTE, 1, _SERVER_CLOCK, -(lasting_us // -1000), old)
    return ScriptCall((key,), head + (replaced or b"") + text)


def get_note(key: bytes) -> ScriptCall:
    """Return the call that reads a note."""
    return ScriptCall((key,), _HEAD.pack(Operation.NOTE, 1, _SERVER_CLOCK, 0, 0))


def queue_call(queue: bytes, ticket: str, priority: int, lasting_us: int) -> ScriptCall:
    """Return the call that enters a queue or stays in it; with a lifetime of 0, it leaves."""
    head = _HEAD.pack(Operation.QUEUE, 1, _SERVER_CLOCK, -(lasting_us // -1000), priority)
    return ScriptCall((queue,), head + ticket.encode())


def reset(keys: tuple[bytes, ...]) -> ScriptCall:
    """Return the call that deletes states."""
    return ScriptCall(keys, _HEAD.pack(Operation.RESET, len(keys), _SERVER_CLOCK, 0, 0))


def refund(charged: Iterable[tuple[Algorithm, tuple[object, Receipt], int]], now: int | None) -> ScriptCall:
    """Return the call that gives units back; `charged` has each rule, its receipt and its units."""
    algorithms, receipts, units = zip(*charged, strict=True)
    at = _SERVER_CLOCK if now is None else now
    head = _HEAD.pack(Operation.REFUND, len(units), at, _OWN_COSTS, 0)
    rules = b"".join(_packed_rule(algorithm, 0) for algorithm in algorithms)
    keys = tuple(key for key, _ in receipts)
    return ScriptCall(keys, head + rules + b"".join(map(_packed_cost, units, receipts)))


def _packed_rule(algorithm: Algorithm, now: int) -> bytes:
    """Return the parameters of a rule, with the windows of a calendar around a time."""
    return _RULE.pack(*port_parameters(algorithm, now)[0])


def _packed_cost(cost: int, entry: tuple[object, Receipt]) -> bytes:
    """Return the cost of a rule, and its receipt if units are given back."""
    receipt = entry[1]
    return _OWN.pack(cost, len(receipt)) + Struct(f"<{len(receipt)}d").pack(*receipt)


def command(*arguments: bytes) -> bytes:
    """Return a command in Redis's protocol."""
    return b"*%d%b\r\n" % (len(arguments), _packed(arguments))


def script_command(opening: bytes, calls: Iterable[ScriptCall]) -> bytes:
    """Return the command that runs the script on some calls; it begins with `BY_SHA` or `BY_SOURCE`."""
    keys: list[bytes] = []
    bodies = []
    for call in calls:
        keys += call.keys
        bodies.append(call.body)
    return b"*%d%b%b\r\n" % (
        3 + len(keys) + len(bodies),
        opening,
        _packed((b"%d" % len(keys), *keys, *bodies)),
    )


def _packed(arguments: Iterable[bytes]) -> bytes:
    """Return arguments of a command, without the end of the last line."""
    parts = []
    for argument in arguments:
        parts.append(_length(len(argument)))
        parts.append(argument)
    return b"".join(parts)


@lru_cache
def _length(length: int) -> bytes:
    """Return the end of a line, and the length of the argument on the next line."""
    return b"\r\n$%d\r\n" % length


BY_SHA = _packed([b"EVALSHA", SHA])
"""The opening of a command for a server that has the script."""

BY_SOURCE = _packed([b"EVAL", SOURCE])
"""The opening of a command that also loads the script."""

ASKING = command(b"ASKING")
"""The command that makes a node of a cluster accept one call for a slot that is being moved to it."""


def plans(rules: tuple[Rule, ...], time: ServerTime | None = None) -> Tiers[RedisPlan]:
    """Return the plans of a limiter's rules, by tier and by quotas given in a call."""
    names, new_birth = tuple(rule.name for rule in rules), Births()
    server_time = time or ServerTime()
    return Tiers(rules, lambda algorithms: RedisPlan(names, algorithms, new_birth, server_time), shared=True)


class RedisPlan:
    """Encodes calls and decodes replies for some rules with the quotas of one tier."""

    def __init__(
        self,
        names: tuple[str, ...],
        algorithms: tuple[Algorithm, ...],
        new_birth: Births,
        time: ServerTime,
    ) -> None:
        self._names = names
        self.algorithms = algorithms
        self._size = len(algorithms)
        self._new_birth = new_birth
        self._time = time
        self._has_calendars = any(isinstance(algorithm, Calendar) for algorithm in algorithms)
        self._rules = self._rules_at(0)
        self._scales = [(limit_of(a), a.tick if isinstance(a, TokenBucket) else 1) for a in algorithms]

    def decide(
        self,
        operation: Operation,
        keys: tuple[bytes, ...],
        cost: Costs,
        now: int | None,
        replaces: Receipts | None = None,
    ) -> ScriptCall:
        """Return the call for a decision, or to record."""
        at = _SERVER_CLOCK if now is None else now
        if type(cost) is int:
            more = b""
        elif not replaces and len(set(cost)) == 1:  # type: ignore[arg-type]  # it is a tuple
            cost, more = cost[0], b""  # type: ignore[index]
        else:
            own = replaces or ((None, ()),) * self._size
            cost, more = _OWN_COSTS, b"".join(map(_packed_cost, cost, own))  # type: ignore[call-overload]
        head = _HEAD.pack(operation, self._size, at, cost, self._new_birth())
        if not self._has_calendars:
            return ScriptCall(keys, head + self._rules + more)
        if now is not None:
            return ScriptCall(keys, head + self._rules_at(now) + more)

        def body_at(server_now: int) -> bytes:
            self._time.correct(server_now)
            return head + self._rules_at(server_now) + more

        return ScriptCall(keys, head + self._rules_at(self._time.now()) + more, body_at)

    def _rules_at(self, now: int) -> bytes:
        """Return the parameters of all rules, with the windows of calendars around a time."""
        return b"".join(_packed_rule(algorithm, now) for algorithm in self.algorithms)

    def answer(self, reply: Reply) -> Answer:
        """Decode the reply to a hit, a peek or a renewal."""
        return decision_of(self._names, self.verdicts(reply)), None

    def hold(self, keys: tuple[bytes, ...], cost: Costs, reply: Reply) -> Answer:
        """Decode the reply to a hold."""
        return decision_of(self._names, self.verdicts(reply)), self.receipts(keys, reply, cost)

    def recorded(self, cost: Costs, reply: Reply) -> Answer:
        """Decode the reply to a record.

        Raises:
            CostTooHigh: The count would leave the exact range.
        """
        if reply == 0:
            return RECORDED
        number, count = reply
        algorithm = self.algorithms[number - 1]
        parts = algorithm.d if isinstance(algorithm, TokenBucket) else 1
        raise CostTooHigh(self.costs(cost)[number - 1], max(0, MAX_UNITS - count) // parts, algorithm.name)

    def verdicts(self, reply: Reply) -> tuple[Fields, ...]:
        """Decode the verdict of each rule."""
        verdicts: list[Fields] = []
        place = 0
        for limit, tick in self._scales:
            flags, remaining, retry_after, reset_after, lag = _VERDICT.unpack_from(reply, place)
            place += _VERDICT.size
            verdicts.append(
                (
                    flags & _ALLOWED > 0,
                    limit,
                    remaining,
                    retry_after * tick + lag if flags & _RETRY_IS_KNOWN else None,
                    (reset_after * tick + lag if reset_after else 0) if flags & _RESET_IS_KNOWN else None,
                )
            )
        return tuple(verdicts)

    def receipts(self, keys: tuple[bytes, ...], reply: Reply, cost: Costs) -> Receipts | None:
        """Return the receipts of a hold, or `None` if nothing was charged."""
        rest = reply[self._size * _VERDICT.size :]
        if not rest:
            return None
        numbers = unpack(f"<{len(rest) // 8}q", rest)
        receipts: list[tuple[object, Receipt]] = []
        for key, algorithm, units in zip(keys, self.algorithms, self.costs(cost), strict=True):
            if not units:
                receipts.append((key, ()))
            elif isinstance(algorithm, TokenBucket):
                own, numbers = numbers[:5], numbers[5:]
                receipts.append((key, (*own, algorithm.n, algorithm.d, algorithm.burst, units)))
            elif isinstance(algorithm, Penalty):
                receipts.append((key, ()))
            else:
                own, numbers = numbers[:2], numbers[2:]
                receipts.append((key, (*own, units)))
        return tuple(receipts)

    def costs(self, cost: Costs) -> tuple[int, ...]:
        """Return the cost for each rule."""
        return cost if isinstance(cost, tuple) else (cost,) * self._size
