"""The store in this process's memory: exact, fast, and gone with the process.

One lock serves all keys. There is no thread for expiry: every new key looks at a few old ones and drops those whose state
equals a fresh one, so no call ever stalls for it. Never is a live key dropped to make room: when the store is full, all
new keys share one overflow key, with the rule's quota, until nothing is counted there any more.

How a state is kept. A busy key is usually one that nobody holds units of, in the shape that its rule began with; that
state is packed into a single object (`headgate.stores.packing`), which the shortest way through `hit` reads and writes
directly. Every other state is the tuple of the pure functions, and every other call goes through them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from headgate.algorithms import State, decide_all
from headgate.clock import Clock, SteadyClock
from headgate.decision import Decision
from headgate.errors import ConfigError, StoreError
from headgate.keys import Key, PlainKey, check_plain, key_picker
from headgate.rules import Rule
from headgate.stores.base import (
    AsyncGate,
    Gate,
    Guarantees,
    Receipts,
    Tiers,
    births,
    check_note,
    check_whole,
)
from headgate.stores.exclusive import Free, exclusive, wait_for
from headgate.stores.packing import Packed, Packing, QuickHit, packing_for

DEFAULT_MAX_KEYS = 1_000_000
DEFAULT_MAX_NOTES = 200_000
_LOOKED_AT_PER_NEW_KEY = 2
_LOOKED_AT_WHEN_FULL = 32
_DROPPED_PER_NEW_NOTE = 2
_GRACE_US = 3_600_000_000  # how much longer a state lives that was written at a time of the caller's own


class _Overflow:
    """The key that all new keys share while the store is full; equal to no key that a caller can write."""

    def __repr__(self) -> str:
        return "<overflow>"


OVERFLOW = _Overflow()
TableKey = PlainKey | _Overflow


class MemoryStore:
    """Counts in this process's memory.

    Args:
        max_keys: How many states may live at once, over all rules; beyond it, new keys share an overflow key.
        clock: Where time comes from; by default the monotonic clock, so that setting the machine's clock neither
            blocks nor grants anything.
        max_notes: How many notes may be kept at once. A live one is never dropped to make room: beyond it, new ones are
            refused with `StoreError`.
    """

    guarantees = Guarantees(may_lose="everything when the process ends; each process counts for itself")

    def __init__(
        self,
        *,
        max_keys: int = DEFAULT_MAX_KEYS,
        clock: Clock | None = None,
        max_notes: int = DEFAULT_MAX_NOTES,
    ) -> None:
        for name, most in (("max_keys", max_keys), ("max_notes", max_notes)):
            if type(most) is not int or most < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {most!r}")
        self.max_keys = max_keys
        self.max_notes = max_notes
        self.clock: Clock = SteadyClock() if clock is None else clock
        self.overflowed = 0
        """How many calls were counted under an overflow key so far."""
        self._free: Free = {0: None}
        self._tables: dict[tuple[str, str], Table] = {}
        self._keys = 0
        self._notes = Notes(self)
        _live_stores.add(self)

    def bind(self, limiter: str, rules: tuple[Rule, ...]) -> Gate:
        gate = _MemoryGate(self, limiter, rules)
        quick = gate.quick_hit()
        return Gate(quick or gate.hit, gate.peek, gate.hold, gate.record, gate.refund, gate.reset, quick)

    def bind_async(self, limiter: str, rules: tuple[Rule, ...]) -> AsyncGate:
        return _as_async(self.bind(limiter, rules))

    async def note(self, name: str, text: str, seconds: float) -> str:
        """See `AsyncNotes.note`.

        Raises:
            StoreError: There are `max_notes` notes already, and none of them may be forgotten yet.
        """
        return self._notes.add(name, text, check_note(name, text, seconds))

    async def noted(self, name: str) -> str | None:
        """See `AsyncNotes.noted`."""
        return self._notes.get(name)

    @exclusive
    def close(self) -> None:
        """Forget everything."""
        self._notes.clear()
        for table in self._tables.values():
            table.clear()
        self._keys = 0

    async def aclose(self) -> None:
        """Forget everything."""
        self.close()

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> MemoryStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return how many states are kept, those that have become fresh but were not looked at yet included."""
        return self._keys

    @exclusive
    def _table(self, limiter: str, rule: Rule, packing: Packing) -> Table:
        return self._tables.setdefault((limiter, rule.identity), Table(self, packing))


