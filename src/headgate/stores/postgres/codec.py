"""Encoding of requests to the database and of its replies; no I/O.

`sql/migrations/0001_create_tables.sql` describes both. A single request that decides one key is sent to
`headgate_one_v2`; any other, or a batch, to `headgate_many_v3`, with everything but the keys in one array of integers.

A request with a calendar rule contains the windows around the time that the server probably has. If the server's time is
outside of them, it changes nothing and says so, and the request is sent again with other windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from struct import Struct
from typing import NamedTuple

from headgate.algorithms import Algorithm, Calendar, Receipt, TokenBucket
from headgate.clock import Clock
from headgate.costs import Costs
from headgate.decision import Decision, Fields, decision_of
from headgate.errors import CostTooHigh, StoreConflict
from headgate.keys import Key, check_plain, key_picker, storage_key, storage_prefix
from headgate.quota import MAX_UNITS
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Births, Receipts, Tiers, given_back
from headgate.stores.request import Request
from headgate.stores.shapes import ServerTime, shape_of

PEEK, HIT, RECORD, REFUND, RESET, MOVE = range(6)
"""Operations; a move is a hold that replaces another, or a renewal."""

_OPERATIONS = {"hit": HIT, "peek": PEEK, "hold": HIT, "record": RECORD, "renew": HIT}

PER_RULE = 9
"""Numbers in a reply for each rule of a request that decides."""

BIRTH = 4
"""Which of them is the birth of the state."""

PER_RECEIPT = 8
"""Numbers in a refund or a move for each receipt, before the units that it is for."""

Reply = tuple[int, ...]
Arguments = list[bytes | None]

_SERVER_CLOCK = -1
_ADMITTED, _NEVER, _UNCOUNTABLE, _NOT_OURS, _OTHER_WINDOW = -1, -2, -3, -4, -5

# Arrays as PostgreSQL writes them: dimensions, has nulls, type of the elements, how many, number of the first; then the
# elements, each with its length before it.
_ARRAY_HEAD = Struct(">iiiii")
_BYTEA, _BIGINT = 17, 20
_LENGTH = Struct(">i")
_NUMBER = Struct(">iq")
_FOUR_NUMBERS = Struct(">iqiqiqiq")


class Shapes(NamedTuple):
    """The parameters that describe a limiter's rules to the database.

    Attributes:
        packed: Of each rule, as it follows the key in a program.
        arguments: The same of the first rule, as `headgate_one_v2` takes it.
        since: The time from which on these are the windows around it; there may be others if a rule is a calendar's.
        until: The time until which they are.
    """

    packed: tuple[bytes, ...]
    arguments: list[bytes]
    since: int
    until: int


class StateCall:
    """One request: where its states are, and what is asked of them.

    Attributes:
        keys: Where they are.
        operation: What is asked.
        at: A time of the caller's own, or -1 for the server's.
        costs: The units, of each rule.
        birth: For a state that is fresh.
        shapes: What describes the rules.
        receipts: Of a refund or a move: what follows the cost of each rule in the program.
        plan: Who reads the reply.
    """

    __slots__ = ("at", "birth", "costs", "keys", "operation", "plan", "receipts", "shapes")

    def __init__(
        self,
        keys: tuple[bytes, ...],
        operation: int,
        at: int,
        costs: tuple[int, ...],
        birth: int,
        shapes: Shapes,
        receipts: tuple[bytes, ...],
        plan: PostgresPlan,
    ) -> None:
        self.keys = keys
        self.operation = operation
        self.at = at
        self.costs = costs
        self.birth = birth
        self.shapes = shapes
        self.receipts = receipts
        self.plan = plan

    @property
    def is_single(self) -> bool:
        """Whether `headgate_one_v2` can answer it."""
        return len(self.keys) == 1 and self.operation <= RECORD

    def reply_size(self) -> int:
        """Return how many numbers the reply to it has."""
        return 0 if self.operation in (REFUND, RESET) else PER_RULE * len(self.keys)

    def new_states(self, reply: Reply) -> int:
        """Return how many of the states that a reply speaks of were fresh before."""
        if self.operation not in (HIT, RECORD, MOVE):
            return 0
        return reply[BIRTH::PER_RULE].count(self.birth)

    def repeated(self, reply: Reply) -> StateCall | None:
        """Return what to ask instead if it is another time at the server than the windows are for, which did nothing."""
        plan = self.plan
        if plan.is_timeless or _OTHER_WINDOW not in reply[::PER_RULE]:
            return None
        shapes = plan.corrected(reply[reply[::PER_RULE].index(_OTHER_WINDOW) * PER_RULE + 1])
        return StateCall(
            self.keys, self.operation, self.at, self.costs, self.birth, shapes, self.receipts, plan
        )


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
    numbers = (b"%d" % request.at, b"%d" % request.costs[0], b"%d" % request.birth)
    return [request.keys[0], b"%d" % request.operation, *request.shapes.arguments, *numbers, durable]


def many(requests: Sequence[StateCall], durable: bytes) -> Arguments:
    """Return the arguments of `headgate_many_v3`."""
    written = sorted({key for request in requests if request.operation != PEEK for key in request.keys})
    places = {key: place for place, key in enumerate(written, 1)}
    for request in requests:
        if request.operation == PEEK:
            for key in request.keys:
                places.setdefault(key, len(places) + 1)
    parts: list[bytes] = []
    for request in requests:
        _add_program(request, places, parts)
    program = b"".join(parts)
    head = _ARRAY_HEAD.pack(1, 0, _BIGINT, len(program) // _NUMBER.size, 1)
    return [_array(places), b"%d" % len(written), head + program, durable]


def outcomes(requests: Sequence[StateCall], reply: Reply) -> tuple[int, list[Reply | StateCall]]:
    """Return how many new states a reply speaks of, and of each request its own part, or what to ask instead."""
    new, start = 0, 0
    found: list[Reply | StateCall] = []
    for request in requests:
        end = start + request.reply_size()
        own = reply[start:end]
        repeated = request.repeated(own)
        if repeated is None:
            new += request.new_states(own)
            found.append(own)
        else:
            found.append(repeated)
        start = end
    return new, found


def numbers(value: bytes | None) -> Reply:
    """Return the whole numbers in a reply; none if there was nothing to say."""
    return _reader((len(value) - _ARRAY_HEAD.size) // _NUMBER.size).unpack(value) if value else ()


@cache
def _reader(count: int) -> Struct:
    return Struct(f">{_ARRAY_HEAD.size}x" + "4xq" * count)


def _add_program(request: StateCall, places: dict[bytes, int], parts: list[bytes]) -> None:
    keys, costs, receipts, packed = request.keys, request.costs, request.receipts, request.shapes.packed
    parts.append(_FOUR_NUMBERS.pack(8, request.operation, 8, request.at, 8, request.birth, 8, len(keys)))
    if request.operation == RESET:
        parts += [_NUMBER.pack(8, places[key]) for key in keys]
        return
    for i in range(len(keys)):
        parts.append(_NUMBER.pack(8, places[keys[i]]))
        parts.append(packed[i])
        parts.append(_NUMBER.pack(8, costs[i]))
        if receipts:
            parts.append(receipts[i])


def _array(keys: Iterable[bytes]) -> bytes:
    elements = [_LENGTH.pack(len(key)) + key for key in keys]
    return _ARRAY_HEAD.pack(1, 0, _BYTEA, len(elements), 1) + b"".join(elements)


def _packed(numbers: Iterable[int]) -> bytes:
    return b"".join([_NUMBER.pack(8, number) for number in numbers])


def _packed_receipt(receipt: Receipt) -> bytes:
    """Return a receipt as it is in a program; that of a rule that was not charged is one that no state has given."""
    *charged, held = receipt or (-1, 0)
    return _packed([*charged, *[0] * (PER_RECEIPT - len(charged)), held])


class Codec:
    """The requests of a limiter's rules."""

    def __init__(
        self, limiter: str, rules: tuple[Rule, ...], namespace: str, clock: Clock | None = None
    ) -> None:
        self._clock = clock
        self._server_time = ServerTime()
        names = tuple(rule.name for rule in rules)
        self._tiers = Tiers(rules, partial(PostgresPlan, names, self._server_time), shared=True)
        self._pick = key_picker(rules)
        self._prefixes = tuple(storage_prefix(namespace, limiter, rule) for rule in rules)
        self._is_plain = all(rule.scope is None for rule in rules)
        self._new_birth = Births()

    def ask(self, request: Request) -> StateCall:
        """Return the call for a request; a cost of 0 is only looked at.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
            CostTooHigh: No waiting would ever admit it.
        """
        plan = self._tiers.for_request(request)
        keys = self._keys(request.key)
        operation = _OPERATIONS[request.operation] if request.charges else PEEK
        receipts: tuple[bytes, ...] = ()
        if request.replaces is not None:
            operation, receipts = MOVE, plan.replaced(request.replaces)
        at = self._at(request.now)
        shapes = (
            plan.shapes if plan.is_timeless else plan.shapes_at(self._server_time.now() if at < 0 else at)
        )
        return StateCall(
            keys, operation, at, request.costs(len(keys)), self._new_birth(), shapes, receipts, plan
        )

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> StateCall | None:
        """Return the request to give back units of a hold; `None` if there is nothing to give back."""
        plan, keys, packed, costs, charged = self._tiers.own, [], [], [], []
        for shape, (key, receipt), units in given_back(plan.shapes.packed, receipts, cost):
            assert isinstance(key, bytes)
            keys.append(key)
            packed.append(shape)
            costs.append(units)
            charged.append(_packed_receipt(receipt))
        if not keys:
            return None
        shapes = plan.shapes._replace(packed=tuple(packed))
        return StateCall(tuple(keys), REFUND, self._at(now), tuple(costs), 0, shapes, tuple(charged), plan)

    def reset(self, key: Key | None) -> StateCall:
        """Return the request to forget what was counted."""
        plan = self._tiers.own
        return StateCall(self._keys(key), RESET, _SERVER_CLOCK, (), 0, plan.shapes, (), plan)

    def _at(self, now: int | None) -> int:
        if now is not None:
            return now
        return _SERVER_CLOCK if self._clock is None else self._clock.now_us()

    def _keys(self, key: Key | None) -> tuple[bytes, ...]:
        if self._is_plain:
            end = storage_key(b"", check_plain(key))
            return tuple([prefix + end for prefix in self._prefixes])
        return tuple(map(storage_key, self._prefixes, self._pick(key)))


