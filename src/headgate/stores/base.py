"""The interfaces of stores and gates, and code that all stores share.

A store makes the algorithms atomic. It *binds* a limiter's rules once, and prepares keys, scripts and parameters for them.
The result is a *gate* with the methods `decide`, `refund` and `reset`. Wrappers of a gate (a clock,
hooks, a failure policy, a live policy) are gates too.

All times are whole microseconds; `None` means the store's clock.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Generic, Protocol, Self, TypeVar

from headgate._checks import Unpicklable, is_number
from headgate._fork import watch
from headgate.algorithms import MAX_ENTRIES, Algorithm, Receipt, algorithm_for, capacity_of
from headgate.algorithms.base import Operation as Operation
from headgate.algorithms.base import Receipts as Receipts
from headgate.clock import Clock, to_microseconds
from headgate.costs import Costs, check_whole
from headgate.decision import UNLIMITED, Decision
from headgate.errors import ConfigError, CostTooHigh, StoreConflict, StoreUnavailable
from headgate.keys import Key
from headgate.quota import MAX_UNITS, Quota, Quotas
from headgate.rules import DEFAULT_BUCKETS, Rule
from headgate.stores.penalties import watched_by, watching
from headgate.stores.request import Request

T = TypeVar("T")

Answer = tuple[Decision, Receipts | None]
"""A decision and, for a hold that took units, its receipts."""

RECORDED: Answer = (UNLIMITED, None)
"""The answer to a request that only records."""

REENTERED = (
    "this thread is already inside a call to this store; a signal handler, a __del__ method or a weak reference's "
    "callback that interrupts a limiter cannot use the same store"
)
"""The error of a call from inside another call of the same thread."""

LONGEST_DEADLINE = 3600
"""Longest deadline of a call to a store, in seconds."""

LONGEST_NOTE = 3_000_000_000
"""Longest time in seconds for which a note can be kept, about 95 years."""

QUOTAS_KEPT = 1024
"""Size of a gate's cache of prepared quotas from calls."""


@dataclass(frozen=True, slots=True)
class Guarantees:
    """The guarantees of a store.

    Attributes:
        exact: Whether its decisions equal those of the pure functions at any concurrency.
        all_or_nothing: Whether several rules are charged together or not at all, whatever their keys.
        shared: Whether several processes count together.
        durable: Whether counts survive a restart of the process.
        may_lose: Description of the counts that a crash may lose; empty if nothing.
    """

    exact: bool = True
    all_or_nothing: bool = True
    shared: bool = False
    durable: bool = False
    may_lose: str = ""


class Closing(Unpicklable, ABC):
    """Base of objects that a `with` or `async with` block closes at its end."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class AsyncNotes(Protocol):
    """A store of notes: short texts under a name, the same for all callers.

    The first caller sets the text, and every other caller gets the same text, in all tasks and processes and after a
    restart. A caller that names the present text may replace it; of several callers, one succeeds. So work that must be
    done once is done once. Writing the same text again only extends its lifetime, so a call with an unknown outcome may be
    repeated. Notes are independent of states: they share neither names nor capacity.
    """

    @property
    def remote(self) -> bool:
        """Whether calls go over a network."""

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        """Keep a text under a name for at least `seconds`, unless another text is kept there, and return the kept text.

        Args:
            name: The name.
            text: The text.
            seconds: The minimum lifetime; a longer one that the note already has is kept.
            replaces: The text that may be replaced, in one atomic step; `None` for none.

        Raises:
            ConfigError: The name, text or time is not valid.
            StoreError: It could not be kept, or it is unknown whether it was.
        """

    async def get_note(self, name: str) -> str | None:
        """Return the text under a name; `None` if there is no such note or it has expired.

        Raises:
            StoreError: The store failed.
        """


class Gate(Protocol):
    """A limiter's rules, bound to a store."""

    def decide(self, request: Request) -> Answer:
        """Decide a request by all rules together: all are charged, or none.

        Returns the decision and, for a hold that took units, its receipts. The answer to a record is always `RECORDED`.
        Receipts that a hold replaces are given back in the same step, unless it is refused. A renewal extends the leases of
        its receipts; it is refused if one of them has expired or was given back.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number, or a `concurrent` rule gets a
                hit.
            CostTooHigh: The cost exceeds the capacity of a rule.
            StoreError: The store failed.
        """

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give back up to `cost` units of a hold, as far as they still count; one number for all rules, or one per rule."""

    def reset(self, key: Key | None) -> None:
        """Delete the counts of a key."""


class AsyncGate(Protocol):
    """Like `Gate`, but with coroutine methods."""

    async def decide(self, request: Request) -> Answer:
        """See `Gate.decide`."""

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """See `Gate.refund`."""

    async def reset(self, key: Key | None) -> None:
        """See `Gate.reset`."""


class AnyStore(Protocol):
    """The properties that both kinds of limiters need."""

    @property
    def guarantees(self) -> Guarantees:
        """The guarantees of this store."""

    @property
    def clock(self) -> Clock | None:
        """The clock of this process that it uses; `None` if it uses the time of another machine."""

    @property
    def remote(self) -> bool:
        """Whether calls go over a network: they have a deadline and a failure policy."""

    @property
    def has_rules(self) -> bool:
        """Whether the store itself has rules, so that limiters without rules must call it too."""


class Store(AnyStore, Protocol):
    """The interface that `Limiter` needs."""

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        """Return the gate of a limiter's rules.

        A call to a remote store is abandoned after `deadline` seconds, by default the deadline of the store.
        """

    def close(self) -> None:
        """Close connections and files; later calls may raise `StoreUnavailable`."""


class AsyncStore(AnyStore, Protocol):
    """The interface that `AsyncLimiter` needs."""

    @property
    def notes(self) -> AsyncNotes | None:
        """The store of notes, or `None` if this store does not support notes."""

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """Like `Store.bind`."""

    async def aclose(self) -> None:
        """Close connections and files; later calls may raise `StoreUnavailable`."""


class Births:
    """Generator of births: a random start, then consecutive numbers.

    The same birth comes from two processes with a probability of about 2^-53 per pair of states. After a fork the child
    begins at a new random number, because parent and child would otherwise produce the same births.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()
        watch(self)

    def after_fork_in_child(self) -> None:
        """Choose a new random start."""
        self._numbers = count(random.SystemRandom().randrange(1, MAX_UNITS))

    def __call__(self) -> int:
        """Return the next number."""
        return next(self._numbers) % (MAX_UNITS - 1) + 1


