"""Encoding of requests to the database and of its replies; no I/O.

`sql/migrations/0001_create_tables.sql` describes both. A single request that decides one key is sent to
`headgate_one_v2`; any other, or a batch, to `headgate_many_v3`, with everything but the keys in one array of integers.

A request with a calendar rule contains the windows around the estimated time of the server. If the server's time is outside
of them, it changes nothing and replies with its time, and the request is sent again with other windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

from headgate.algorithms import Algorithm, Calendar, Penalty, Receipt, TokenBucket, limit_of
from headgate.decision import Decision, Fields, decision_of
from headgate.errors import CostTooHigh, StoreConflict
from headgate.quota import MAX_UNITS
from headgate.stores.base import RECORDED, Answer, Receipts
from headgate.stores.port_parameters import ServerTime, port_parameters
from headgate.stores.request import Request

PEEK, HIT, RECORD, REFUND, RESET, MOVE, FINAL_HIT = range(7)
"""Operations; a move is a hold that replaces another, or a renewal; penalties count the refusal of a final hit."""

PER_RULE = 9
"""Numbers in a reply for each rule of a request that decides."""

BIRTH = 4
"""The index of the state's birth among them."""

PER_RECEIPT = 8
"""Numbers in a refund or a move for each receipt, before its units."""

Reply = tuple[int, ...]
Arguments = list[bytes | None]

SERVER_CLOCK = -1
"""In place of a time: use the server's time."""

_ADMITTED, _NEVER, _UNCOUNTABLE, _NOT_OURS, _OTHER_WINDOW = -1, -2, -3, -4, -5

# PostgreSQL's binary arrays: dimensions, has nulls, type of the elements, number of elements, index of the first; then the
# elements, each after its length.
_ARRAY_HEAD = Struct(">iiiii")
_BYTEA, _BIGINT = 17, 20
_LENGTH = Struct(">i")
_NUMBER = Struct(">iq")
_FOUR_NUMBERS = Struct(">iqiqiqiq")


class Shapes(NamedTuple):
    """The parameters that describe a limiter's rules to the database.

    Attributes:
        packed: The parameters of each rule, for `headgate_many_v3`.
        arguments: The parameters of the first rule, for `headgate_one_v2`.
        since: The start of the time in which the parameters are valid; they change with the windows of calendars.
        until: The end of that time.
    """

    packed: tuple[bytes, ...]
    arguments: list[bytes]
    since: int
    until: int


class StateCall:
    """One request about some states.

    Attributes:
        keys: The keys of the states.
        operation: One of the constants above.
        at: The time, or -1 for the server's.
        costs: The cost of each rule.
        birth: The birth of new states.
        shapes: The parameters of the rules.
        receipts: The packed receipt of each rule, for a refund or a move.
        plan: Decodes the reply.
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
        """Whether `headgate_one_v2` can answer the request."""
        return len(self.keys) == 1 and self.operation <= RECORD

    def reply_size(self) -> int:
        """Return the number of values in the reply."""
        return 0 if self.operation in (REFUND, RESET) else PER_RULE * len(self.keys)

    def new_states(self, reply: Reply) -> int:
        """Return the number of states that the request created."""
        if self.operation not in (HIT, RECORD, MOVE, FINAL_HIT):
            return 0
        return reply[BIRTH::PER_RULE].count(self.birth)

    def repeated(self, reply: Reply) -> StateCall | None:
        """Return the request to send instead if the server's time was outside of the calendar windows; it did nothing."""
        plan = self.plan
        if plan.is_timeless or _OTHER_WINDOW not in reply[::PER_RULE]:
            return None
        shapes = plan.corrected(reply[reply[::PER_RULE].index(_OTHER_WINDOW) * PER_RULE + 1])
        return StateCall(
            self.keys, self.operation, self.at, self.costs, self.birth, shapes, self.receipts, plan
        )


class NoteCall(NamedTuple):
    """A request to store a note, or to read it if the text is `None`."""

    key: bytes
    text: bytes | None = None
    lasting_us: int = 0
    replaced: bytes | None = None

    def arguments(self, durable: bytes) -> Arguments:
        """Return the arguments of `headgate_note_v1`."""
        return [self.key, self.text, b"%d" % self.lasting_us, durable, self.replaced]


