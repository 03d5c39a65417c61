"""What is sent to the script and what it answers, as values: no connection, no clock.

`gate.lua` describes both. A request is the keys of its states and one packed argument; several requests travel in one call.
Numbers travel as doubles, which are exact for every number that Headgate counts with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from struct import Struct, unpack
from typing import Any, Literal

from headgate.algorithms import Algorithm, Calendar, Receipt, TokenBucket
from headgate.costs import Costs
from headgate.decision import Decision, Fields, decision_of
from headgate.errors import CostTooHigh
from headgate.keys import Key, PlainKey, check_plain, key_picker, storage_key, storage_prefix
from headgate.quota import MAX_UNITS
from headgate.rules import Rule
from headgate.stores.base import Answer, Births, Receipts, Tiers
from headgate.stores.redis.script import SHA, SOURCE
from headgate.stores.shapes import ServerTime, shape_of

Reply = Any
"""What the script answers to one request: packed verdicts, a number, or two; of a note its text."""

Tag = Literal["limiter", "key"]
"""What the states that lie in one slot of a cluster have in common."""

_HEAD = Struct("<BHddd")
_SHAPE = Struct("<Bdddd")
_OWN = Struct("<dB")
_SERVER_CLOCK = -1
_OWN_COSTS = -1
_OUTSIDE = "EDGES "
_VERDICT = Struct("<Bqqqq")
_ALLOWED, _RETRY_IS_KNOWN, _RESET_IS_KNOWN = 1, 2, 4


class Operation(IntEnum):
    """What a request asks for."""

    HIT = 1
    PEEK = 2
    HOLD = 3
    RECORD = 4
    REFUND = 5
    RESET = 6
    NOTE = 7


class ScriptCall:
    """One request as the script takes it.

    Attributes:
        keys: The keys of its states.
        body: Everything else.
        body_at: Returns the same with the windows of calendars around a time of the server's, if it has calendars and was
            made with those around another time.
    """

    __slots__ = ("body", "body_at", "keys")

    def __init__(
        self, keys: tuple[bytes, ...], body: bytes, body_at: Callable[[int], bytes] | None = None
    ) -> None:
        self.keys = keys
        self.body = body
        self.body_at = body_at

    def after(self, error: BaseException) -> ScriptCall | None:
        """Return what to send instead, once, if an error says that the server's time is in no window that was sent."""
        text = str(error)
        if self.body_at is None or not text.startswith(_OUTSIDE):
            return None
        return type(self)(self.keys, self.body_at(int(text.removeprefix(_OUTSIDE))))