class PostgresPlan:
    """The rules of a limiter as they are for one tier: how they are asked and how their replies are read.

    Attributes:
        algorithms: What decides each.
        shapes: Their parameters, as last sent.
        is_timeless: Whether these are always the same.
    """

    def __init__(
        self, names: tuple[str, ...], server_time: ServerTime, algorithms: tuple[Algorithm, ...]
    ) -> None:
        self._names = names
        self._server_time = server_time
        self.algorithms = algorithms
        self._limits = [(0, True) if _is_off(a) else (a.capacity, False) for a in algorithms]
        self.is_timeless = not any(isinstance(algorithm, Calendar) for algorithm in algorithms)
        self.shapes = self._shapes_at(0)

    def shapes_at(self, now: int) -> Shapes:
        """Return the parameters of the rules at a time."""
        shapes = self.shapes
        if not shapes.since <= now < shapes.until:
            shapes = self.shapes = self._shapes_at(now)
        return shapes

    def corrected(self, now: int) -> Shapes:
        """Return the same for what time it is at the server, which has just said so."""
        self._server_time.correct(now)
        return self.shapes_at(now)

    def replaced(self, receipts: Receipts) -> tuple[bytes, ...]:
        """Return the receipts of a hold that is to be replaced, as they are in a program."""
        return tuple(
            _packed_receipt(receipt if _can_move(algorithm, receipt) else ())
            for algorithm, (_, receipt) in zip(self.algorithms, receipts, strict=True)
        )

    def _shapes_at(self, now: int) -> Shapes:
        since, until = 0, MAX_UNITS
        shapes = []
        for algorithm in self.algorithms:
            shape, start, end = shape_of(algorithm, now)
            since, until = max(since, start), min(until, end)
            shapes.append(shape)
        arguments = [b"%d" % number for number in shapes[0]] if shapes else []
        return Shapes(tuple(map(_packed, shapes)), arguments, since, until)

    def answer(self, request: Request, call: StateCall, reply: Reply) -> Answer:
        """Return what a reply says to a request.

        Raises:
            CostTooHigh: What was to be recorded would have left the exact range.
            StoreConflict: Something else is stored under a key of ours.
        """
        if request.operation == "record":
            if request.charges:
                self.check_recorded(call, reply)
            return RECORDED
        receipts = self.receipts(call, reply) if request.operation == "hold" else None
        return self.decision(call, reply), receipts

    def decision(self, call: StateCall, reply: Reply) -> Decision:
        """Return the decision in a reply.

        Raises:
            StoreConflict: Something else is stored under a key of ours.
        """
        costs, place = call.costs, 0
        admitted = _is_admitted(reply)
        verdicts: list[Fields] = []
        for i, (limit, is_off) in enumerate(self._limits):
            retry_after, left, reset_after = reply[place], reply[place + 1], reply[place + 2]
            self._check_ours(retry_after, i)
            if admitted:
                left, reset_after = left - costs[i], reply[place + 3]
            place += PER_RULE
            verdicts.append(
                (
                    retry_after == _ADMITTED,
                    limit,
                    left,
                    None if retry_after < 0 else retry_after,
                    None if is_off else reset_after,
                )
            )
        return decision_of(self._names, tuple(verdicts))

    def receipts(self, call: StateCall, reply: Reply) -> Receipts | None:
        """Return the receipts of a hold, or `None` if nothing was charged."""
        costs = call.costs
        if not any(costs) or not _is_admitted(reply):
            return None
        receipts: list[tuple[object, Receipt]] = []
        for i, (key, algorithm, cost) in enumerate(zip(call.keys, self.algorithms, costs, strict=True)):
            place = i * PER_RULE + BIRTH
            if not cost:
                receipts.append((key, ()))
            elif isinstance(algorithm, TokenBucket):
                shape = (algorithm.n, algorithm.d, algorithm.burst)
                receipts.append((key, (*reply[place : place + 5], *shape, cost)))
            else:
                receipts.append((key, (*reply[place : place + 2], cost)))
        return tuple(receipts)

    def check_recorded(self, call: StateCall, reply: Reply) -> None:
        """Raise if units could not be recorded.

        Raises:
            CostTooHigh: The count would have left the exact range.
            StoreConflict: Something else is stored under a key of ours.
        """
        for i, (algorithm, cost) in enumerate(zip(self.algorithms, call.costs, strict=True)):
            place = i * PER_RULE
            if reply[place] == _UNCOUNTABLE:
                raise CostTooHigh(cost, reply[place + 1], algorithm.name)
            self._check_ours(reply[place], i)

    def _check_ours(self, answer: int, i: int) -> None:
        if answer == _NOT_OURS:
            raise StoreConflict(f"a row of headgate_states is not a state of rule {self._names[i]!r}")


def _is_admitted(reply: Reply) -> bool:
    """Return whether all rules have admitted a request."""
    return reply[::PER_RULE].count(_ADMITTED) * PER_RULE == len(reply)


def _is_off(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, TokenBucket) and not algorithm.n


def _can_move(algorithm: Algorithm, receipt: Receipt) -> bool:
    """Return whether units can be given back as they are moved: those of a token bucket's other shape drain away."""
    return not isinstance(algorithm, TokenBucket) or receipt[5:8] == (
        algorithm.n,
        algorithm.d,
        algorithm.burst,
    )
