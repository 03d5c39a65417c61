"""The operations of a limiter's gate in a cluster, where the states of one request may be in several slots.

No call of the script can reach several slots. They are charged one after the other, token buckets last: a refund restores
a window or a lease exactly, but a token bucket only approximately. If a slot refuses or fails, the slots before it are
refunded. A hold that replaces another one cannot be undone like this, so all of its states must be in one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeVar

from redis.crc import key_slot

from headgate.algorithms import Receipt, TokenBucket
from headgate.clock import Clock
from headgate.costs import Costs
from headgate.decision import Decision, Fields
from headgate.errors import ConfigError, StoreError
from headgate.keys import Key, PlainKey, key_picker, storage_key, storage_prefix
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Receipts
from headgate.stores.penalties import has_penalty, with_penalty_costs
from headgate.stores.redis.codec import Operation, RedisPlan, Reply, ScriptCall, reset
from headgate.stores.redis.operations import OPERATIONS, StateKeys, operations_for
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.remote.peer import FAILURES
from headgate.stores.request import Request

T = TypeVar("T")

Steps = Generator[Any, Reply, T]
"""The steps of an operation in a cluster: a generator without I/O. It yields requests to nodes, is sent the reply or thrown
the error, and returns the result."""

Send = Callable[[ScriptCall], Steps[Reply]]
"""Returns the steps that send one call to the node of its slot."""

Tag = Literal["limiter", "key"]
"""The states that share a slot: all of a limiter, or those with the same key."""


def tagged_keys(namespace: str, limiter: str, rules: tuple[Rule, ...], tag: Tag) -> StateKeys:
    """Return a function like that of `storage_keys`, with a hash tag in each key."""
    name_of = tagged_name(namespace, limiter, tag)
    pick, prefixes = key_picker(rules), [storage_prefix(namespace, limiter, rule) for rule in rules]
    return lambda key: tuple(map(name_of, prefixes, pick(key)))


def tagged_name(namespace: str, limiter: str, tag: Tag) -> Callable[[bytes, PlainKey], bytes]:
    """Return a function like `storage_key`, with a hash tag.

    The tag comes first, so that braces in the text of a key cannot choose another slot.
    """
    secret = blake2b(f"{len(namespace)}:{namespace}{limiter}".encode(), digest_size=32).digest()

    def tagged(prefix: bytes, key: PlainKey) -> bytes:
        digest = secret[:8].hex()
        if tag == "key":
            raw = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
            digest = blake2b(raw, digest_size=8, key=secret).hexdigest()
        return b"{%b}%b" % (digest.encode(), storage_key(prefix, key))

    return tagged


class ClusterOperations:
    """Encodes the operations of a limiter's gate as steps; see `RequestEncoder`. The reply to steps is their result."""

    def __init__(
        self, limiter: str, rules: tuple[Rule, ...], namespace: str, tag: Tag, clock: Clock | None, send: Send
    ) -> None:
        self._rules, self._has_penalty = rules, has_penalty(rules)
        self._single = operations_for(rules, tagged_keys(namespace, limiter, rules, tag), clock)
        self._spreads = tag == "key" and len({rule.scope for rule in rules}) > 1
        self._send = send

    def decide(self, request: Request) -> EncodedRequest[Answer]:
        return (self._decide(request) if self._spreads else self._decide_in_one_slot(request)), _same

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        return self._refund(receipts, cost, now), _same

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        return self._reset(key), _same

    def _decide_in_one_slot(self, request: Request) -> Steps[Answer]:
        call, decode = self._single.decide(request)
        return decode((yield from self._send(call)))

    def _decide(self, request: Request) -> Steps[Answer]:
        if self._has_penalty:
            request = with_penalty_costs(self._rules, request)
        plan, now = self._single.plans.for_request(request), self._single.at(request.now)
        parts = _parts(plan, self._single.keys(request.key), plan.costs(request.cost))
        if request.operation == "record":
            return (yield from self._record(parts, now))
        if request.operation == "peek":
            return (yield from self._peek(plan, parts, now))
        if request.replaces is not None:
            operation = OPERATIONS[request.operation]
            decision, receipts = yield from self._move(plan, parts, operation, request.replaces, now)
        else:
            decision, receipts = yield from self._charge(plan, parts, now, request.is_punishable)
        return decision, receipts if request.operation == "hold" else None

    def _record(self, parts: Sequence[Part], now: int | None) -> Steps[Answer]:
        for part in parts:
            if any(part.costs):
                reply = yield from self._send(part.plan.decide(Operation.RECORD, part.keys, part.costs, now))
                part.plan.recorded(part.costs, reply)
        return RECORDED

    def _charge(
        self, plan: RedisPlan, parts: list[Part], now: int | None, is_punishable: bool
    ) -> Steps[Answer]:
        """Charge all parts or none. Penalties count only the refusal of the first part that refuses."""
        verdicts: dict[int, Fields] = {}
        charged: list[tuple[Part, Receipts]] = []
        try:
            for part in parts:
                hold = Operation.FINAL_HOLD if is_punishable and part.plan.has_penalty else Operation.HOLD
                reply = yield from self._send(part.plan.decide(hold, part.keys, part.costs, now))
                found = part.plan.verdicts(reply)
                verdicts.update(zip(part.indices, found, strict=True))
                if not all(verdict[0] for verdict in found):
                    break
                if receipts := part.plan.receipts(part.keys, reply, part.costs):
                    charged.append((part, receipts))
            else:
                return _decision(plan, verdicts), _joined(parts, charged)
        except (StoreError, *FAILURES):
            yield from self._undo(charged, now)
            raise
        yield from self._undo(charged, now)
        if len(parts) > 1:
            not_asked = [other for other in parts if other.indices[0] not in verdicts]
            yield from self._look(not_asked, now, verdicts)
            yield from self._look(_free([other for other in parts if other is not part]), now, verdicts)
        return _decision(plan, verdicts), None

    def _move(
        self,
        plan: RedisPlan,
        parts: list[Part],
        operation: Operation,
        replaces: Receipts,
        now: int | None,
    ) -> Steps[Answer]:
        """Charge the one part of a hold that replaces another one.

        Raises:
            ConfigError: The hold has several parts. If one refused, the others could not be undone.
        """
        moved = [part for part in parts if any(part.costs) or any(replaces[i][1] for i in part.indices)]
        if len(moved) > 1:
            raise ConfigError(
                "the units of this hold are in several slots of the cluster, and cannot be confirmed or renewed in one "
                'step; use RedisStore(..., hash_tag="limiter"), which keeps a limiter in one slot'
            )
        verdicts: dict[int, Fields] = {}
        charged: list[tuple[Part, Receipts]] = []
        for part in moved:
            old = tuple(replaces[i] for i in part.indices)
            reply = yield from self._send(part.plan.decide(operation, part.keys, part.costs, now, old))
            verdicts.update(zip(part.indices, part.plan.verdicts(reply), strict=True))
            if receipts := part.plan.receipts(part.keys, reply, part.costs):
                charged.append((part, receipts))
        yield from self._look([part for part in parts if part not in moved], now, verdicts)
        return _decision(plan, verdicts), _joined(parts, charged)

    def _peek(self, plan: RedisPlan, parts: list[Part], now: int | None) -> Steps[Answer]:
        verdicts: dict[int, Fields] = {}
        yield from self._look(parts, now, verdicts)
        if len(parts) > 1 and not all(verdict[0] for verdict in verdicts.values()):
            yield from self._look(_free(parts), now, verdicts)
        return _decision(plan, verdicts), None

    def _look(self, parts: Sequence[Part], now: int | None, verdicts: dict[int, Fields]) -> Steps[None]:
        """Add the verdicts of rules without charging them; a refusal is not replaced."""
        for part in parts:
            reply = yield from self._send(part.plan.decide(Operation.PEEK, part.keys, part.costs, now))
            for i, verdict in zip(part.indices, part.plan.verdicts(reply), strict=True):
                if i not in verdicts or verdicts[i][0]:
                    verdicts[i] = verdict

    def _undo(self, charged: list[tuple[Part, Receipts]], now: int | None) -> Steps[None]:
        for part, receipts in charged:
            with suppress(StoreError):  # the units stay counted until they expire
                yield from self._send(part.plan.refund(receipts, part.costs, now))

    def _refund(self, receipts: Receipts, cost: Costs, now: int | None) -> Steps[None]:
        slots: list[Any] = [receipt and key_slot(key) for key, receipt in receipts]  # type: ignore[arg-type]
        for slot in dict.fromkeys(slots):
            # A rule with an empty receipt was not charged.
            own = [entry if slots[i] == slot else (entry[0], ()) for i, entry in enumerate(receipts)]
            call, _ = self._single.refund(tuple(own), cost, now)
            if call is not None:
                yield from self._send(call)

    def _reset(self, key: Key | None) -> Steps[None]:
        keys = self._single.keys(key)
        for indices in _by_slot(keys):
            yield from self._send(reset(tuple(keys[i] for i in indices)))


