"""What is sent to the database and what it answers, as values: no connection, no clock.

`sql/schema.sql` describes both. A request about one key that decides goes to `headgate_one_v2`; any other, or several
together, to `headgate_many_v2`, where all that is not a key is one array of whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

from headgate.algorithms import Algorithm, FixedWindow, Receipt, SlidingWindow, TokenBucket
from headgate.clock import Clock
from headgate.costs import Costs
from headgate.decision import Decision, Verdict, decision_of
from headgate.errors import CostTooHigh, StoreConflict
from headgate.keys import Key, key_picker, storage_key, storage_prefix
from headgate.quota import MAX_UNITS
from headgate.rules import RATES, Rule
from headgate.stores.base import (
    RECORDED,
    Answer,
    Receipts,
    births,
    check_kinds,
    check_whole,
    plain_cost,
    plain_tiers,
)
from headgate.stores.request import Request

PEEK, HIT, RECORD, REFUND, RESET = range(5)
"""What a request asks for."""

_OPERATIONS = {"hit": HIT, "peek": PEEK, "hold": HIT, "record": RECORD}

PER_RULE = 9
"""Numbers in a reply for each rule of a request that decides."""

BIRTH = 4
"""Which of them is the birth of the state."""

PER_RECEIPT = 8
"""Numbers in a refund for each receipt, before the units that it is for."""

Reply = Sequence[int]
Arguments = list[bytes | None]

_SERVER_CLOCK = -1
_ADMITTED, _NEVER, _UNCOUNTABLE, _NOT_OURS = -1, -2, -3, -4

# Arrays as PostgreSQL writes them: dimensions, has nulls, type of the elements, how many, number of the first; then the
# elements, each with its length before it.
_ARRAY_HEAD = Struct(">iiiii")
_BYTEA, _BIGINT = 17, 20
_LENGTH = Struct(">i")
_NUMBER = Struct(">iq")
_FIVE_NUMBERS = Struct(">iqiqiqiqiq")


class StateCall(NamedTuple):
    """One request: where its states are, and what is asked of them."""

    keys: tuple[bytes, ...]
    operation: int
    at: int
    cost: int
    birth: int
    rules: tuple[bytes, ...]
    """What follows each key in the program."""
    plan: Plan

    @property
    def is_single(self) -> bool:
        """Whether `headgate_one_v2` can answer it."""
        return len(self.keys) == 1 and self.operation <= RECORD

    def new_states(self, reply: Reply) -> int:
        """Return how many of the states that a reply speaks of were fresh before."""
        if self.operation not in (HIT, RECORD):
            return 0
        return reply[BIRTH::PER_RULE].count(self.birth)


class NoteCall(NamedTuple):
    """A note to be kept, or, without a text, to be looked up."""

    key: bytes
    text: bytes | None = None
    lasting_us: int = 0

    def arguments(self, durable: bytes) -> Arguments:
        """Return the arguments of `headgate_note_v1`."""
        return [self.key, self.text, b"%d" % self.lasting_us, durable]


def one(request: StateCall, durable: bytes) -> Arguments:
    """Return the arguments of `headgate_one_v2`."""
    _, operation, at, cost, birth, _, plan = request
    numbers = (b"%d" % at, b"%d" % cost, b"%d" % birth)
    return [request.keys[0], b"%d" % operation, *plan.arguments, *numbers, durable]


def many(requests: Sequence[StateCall], durable: bytes) -> Arguments:
    """Return the arguments of `headgate_many_v2`."""
    written = sorted({key for request in requests if request.operation != PEEK for key in request.keys})
    places = {key: place for place, key in enumerate(written, 1)}
    for request in requests:
        if request.operation == PEEK:
            for key in request.keys:
                places.setdefault(key, len(places) + 1)
    program = b"".join([_program(request, places) for request in requests])
    head = _ARRAY_HEAD.pack(1, 0, _BIGINT, len(program) // _NUMBER.size, 1)
    return [_array(places), b"%d" % len(written), head + program, durable]


def split(requests: Sequence[StateCall], reply: Reply) -> list[Reply]:
    """Return the part of a reply that belongs to each request."""
    parts, start = [], 0
    for request in requests:
        end = start + (PER_RULE * len(request.keys) if request.operation <= RECORD else 0)
        parts.append(reply[start:end])
        start = end
    return parts


def numbers(value: bytes | None) -> Reply:
    """Return the whole numbers in a reply; none if there was nothing to say."""
    return _reader((len(value) - _ARRAY_HEAD.size) // _NUMBER.size).unpack(value) if value else ()


@cache
def _reader(count: int) -> Struct:
    return Struct(f">{_ARRAY_HEAD.size}x" + "4xq" * count)


def _program(request: StateCall, places: dict[bytes, int]) -> bytes:
    keys, operation, at, cost, birth, rules, _ = request
    parts = [_FIVE_NUMBERS.pack(8, operation, 8, at, 8, cost, 8, birth, 8, len(keys))]
    for key, rule in zip(keys, rules, strict=True):
        parts += _NUMBER.pack(8, places[key]), rule
    return b"".join(parts)


def _array(keys: Iterable[bytes]) -> bytes:
    elements = [_LENGTH.pack(len(key)) + key for key in keys]
    return _ARRAY_HEAD.pack(1, 0, _BYTEA, len(elements), 1) + b"".join(elements)


def _packed(numbers: Iterable[int]) -> bytes:
    return b"".join([_NUMBER.pack(8, number) for number in numbers])


class Codec:
    """The requests of a limiter's rules."""

    def __init__(
        self, limiter: str, rules: tuple[Rule, ...], namespace: str, clock: Clock | None = None
    ) -> None:
        check_kinds(rules, RATES, "a PostgreSQL store")
        tiers = plain_tiers(rules)
        names = tuple(rule.name for rule in rules)
        self._own = Plan(names, tiers.of(None))
        self._by_tier = {tier: Plan(names, tiers.of(tier)) for rule in rules for tier in rule.tiers}
        self._tiers = tiers
        self._clock = clock
        self._pick = key_picker(rules)
        self._prefixes = tuple(storage_prefix(namespace, limiter, rule) for rule in rules)
        self._is_plain = [rule.scope for rule in rules] == [None]
        self._new_birth = births()

    def ask(self, request: Request) -> StateCall:
        """Return the call for a request; a cost of 0 is only looked at.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
            CostTooHigh: No waiting would ever admit it.
        """
        cost, tier, now = request.cost, request.tier, request.now
        plan = self._own if tier is None else self._by_tier.get(tier, self._own)
        operation = _OPERATIONS[request.operation]
        if cost.__class__ is not int or not 0 < cost <= plan.most:
            check_whole(cost)
            self._tiers.for_request(request)
            operation = operation if cost else PEEK
        at = _SERVER_CLOCK if now is None and self._clock is None else self._at(now)
        return StateCall(self._keys(request.key), operation, at, cost, self._new_birth(), plan.shapes, plan)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> StateCall:
        """Return the request to give back units of a hold."""
        keys, rules = [], []
        for (key, receipt), shape in zip(receipts, self._own.shapes, strict=True):
            assert isinstance(key, bytes)
            *charged, held = receipt
            padding = [0] * (PER_RECEIPT - len(charged))
            keys.append(key)
            rules.append(shape + _packed([*charged, *padding, held]))
        return StateCall(tuple(keys), REFUND, self._at(now), plain_cost(cost), 0, tuple(rules), self._own)

    def reset(self, key: Key | None) -> StateCall:
        """Return the request to forget what was counted."""
        keys = self._keys(key)
        return StateCall(keys, RESET, _SERVER_CLOCK, 0, 0, (b"",) * len(keys), self._own)

    def _at(self, now: int | None) -> int:
        if now is not None:
            return now
        return _SERVER_CLOCK if self._clock is None else self._clock.now_us()

    def _keys(self, key: Key | None) -> tuple[bytes, ...]:
        if self._is_plain and isinstance(
            key, str
        ):  # by far the most common, so it gets there by the shortest way
            return (storage_key(self._prefixes[0], key),)
        return tuple(map(storage_key, self._prefixes, self._pick(key)))