class Table:
    """The states of one rule by key. The store's lock is held by whoever calls.

    Every key stands exactly once in the queue of keys to look at; only looking at it takes it out, and a key whose state
    has been given back or reset stays behind with `None` until then. A call may be interrupted anywhere, so a key leaves the
    queue in the last step, after its state.
    """

    def __init__(self, store: MemoryStore, packing: Packing) -> None:
        self.packing = packing
        self.values: dict[TableKey, Packed | State | None] = {}
        self._store = store
        self._queue: deque[TableKey] = deque()
        # Until when, by the store's clock, a state stays that was written at a time of the caller's own: that time
        # may run on another scale, so it cannot say when the state has become fresh.
        self._kept_until: dict[TableKey, int] = {}

    def clear(self) -> None:
        self.values.clear()
        self._queue.clear()
        self._kept_until.clear()

    def key_for(self, key: PlainKey, now: int) -> TableKey:
        """Return the key under which this one is counted: itself, or the overflow key."""
        if key in self.values:
            return key
        overflow = self.load(OVERFLOW)
        if overflow is not None and self.packing.algorithm.fresh_at(overflow) > now:
            return OVERFLOW
        return key if self._has_room() else OVERFLOW

    def load(self, key: TableKey) -> State | None:
        """Return the state of a key."""
        value = self.values.get(key)
        return value if value is None or isinstance(value, tuple) else self.packing.unpack(value)

    def save(self, key: TableKey, state: State | None, explicit_now: int | None) -> None:
        """Keep the state of a key; a time of the caller's own is named, so that it is not taken for the store's."""
        if key not in self.values:
            if state is None:
                return
            self._enqueue(key)
        # Written at a time of the caller's own, a state stays as it is, out of the way of the quick hit.
        packed = state if state is None or explicit_now is not None else self.packing.pack(state)
        self.values[key] = packed
        if explicit_now is None or state is None:
            if self._kept_until:
                self._kept_until.pop(key, None)
        else:
            left = self.packing.algorithm.fresh_at(state) - explicit_now
            self._kept_until[key] = self._store.clock.now_us() + max(0, left) + _GRACE_US

    def begin(self, key: object, now: int) -> bool:
        """Make room for a key without a state; false if it is not a key of its own."""
        key = check_plain(key)
        if self.key_for(key, now) is OVERFLOW:
            return False
        if key not in self.values:
            self._enqueue(key)
        return True

    def _enqueue(self, key: TableKey) -> None:
        self._look_at(_LOOKED_AT_PER_NEW_KEY)
        self._store._keys += 1
        self._queue.append(key)

    def _has_room(self) -> bool:
        if self._store._keys >= self._store.max_keys:
            for table in self._store._tables.values():
                table._look_at(_LOOKED_AT_WHEN_FULL)
        return self._store._keys < self._store.max_keys

    def _look_at(self, most: int) -> None:
        """Drop those among the next few keys whose state equals a fresh one."""
        queue, values = self._queue, self.values
        now = self._store.clock.now_us()
        for _ in range(min(most, len(queue))):
            key = queue[0]
            value = values.get(key)
            if value is None or self._is_over(key, value, now):
                values.pop(key, None)
                self._kept_until.pop(key, None)
                self._store._keys -= 1
                queue.popleft()
            else:
                queue.rotate(-1)

    def _is_over(self, key: TableKey, value: Packed | State, now: int) -> bool:
        if key in self._kept_until:
            return self._kept_until[key] <= now
        return self.packing.fresh_at(value) <= now