class Tiers(Generic[T]):
    """Prepared data of a store for each tier of a limiter's rules, and for quotas of calls.

    Args:
        rules: The limiter's rules.
        prepare: Returns the prepared data for the algorithms of all rules.
        shared: Whether the store is shared, so that a state may have at most `MAX_ENTRIES` entries.

    Raises:
        ConfigError: A quota cannot be counted exactly, or its state would be too large.
    """

    def __init__(
        self, rules: tuple[Rule, ...], prepare: Callable[[tuple[Algorithm, ...]], T], *, shared: bool = False
    ) -> None:
        self._rules = rules
        self._shared = shared
        self._watched = watched_by(rules)
        known = {tier for rule in rules for tier in rule.tiers}
        own, by_tier = self._algorithms(None), {tier: self._algorithms(tier) for tier in known}
        everyone = [a.capacity for algorithms in (own, *by_tier.values()) for a in algorithms]
        self.always_fits = min(filter(None, everyone), default=0)
        """A cost that is one number from 0 to this one needs no further check."""
        if any(rule.kind == "concurrent" for rule in rules):
            self.always_fits = -1
        self.own = prepare(own)
        self.by_tier = {tier: prepare(algorithms) for tier, algorithms in by_tier.items()}
        # A bounded cache: quotas come from callers, and may differ for every caller.
        self._by_quotas = lru_cache(maxsize=QUOTAS_KEPT)(
            lambda tier, quotas: prepare(self._algorithms(tier, quotas))
        )

    def for_request(self, request: Request) -> T:
        """Check the cost of a request, and return the prepared data for it.

        Raises:
            ConfigError: The cost is not a whole number, or a `concurrent` rule gets a hit or a record.
            CostTooHigh: The cost exceeds the capacity of a rule.
        """
        cost = request.cost
        if type(cost) is not int or not 0 <= cost <= self.always_fits:
            check_costs(self._rules, request)
        tier = request.tier
        if request.quotas is not None:
            return self._by_quotas(tier if tier in self.by_tier else None, request.quotas)
        return self.own if tier is None else self.by_tier.get(tier, self.own)

    def _algorithms(self, tier: str | None, quotas: Quotas | None = None) -> tuple[Algorithm, ...]:
        algorithms: list[Algorithm] = []
        for rule, own in zip(self._rules, quotas or (None,) * len(self._rules), strict=True):
            quota = own or rule.quota_for(tier)
            if self._shared:
                check_entries(rule, quota)
            algorithms.append(algorithm_for(rule, quota))
        for i, watched in self._watched.items():
            algorithms[i] = watching(algorithms[i], watched)
        return tuple(algorithms)


def plain_tiers(rules: tuple[Rule, ...], *, shared: bool = False) -> Tiers[tuple[Algorithm, ...]]:
    """Return the tiers of a store that uses the algorithms directly."""
    return Tiers(rules, tuple, shared=shared)


def check_entries(rule: Rule, quota: Quota) -> None:
    """Refuse a quota whose state could have more entries than a shared store accepts.

    Raises:
        ConfigError: The limit of a sliding log, or the number of buckets, is above `MAX_ENTRIES`.
    """
    # A limit of MAX_UNITS is only for reading counts; nothing is charged with it.
    if rule.kind == "sliding_log" and MAX_ENTRIES < quota.limit < MAX_UNITS:
        raise ConfigError(
            f"rule {rule.name!r}: a sliding_log on a shared store has a limit of at most {MAX_ENTRIES}, not "
            f"{quota.limit}; use sliding_window({str(quota)!r}), which never admits more than its limit either"
        )
    if rule.kind == "sliding_window" and rule.buckets > MAX_ENTRIES:
        raise ConfigError(
            f"rule {rule.name!r}: a sliding_window on a shared store has at most {MAX_ENTRIES} buckets, not "
            f"{rule.buckets}; use fewer, its limit is as exact with the default of {DEFAULT_BUCKETS}"
        )