class QueueCall(NamedTuple):
    """A request to enter a queue of waiting calls or to stay in it, or to leave it with a lifetime of 0."""

    queue: bytes
    ticket: str
    priority: int
    lasting_us: int

    def arguments(self) -> Arguments:
        """Return the arguments of `headgate_queue_v1`."""
        return [self.queue, self.ticket.encode(), b"%d" % self.priority, b"%d" % self.lasting_us]


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
    """Return the number of new states, and for each request its part of the reply or the request to send instead."""
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
    """Return the numbers in a reply; none if it is empty."""
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


def packed_receipt(receipt: Receipt) -> bytes:
    """Return a receipt in the format of `headgate_many_v3`; an empty receipt is encoded so that it matches no state."""
    *charged, held = receipt or (-1, 0)
    return _packed([*charged, *[0] * (PER_RECEIPT - len(charged)), held])


class PostgresPlan:
    """Encodes parameters and decodes replies for a limiter's rules with the quotas of one tier.

    Attributes:
        algorithms: The algorithm of each rule.
        shapes: The parameters of the rules, as last sent.
        is_timeless: Whether the parameters never change.
    """

    def __init__(
        self, names: tuple[str, ...], server_time: ServerTime, algorithms: tuple[Algorithm, ...]
    ) -> None:
        self._names = names
        self._server_time = server_time
        self.algorithms = algorithms
        self._limits = [(0, True) if _is_off(a) else (limit_of(a), False) for a in algorithms]
        self.is_timeless = not any(isinstance(algorithm, Calendar) for algorithm in algorithms)
        self.shapes = self._shapes_at(0)

    def shapes_at(self, now: int) -> Shapes:
        """Return the parameters of the rules at a time."""
        shapes = self.shapes
        if not shapes.since <= now < shapes.until:
            shapes = self.shapes = self._shapes_at(now)
        return shapes

    def corrected(self, now: int) -> Shapes:
        """Return the parameters for the server's time, which it has just reported."""
        self._server_time.correct(now)
        return self.shapes_at(now)

    def replaced(self, receipts: Receipts) -> tuple[bytes, ...]:
        """Return the packed receipts of a hold that is replaced."""
        return tuple(
            packed_receipt(receipt if _can_move(algorithm, receipt) else ())
            for algorithm, (_, receipt) in zip(self.algorithms, receipts, strict=True)
        )

    def _shapes_at(self, now: int) -> Shapes:
        since, until = 0, MAX_UNITS
        shapes = []
        for algorithm in self.algorithms:
            shape, start, end = port_parameters(algorithm, now)
            since, until = max(since, start), min(until, end)
            shapes.append(shape)
        arguments = [b"%d" % number for number in shapes[0]] if shapes else []
        return Shapes(tuple(map(_packed, shapes)), arguments, since, until)

    def answer(self, request: Request, call: StateCall, reply: Reply) -> Answer:
        """Decode a reply.

        Raises:
            CostTooHigh: Recording the units would leave the exact range.
            StoreConflict: A row does not hold a state of its rule.
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
            StoreConflict: A row does not hold a state of its rule.
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
            elif isinstance(algorithm, Penalty):
                receipts.append((key, ()))
            else:
                receipts.append((key, (*reply[place : place + 2], cost)))
        return tuple(receipts)

    def check_recorded(self, call: StateCall, reply: Reply) -> None:
        """Check the reply to a record.

        Raises:
            CostTooHigh: The count would leave the exact range.
            StoreConflict: A row does not hold a state of its rule.
            ValueError: The reply does not report that the units were counted.
        """
        for i, (algorithm, cost) in enumerate(zip(self.algorithms, call.costs, strict=True)):
            place = i * PER_RULE
            if reply[place] == _UNCOUNTABLE:
                raise CostTooHigh(cost, reply[place + 1], algorithm.name)
            self._check_ours(reply[place], i)
            if reply[place] != _ADMITTED:
                raise ValueError("no such reply to a record")

    def _check_ours(self, answer: int, i: int) -> None:
        if answer == _NOT_OURS:
            raise StoreConflict(f"a row of headgate_states is not a state of rule {self._names[i]!r}")


def _is_admitted(reply: Reply) -> bool:
    """Return whether all rules admitted a request."""
    return reply[::PER_RULE].count(_ADMITTED) * PER_RULE == len(reply)


def _is_off(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, TokenBucket) and not algorithm.n


def _can_move(algorithm: Algorithm, receipt: Receipt) -> bool:
    """Return whether a move can give units back; not those of a token bucket with other parameters, which drain."""
    return not isinstance(algorithm, TokenBucket) or receipt[5:8] == (
        algorithm.n,
        algorithm.d,
        algorithm.burst,
    )