class Notes:
    """The notes of a store by name."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._free = store._free
        self._by_name: dict[str, tuple[int, str]] = {}  # when it may be forgotten, and the text
        self._expiring: list[tuple[int, str]] = []  # a heap of the same times, with the names

    def __len__(self) -> int:
        return len(self._by_name)

    def clear(self) -> None:
        """Forget all of them, while the store's lock is held."""
        self._by_name.clear()
        self._expiring.clear()

    @exclusive
    def get(self, name: str) -> str | None:
        expires, text = self._by_name.get(name, (0, None))
        return text if expires > self._store.clock.now_us() else None

    @exclusive
    def add(self, name: str, text: str, lasting: int) -> str:
        """Keep a text under a name, unless there is one, and return the one that is there."""
        now = self._store.clock.now_us()
        self._drop_expired(now)
        expires, kept = self._by_name.get(name, (0, text))
        if expires > now:
            return kept
        if name not in self._by_name and len(self._by_name) >= self._store.max_notes:
            raise StoreError(
                f"the memory store keeps {self._store.max_notes} notes already and none has expired; "
                f"make it with a higher max_notes=, or use a store outside of this process, like 'sqlite:///limits.db'"
            )
        self._by_name[name] = now + lasting, text
        heappush(self._expiring, (now + lasting, name))
        return text

    def _drop_expired(self, now: int) -> None:
        """Drop the few that expired first: more than come with each call, so that they never pile up."""
        for _ in range(_DROPPED_PER_NEW_NOTE):
            if not self._expiring or self._expiring[0][0] > now:
                return
            expired = heappop(self._expiring)
            if self._by_name.get(expired[1], expired)[0] == expired[0]:  # and not noted anew since
                self._by_name.pop(expired[1], None)