class Plan:
    """The rules of a limiter as they are for one tier: how they are asked and how their replies are read."""

    def __init__(self, names: tuple[str, ...], algorithms: tuple[Algorithm, ...]) -> None:
        shapes = [_shape(algorithm) for algorithm in algorithms]
        self.algorithms = algorithms
        self.shapes = tuple(_packed(shape) for shape in shapes)
        """What follows each key in the program."""
        self.arguments = [b"%d" % number for number in shapes[0]] if shapes else []
        """The same of the first rule, as `headgate_one_v2` takes it."""
        capacities = [algorithm.capacity for algorithm in algorithms if algorithm.capacity]
        self.most = min(capacities, default=MAX_UNITS)
        """The highest cost that can be asked for."""
        self._names = names
        self._limits = tuple(0 if _is_off(algorithm) else algorithm.capacity for algorithm in algorithms)
        self._off = tuple(_is_off(algorithm) for algorithm in algorithms)

    def answer(self, request: Request, call: StateCall, reply: Reply) -> Answer:
        """Return what a reply says to a request.

        Raises:
            CostTooHigh: What was to be recorded would have left the exact range.
            StoreConflict: Something else is stored under a key of ours.
        """
        if request.operation == "record":
            if request.cost:
                self.check_recorded(reply, request.cost)
            return RECORDED
        receipts = self.receipts(call, reply) if request.operation == "hold" else None
        return self.decision(reply, request.cost), receipts

    def decision(self, reply: Reply, cost: int) -> Decision:
        """Return the decision in a reply.

        Raises:
            StoreConflict: Something else is stored under a key of ours.
        """
        retry_after, left, reset_after, reset_if_charged = reply[:4]
        if len(reply) > PER_RULE or retry_after == _NOT_OURS or self._off[0]:
            return Decision.make(self._names, self._verdicts(reply, cost))
        figures = (
            (True, self._limits[0], left - cost, None, reset_if_charged)
            if retry_after == _ADMITTED
            else (False, self._limits[0], left, None if retry_after == _NEVER else retry_after, reset_after)
        )
        return decision_of(self._names, (figures,))

    def receipts(self, request: StateCall, reply: Reply) -> Receipts | None:
        """Return the receipts of a hold, or `None` if nothing was charged."""
        if request.operation != HIT or any(answer != _ADMITTED for answer in reply[::PER_RULE]):
            return None
        receipts: list[tuple[object, Receipt]] = []
        for i, (key, algorithm) in enumerate(zip(request.keys, self.algorithms, strict=True)):
            place = i * PER_RULE + BIRTH
            if isinstance(algorithm, TokenBucket):
                shape = (algorithm.n, algorithm.d, algorithm.burst)
                receipts.append((key, (*reply[place : place + 5], *shape, request.cost)))
            else:
                receipts.append((key, (*reply[place : place + 2], request.cost)))
        return tuple(receipts)

    def check_recorded(self, reply: Reply, cost: int) -> None:
        """Raise if units could not be recorded.

        Raises:
            CostTooHigh: The count would have left the exact range.
            StoreConflict: Something else is stored under a key of ours.
        """
        for i, algorithm in enumerate(self.algorithms):
            answer, room = reply[i * PER_RULE : i * PER_RULE + 2]
            if answer == _UNCOUNTABLE:
                raise CostTooHigh(cost, room, algorithm.name)
            self._check_ours(answer, i)

    def _verdicts(self, reply: Reply, cost: int) -> list[Verdict]:
        admitted = all(answer == _ADMITTED for answer in reply[::PER_RULE])
        verdicts = []
        for i, limit in enumerate(self._limits):
            place = i * PER_RULE
            retry_after, left, reset_after, reset_if_charged = reply[place : place + 4]
            self._check_ours(retry_after, i)
            if admitted:
                left, reset_after = left - cost, reset_if_charged
            verdicts.append(
                Verdict(
                    retry_after == _ADMITTED,
                    limit,
                    left,
                    None if retry_after in (_ADMITTED, _NEVER) else retry_after,
                    None if self._off[i] else reset_after,
                )
            )
        return verdicts

    def _check_ours(self, answer: int, i: int) -> None:
        if answer == _NOT_OURS:
            raise StoreConflict(f"a row of headgate_states is not a state of rule {self._names[i]!r}")


def _is_off(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, TokenBucket) and not algorithm.n


def _shape(algorithm: Algorithm) -> tuple[int, int, int, int, int]:
    """Return the kind of an algorithm in the database, and its numbers."""
    match algorithm:
        case FixedWindow(_, limit, period):
            return 1, limit, period, 0, 0
        case SlidingWindow(_, limit, width, lifetime):
            return 2, limit, width, lifetime, 0
        case TokenBucket(_, burst, n, d, tick):
            return 3, burst, n, d, tick
    raise AssertionError(f"no function for {algorithm!r}")