def note(key: bytes, text: bytes, lasting_us: int) -> ScriptCall:
    """Return the request to keep a text for so long, unless there is one."""
    return ScriptCall((key,), _HEAD.pack(Operation.NOTE, 1, _SERVER_CLOCK, -(lasting_us // -1000), 0) + text)


def noted(key: bytes) -> ScriptCall:
    """Return the request for the text that is kept."""
    return ScriptCall((key,), _HEAD.pack(Operation.NOTE, 1, _SERVER_CLOCK, 0, 0))


def call_by_name(requests: Sequence[ScriptCall]) -> bytes:
    """Return the command that runs the script on these requests, ready to be sent."""
    return _call(_BY_NAME, requests)


def call_by_text(requests: Sequence[ScriptCall]) -> bytes:
    """Return the same for a server that does not have the script; it does afterwards."""
    return _call(_BY_TEXT, requests)


def command(*arguments: bytes) -> bytes:
    """Return any command, ready to be sent."""
    return b"*%d%b\r\n" % (len(arguments), _packed(arguments))


def _packed(arguments: Iterable[bytes]) -> bytes:
    """Return arguments of a command, without the end of the last line."""
    parts = []
    for argument in arguments:
        parts.append(_length(len(argument)))
        parts.append(argument)
    return b"".join(parts)


@lru_cache
def _length(length: int) -> bytes:
    """Return the end of a line and the line before an argument."""
    return b"\r\n$%d\r\n" % length


ASKING = command(b"ASKING")
"""The command that makes a cluster's node take one call for a slot that is just moving to it."""

_BY_NAME, _BY_TEXT = _packed([b"EVALSHA", SHA]), _packed([b"EVAL", SOURCE])


def _call(opening: bytes, requests: Sequence[ScriptCall]) -> bytes:
    keys = [key for request in requests for key in request.keys]
    arguments = [b"%d" % len(keys), *keys, *[request.body for request in requests]]
    return b"*%d%b%b\r\n" % (2 + len(arguments), opening, _packed(arguments))


class Keys:
    """Where the states of a limiter's rules are.

    Args:
        limiter: The limiter's name.
        rules: Its rules.
        namespace: What comes before it.
        tag: In a cluster, what decides the slot. It comes first in the name of a state, so that no braces in the text
            of a key can choose another one.
    """

    def __init__(self, limiter: str, rules: tuple[Rule, ...], namespace: str, tag: Tag | None = None) -> None:
        self._pick = key_picker(rules)
        self._prefixes = tuple(storage_prefix(namespace, limiter, rule) for rule in rules)
        self._tag_key = blake2b(f"{len(namespace)}:{namespace}{limiter}".encode(), digest_size=32).digest()
        self.of: Callable[[Key | None], tuple[bytes, ...]] = self._picked
        if tag == "limiter":
            brace = b"{%b}" % self._tag_key[:8].hex().encode()
            self._prefixes = tuple(brace + prefix for prefix in self._prefixes)
        if tag == "key":
            self.of = self._tagged
        elif all(rule.scope is None for rule in rules):
            self.of = self._plain

    def _picked(self, key: Key | None) -> tuple[bytes, ...]:
        return tuple(map(storage_key, self._prefixes, self._pick(key)))

    def _plain(self, key: Key | None) -> tuple[bytes, ...]:
        """As `_picked` where all rules count by the plain key, and quicker."""
        end = storage_key(b"", check_plain(key))
        return tuple([prefix + end for prefix in self._prefixes])

    def _tagged(self, key: Key | None) -> tuple[bytes, ...]:
        picked = self._pick(key)
        return tuple(
            self._brace(k) + storage_key(prefix, k) for prefix, k in zip(self._prefixes, picked, strict=True)
        )

    def _brace(self, key: PlainKey) -> bytes:
        raw = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
        return b"{%b}" % blake2b(raw, digest_size=8, key=self._tag_key).hexdigest().encode()


def plans(rules: tuple[Rule, ...], time: ServerTime | None = None) -> Tiers[RedisPlan]:
    """Return the plans of a limiter's rules by tier, and by quotas of a call's own."""
    names, new_birth = tuple(rule.name for rule in rules), Births()
    server_time = time or ServerTime()
    return Tiers(rules, lambda algorithms: RedisPlan(names, algorithms, new_birth, server_time), shared=True)


class RedisPlan:
    """Some rules as they are for one tier: how they are asked and how their replies are read."""

    def __init__(
        self,
        names: tuple[str, ...],
        algorithms: tuple[Algorithm, ...],
        new_birth: Births,
        time: ServerTime,
    ) -> None:
        self.names = names
        self.algorithms = algorithms
        self._size = len(algorithms)
        self._new_birth = new_birth
        self._time = time
        self._has_calendars = any(isinstance(algorithm, Calendar) for algorithm in algorithms)
        self._shapes = self._shapes_at(0)
        self._scales = [(a.capacity, a.tick if isinstance(a, TokenBucket) else 1) for a in algorithms]

    def part(self, indices: Sequence[int]) -> RedisPlan:
        """Return the plan of some of these rules."""
        return RedisPlan(
            tuple(self.names[i] for i in indices),
            tuple(self.algorithms[i] for i in indices),
            self._new_birth,
            self._time,
        )

    def ask(
        self,
        operation: Operation,
        keys: tuple[bytes, ...],
        cost: Costs,
        now: int | None,
        replaces: Receipts | None = None,
    ) -> ScriptCall:
        """Return the request for a decision, or to record."""
        at = _SERVER_CLOCK if now is None else now
        if type(cost) is int:
            more = b""
        elif not replaces and len(set(cost)) == 1:  # type: ignore[arg-type]  # it is no number, so it is several
            cost, more = cost[0], b""  # type: ignore[index]
        else:
            cost, more = _OWN_COSTS, self._own(cost, replaces)  # type: ignore[arg-type]
        head = _HEAD.pack(operation, self._size, at, cost, self._new_birth())
        if not self._has_calendars:
            return ScriptCall(keys, head + self._shapes + more)
        if now is not None:
            return ScriptCall(keys, head + self._shapes_at(now) + more)

        def body_at(server_now: int) -> bytes:
            self._time.correct(server_now)
            return head + self._shapes_at(server_now) + more

        return ScriptCall(keys, head + self._shapes_at(self._time.now()) + more, body_at)

    def refund(self, receipts: Receipts, costs: tuple[int, ...], now: int | None) -> ScriptCall:
        """Return the request to give back units of a hold, of each rule so many."""
        at = _SERVER_CLOCK if now is None else now
        head = _HEAD.pack(Operation.REFUND, self._size, at, _OWN_COSTS, 0)
        keys: Any = tuple(key for key, _ in receipts)  # a receipt of ours has bytes
        return ScriptCall(keys, head + self._shapes + self._own(costs, receipts))

    def _own(self, costs: tuple[int, ...], receipts: Receipts | None) -> bytes:
        """Return what each rule has of its own: its cost, and the receipt of what is given back."""
        return b"".join(
            _OWN.pack(cost, len(receipt)) + Struct(f"<{len(receipt)}d").pack(*receipt)
            for cost, (_, receipt) in zip(costs, receipts or ((None, ()),) * self._size, strict=True)
        )

    def _shapes_at(self, now: int) -> bytes:
        """Return kind and shape of all rules, with the windows of calendars around a time."""
        return b"".join(_SHAPE.pack(*shape_of(algorithm, now)[0]) for algorithm in self.algorithms)

    def reset(self, keys: tuple[bytes, ...]) -> ScriptCall:
        """Return the request to forget what was counted."""
        return ScriptCall(keys, _HEAD.pack(Operation.RESET, len(keys), _SERVER_CLOCK, 0, 0))

    def answer(self, reply: Reply) -> Answer:
        """Return what the reply to a hit or a peek says."""
        return self.decision(reply), None

    def hold(self, keys: tuple[bytes, ...], cost: Costs, reply: Reply) -> Answer:
        """Return what the reply to a hold says."""
        return self.decision(reply), self.receipts(keys, reply, cost)

    def decision(self, reply: Reply) -> Decision:
        """Return the decision in a reply."""
        return decision_of(self.names, tuple(self.verdicts(reply)))

    def verdicts(self, reply: Reply) -> list[Fields]:
        """Return what each rule says in a reply."""
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
        return verdicts

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
            else:
                own, numbers = numbers[:2], numbers[2:]
                receipts.append((key, (*own, units)))
        return tuple(receipts)

    def costs(self, cost: Costs) -> tuple[int, ...]:
        """Return the cost for each rule."""
        return cost if isinstance(cost, tuple) else (cost,) * self._size

    def check_recorded(self, reply: Reply, cost: Costs) -> None:
        """Raise CostTooHigh if units could not be recorded because the count would leave the exact range."""
        if reply == 0:
            return
        number, count = reply
        algorithm = self.algorithms[number - 1]
        parts = algorithm.d if isinstance(algorithm, TokenBucket) else 1
        raise CostTooHigh(self.costs(cost)[number - 1], max(0, MAX_UNITS - count) // parts, algorithm.name)