class _MemoryGate:
    """A limiter's rules over the tables of a memory store."""

    def __init__(self, store: MemoryStore, limiter: str, rules: tuple[Rule, ...]) -> None:
        self._store = store
        self._free = store._free
        self._rules = rules
        self._tiers = Tiers(rules)
        self._names = tuple(rule.name for rule in rules)
        self._keys = key_picker(rules)
        self._new_birth = births()
        self._tables = [
            store._table(limiter, rule, packing_for(algorithm, store.clock))
            for rule, algorithm in zip(rules, self._tiers.algorithms(None), strict=True)
        ]

    def quick_hit(self) -> QuickHit | None:
        """Return the shortest way to a decision, if these rules allow one."""
        if len(self._rules) != 1 or self._rules[0].scope is not None:
            return None
        algorithm = self._tiers.algorithms(None)[0]
        if not algorithm.capacity:
            return None
        table = self._tables[0]
        return table.packing.quick_hit(algorithm, table, self._free, self._store.clock, self.hit)

    def hit(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return self._decide(key, cost, tier, now, write=True)[0]

    def peek(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return self._decide(key, cost, tier, now, write=False)[0]

    def hold(
        self, key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Decision, Receipts | None]:
        return self._decide(key, cost, tier, now, write=True, birth=self._new_birth())

    @exclusive
    def record(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
        check_whole(cost)
        if not cost:
            self._keys(key)  # says what is wrong with it
            return
        at, keys = self._place(key, now)
        algorithms = self._tiers.algorithms(tier)
        states = [
            algorithm.record(table.load(k), at, cost, 0)
            for algorithm, table, k in zip(algorithms, self._tables, keys, strict=True)
        ]
        self._save(keys, states, now)

    @exclusive
    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        at = self._store.clock.now_us() if now is None else now
        for algorithm, table, (key, receipt) in zip(
            self._tiers.algorithms(None), self._tables, receipts, strict=True
        ):
            state = table.load(key)  # type: ignore[arg-type]  # a receipt of ours
            after = algorithm.refund(state, receipt, cost, at)
            if after is not state:
                table.save(key, after, now)  # type: ignore[arg-type]

    @exclusive
    def reset(self, key: Key | None) -> None:
        for table, k in zip(self._tables, self._keys(key), strict=True):
            table.save(k, None, None)

    @exclusive
    def _decide(
        self, key: Key | None, cost: int, tier: str | None, now: int | None, *, write: bool, birth: int = 0
    ) -> tuple[Decision, Receipts | None]:
        algorithms = self._tiers.admitting(tier, cost)
        at, keys = self._place(key, now)
        states = [table.load(k) for table, k in zip(self._tables, keys, strict=True)]
        after, verdicts = decide_all(algorithms, states, at, cost, birth)
        decision = Decision.make(self._names, verdicts)
        if not (write and cost and decision.allowed):
            return decision, None
        if birth:
            after = [_with_birth(state, birth) for state in after]
        self._save(keys, after, now)
        if not birth:
            return decision, None
        return decision, tuple(
            (k, algorithm.receipt(before, state, cost) if state else ())
            for k, algorithm, before, state in zip(keys, algorithms, states, after, strict=True)
        )

    def _place(self, key: Key | None, now: int | None) -> tuple[int, list[TableKey]]:
        """Return the time of the call and the key under which each rule counts it."""
        picked = self._keys(key)
        at = self._store.clock.now_us() if now is None else now
        keys: list[TableKey] = [
            k if k in table.values else table.key_for(k, at)
            for table, k in zip(self._tables, picked, strict=True)
        ]
        if OVERFLOW in keys:
            self._store.overflowed += 1
        return at, keys

    def _save(self, keys: Sequence[TableKey], states: Sequence[State | None], now: int | None) -> None:
        for table, key, state in zip(self._tables, keys, states, strict=True):
            table.save(key, state, now)


def _with_birth(state: State | None, birth: int) -> State | None:
    """Return a state that a receipt can name: one that nobody held units of has no birth yet."""
    return (birth, *state[1:]) if state and not state[0] else state


def _as_async(gate: Gate) -> AsyncGate:
    """Return the same operations to be awaited; none of them ever waits."""

    async def hit(key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return gate.hit(key, cost, tier, now)

    async def peek(key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return gate.peek(key, cost, tier, now)

    async def hold(
        key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Decision, Receipts | None]:
        return gate.hold(key, cost, tier, now)

    async def record(key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
        gate.record(key, cost, tier, now)

    async def refund(receipts: Receipts, cost: int, now: int | None) -> None:
        gate.refund(receipts, cost, now)

    async def reset(key: Key | None) -> None:
        gate.reset(key)

    quick = gate.public_hit
    if quick is None:
        return AsyncGate(hit, peek, hold, record, refund, reset)

    async def public_hit(
        key: Key | None = None,
        cost: int = 1,
        tier: str | None = None,
        now_us: int | None = None,
        *,
        now: float | None = None,
    ) -> Decision:
        return quick(key, cost, tier, now_us, now=now)

    return AsyncGate(public_hit, peek, hold, record, refund, reset, public_hit)


class _LiveStores:
    """All stores of this process; whoever forks keeps others from making one."""

    def __init__(self) -> None:
        self._free: Free = {0: None}
        self._stores: weakref.WeakSet[MemoryStore] = weakref.WeakSet()

    @exclusive
    def add(self, store: MemoryStore) -> None:
        self._stores.add(store)

    def locks(self) -> Iterator[Free]:
        """Yield the lock of the registry, which must be held for the rest, and those of all stores."""
        yield self._free
        for store in self._stores:
            yield store._free


class _Forking(threading.local):
    """What the present thread holds because it forks."""

    def __init__(self) -> None:
        self.held: list[Free] = []


# A fork while another thread holds the lock would leave it locked for ever in the child, and a state half written. So
# the locks of all stores are taken before a fork and released after it, on both sides. Meanwhile nobody else may fork,
# or make a store.
_live_stores = _LiveStores()
_forking = _Forking()


def _before_fork() -> None:
    held = _forking.held
    for free in _live_stores.locks():
        wait_for(free)
        held.append(free)


def _after_fork() -> None:
    held = _forking.held
    while held:
        # Nothing is called in between, where it could be interrupted: none is given back twice.
        held[-1][0] = None
        del held[-1]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
# Twice, because a signal that came during the fork is handled, and may raise, in the first Python code after it.
for _ in range(2 if hasattr(os, "register_at_fork") else 0):
    os.register_at_fork(after_in_parent=_after_fork, after_in_child=_after_fork)