def check_costs(rules: tuple[Rule, ...], request: Request) -> None:
    """Refuse an invalid cost.

    Raises:
        ConfigError: A cost is not a whole number, or a `concurrent` rule gets a hit or a record.
        CostTooHigh: The cost exceeds the capacity of a rule.
    """
    for cost in request.cost if isinstance(request.cost, tuple) else (request.cost,):
        check_whole(cost)
    quotas = request.quotas or (None,) * len(rules)
    for rule, cost, own in zip(rules, request.costs(len(rules)), quotas, strict=True):
        if rule.kind == "concurrent" and cost and request.operation in ("hit", "record"):
            raise ConfigError(
                f"rule {rule.name!r} is concurrent and counts only holds: use limiter.hold(...)"
            )
        quota = own or rule.quota_for(request.tier)
        capacity = capacity_of(rule, quota)
        if cost > capacity > 0 and request.operation not in ("record", "renew") and rule.kind != "penalty":
            raise CostTooHigh(cost, capacity, rule.name, rule.unit)


def given_back(
    prepared: Iterable[T], receipts: Receipts, cost: Costs
) -> Iterator[tuple[T, tuple[object, Receipt], int]]:
    """Yield for each rule that a hold charged: its prepared data, its receipt and the number of units to give back."""
    costs = cost if isinstance(cost, tuple) else (cost,) * len(receipts)
    for each, entry, units in zip(prepared, receipts, costs, strict=True):
        if entry[1] and units:
            yield each, entry, units


def check_deadline(seconds: float) -> float:
    """Return the checked deadline of a call in seconds."""
    if not is_number(seconds) or not 0 < seconds <= LONGEST_DEADLINE:  # also false for NaN
        raise ConfigError(
            f"a deadline is a number of seconds above 0 and at most {LONGEST_DEADLINE}, not {seconds!r}"
        )
    return float(seconds)


def while_locked(lock: Any, work: Callable[..., T], *args: Any) -> T:
    """Return the result of a call while an `RLock` is held; release it even if a signal handler raises at any point.

    A `with` statement does not release it if the handler raises before its block begins, which is possible since
    Python 3.14.

    Raises:
        StoreUnavailable: This thread holds the lock already.
    """
    if lock._is_owned():  # a private method, also used by `threading.Condition`
        raise StoreUnavailable(REENTERED)
    try:
        lock.acquire()
        result = work(*args)
        lock.release()
    except BaseException:
        release_if_owned(lock)
        raise
    return result


def release_if_owned(lock: Any) -> None:
    """Release a lock if this thread holds it."""
    if lock._is_owned():
        lock.release()


class HeldInForks:
    """Holds the lock of a store during forks, because a lock of another thread would stay locked in the child.

    The forking thread may hold the lock already, if a signal handler forks during a call. Then both processes continue
    that call.
    """

    def __init__(self) -> None:
        self._holders: set[int] = set()  # threads that acquired the lock for a fork

    def before(self, lock: Any) -> None:
        """Acquire the lock."""
        if not lock._is_owned():
            self._holders.add(threading.get_ident())
            lock.acquire()

    def after_in_parent(self, lock: Any) -> None:
        """Release the lock, unless the thread held it before the fork."""
        if threading.get_ident() in self._holders:
            release_if_owned(lock)
            self._holders.discard(threading.get_ident())

    def after_in_child(self, lock: Any) -> Any:
        """Return the lock for the child: the same lock if this thread owns it, else a new one.

        A call under a signal handler that forked may wait for the same lock.
        """
        if not lock._is_owned():
            lock = threading.RLock()
        elif threading.get_ident() in self._holders:
            lock.release()
        self._holders.clear()
        return lock


def check_note(name: str, text: str, seconds: float, replaces: str | None) -> int:
    """Check the arguments of a note, and return its lifetime in microseconds."""
    if not isinstance(name, str) or not isinstance(text, str):
        raise ConfigError(f"a note is a text under a name, not {type(text).__name__} under {name!r}")
    if not isinstance(replaces, str | None):
        raise ConfigError(f"the text to replace is a str or None, not {type(replaces).__name__}")
    if not is_number(seconds) or not 0 < seconds <= LONGEST_NOTE:  # also false for NaN
        raise ConfigError(f"a note is kept for more than 0 and up to {LONGEST_NOTE} seconds, not {seconds!r}")
    return max(1, to_microseconds(seconds))


def note_bytes(text: str) -> bytes:
    """Encode the text of a note."""
    return text.encode("utf-8", "surrogatepass")


def note_text(stored: bytes) -> str:
    """Decode the text of a note.

    Raises:
        StoreConflict: The stored data are not valid UTF-8.
    """
    try:
        return stored.decode("utf-8", "surrogatepass")
    except (AttributeError, UnicodeDecodeError) as error:
        raise StoreConflict(f"the stored note is not valid UTF-8: {stored!r:.80}") from error