class Part(NamedTuple):
    """The rules of a request whose states are in one slot, and their costs."""

    indices: Sequence[int]
    plan: RedisPlan
    keys: tuple[bytes, ...]
    costs: tuple[int, ...]


def slot_of(call: ScriptCall) -> int:
    """Return the slot of a call."""
    return int(key_slot(call.keys[0]))


def _parts(plan: RedisPlan, keys: tuple[bytes, ...], costs: tuple[int, ...]) -> list[Part]:
    """Return the parts of a request, in the order in which they are charged."""
    parts = [
        Part(found, plan.part(found), tuple(keys[i] for i in found), tuple(costs[i] for i in found))
        for found in _by_slot(keys)
    ]
    return sorted(parts, key=_has_buckets)


def _by_slot(keys: Sequence[bytes]) -> list[list[int]]:
    """Return the indices of the keys of each slot."""
    by_slot: dict[int, list[int]] = {}
    for i, key in enumerate(keys):
        by_slot.setdefault(key_slot(key), []).append(i)
    return list(by_slot.values())


def _has_buckets(part: Part) -> bool:
    return any(isinstance(algorithm, TokenBucket) for algorithm in part.plan.algorithms)


def _free(parts: Sequence[Part]) -> list[Part]:
    return [part._replace(costs=(0,) * len(part.costs)) for part in parts]


def _decision(plan: RedisPlan, verdicts: dict[int, Fields]) -> Decision:
    return Decision.make(plan.names, [verdicts[i] for i in sorted(verdicts)])


def _joined(parts: list[Part], charged: list[tuple[Part, Receipts]]) -> Receipts | None:
    """Return the receipts of all rules, in order; those of rules that were not charged are empty."""
    if not charged:
        return None
    by_index: dict[int, tuple[object, Receipt]] = {
        i: (key, ()) for part in parts for i, key in zip(part.indices, part.keys, strict=True)
    }
    for part, receipts in charged:
        by_index.update(zip(part.indices, receipts, strict=True))
    return tuple(by_index[i] for i in sorted(by_index))


def _same(result: T) -> T:
    return result
