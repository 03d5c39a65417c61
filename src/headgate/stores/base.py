"""What a store is: the thing that makes the algorithms atomic, and nothing else.

A store *binds* a limiter's rules once and is then called often. Binding is where keys are prepared, scripts registered and
shapes packed. The bound *gate* has one way in, `ask`, for every kind of request, besides `refund` and `reset`. What stands
around a gate (a clock, hooks, a failure policy, a live policy) is a gate itself.

All times are whole microseconds; `None` means the store's own clock.
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
from headgate.algorithms import MAX_ENTRIES, Algorithm, Receipt, algorithm_for
from headgate.algorithms.base import Operation as Operation
from headgate.algorithms.base import Receipts as Receipts
from headgate.clock import Clock, to_microseconds
from headgate.costs import Costs, check_whole
from headgate.decision import UNLIMITED, Decision
from headgate.errors import ConfigError, CostTooHigh, StoreConflict
from headgate.keys import Key
from headgate.quota import MAX_UNITS, Quota, Quotas
from headgate.rules import DEFAULT_BUCKETS, Rule
from headgate.stores.request import Request

T = TypeVar("T")

Answer = tuple[Decision, Receipts | None]
"""What a gate answers: a decision and, for a hold that took units, its receipts."""

RECORDED: Answer = (UNLIMITED, None)
"""The answer to a request that only records."""

REENTERED = (
    "this store is in the middle of a call of this very thread; it cannot be asked from a signal handler, a __del__ "
    "method or a weak reference's callback that interrupts a limiter"
)
"""The error of a call from inside another call of the same thread, which must neither wait for it nor come in between."""

LONGEST_DEADLINE = 3600
"""Seconds: the longest time that a call to a store may take."""

LONGEST_NOTE = 3_000_000_000
"""Seconds, about 95 years: the longest that a note may be asked to be kept."""

QUOTAS_KEPT = 1024
"""For how many quotas of callers' own a gate keeps what it has prepared."""


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a store keeps of the promises, and what it cannot.

    Attributes:
        exact: Whether its decisions equal the pure functions', however many call at once.
        all_or_nothing: Whether several rules are charged together or not at all, whatever their keys.
        shared: Whether several processes count together.
        durable: Whether what was counted outlives the process.
        may_lose: In words, what a crash may lose; empty if nothing.
    """

    exact: bool = True
    all_or_nothing: bool = True
    shared: bool = False
    durable: bool = False
    may_lose: str = ""


class Closing(Unpicklable, ABC):
    """What a `with` or `async with` block closes at its end."""

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
    """A store that also keeps notes: short texts under a name, decided once for all callers.

    The first caller decides what the text is, whatever the concurrency, in tasks and processes, and every caller gets the
    same. So that what must be done once is done once, also after a restart. To note the same text again only keeps it for
    longer, so a call whose outcome is unknown may be repeated. Notes share nothing with states: neither names nor room.
    """

    @property
    def remote(self) -> bool:
        """Whether calls go over a network."""

    async def note(self, name: str, text: str, seconds: float) -> str:
        """Keep a text under a name for at least `seconds`, unless another text is kept there, and return the kept text.

        Raises:
            ConfigError: The name, text or time is not valid.
            StoreError: It could not be kept, or it is unknown whether it was.
        """

    async def noted(self, name: str) -> str | None:
        """Return the text that is kept under a name; `None` if there is none, or none any more.

        Raises:
            StoreError: The store could not be asked.
        """


class Gate(Protocol):
    """A limiter's rules, bound to a store."""

    def ask(self, request: Request) -> Answer:
        """Decide a request by all rules together: all are charged, or none.

        Returns the decision and, for a hold that took units, its receipts. What was recorded has nothing to decide, and is
        answered with `RECORDED`. Receipts that a hold replaces are given back in the same step, unless it is refused. A
        renewal extends the leases of its receipts; it is refused if one of them has ended or was given back.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number, or a rule that counts only holds
                is asked for a hit.
            CostTooHigh: No waiting would ever admit the cost.
            StoreError: The store could not answer.
        """

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give back up to `cost` units of a hold, of every rule or of each, as far as they still count."""

    def reset(self, key: Key | None) -> None:
        """Forget what was counted for a key."""


class AsyncGate(Protocol):
    """As `Gate`, with methods to be awaited."""

    async def ask(self, request: Request) -> Answer:
        """See `Gate.ask`."""

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """See `Gate.refund`."""

    async def reset(self, key: Key | None) -> None:
        """See `Gate.reset`."""


class AnyStore(Protocol):
    """What both kinds of limiters rely on."""

    @property
    def guarantees(self) -> Guarantees:
        """What this store keeps and what it cannot."""

    @property
    def clock(self) -> Clock | None:
        """The clock of this process that it counts by; `None` if its time is another machine's."""

    @property
    def remote(self) -> bool:
        """Whether calls go over a network: they take a deadline, and limiters have a policy for when it is missed."""

    @property
    def has_rules(self) -> bool:
        """Whether the store has rules of its own, so that a limiter without any must ask it nevertheless."""


class Store(AnyStore, Protocol):
    """What `Limiter` asks of a store."""

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        """Return the gate of these rules, which belong to the limiter of that name.

        A call to a remote store is given up after `deadline` seconds, by default what the store says.
        """

    def close(self) -> None:
        """Let go of connections and files; calls after this may raise StoreUnavailable."""


class AsyncStore(AnyStore, Protocol):
    """What `AsyncLimiter` asks of a store."""

    @property
    def notes(self) -> AsyncNotes | None:
        """Where short texts can be kept under a name; `None` if nowhere."""

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """As `Store.bind`."""

    async def aclose(self) -> None:
        """Let go of connections and files; calls after this may raise StoreUnavailable."""


class Births:
    """Numbers for new states: a random start, then one by one.

    Two sources, in two processes or before and after a restart, meet with a chance of about one in 2^53 per pair. A fork
    gives the child a start of its own: counting on from the parent's, both would give the same birth to two states.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()
        watch(self)

    def after_fork_in_child(self) -> None:
        """Begin anew."""
        self._numbers = count(random.SystemRandom().randrange(1, MAX_UNITS))

    def __call__(self) -> int:
        """Return the next number."""
        return next(self._numbers) % (MAX_UNITS - 1) + 1


class Tiers(Generic[T]):
    """What a store has prepared for each tier of a limiter's rules, and for quotas that callers bring along.

    Args:
        rules: The limiter's rules.
        prepare: Makes it of the algorithms of all rules.
        shared: Whether the store is shared, so that a state may have at most `MAX_ENTRIES` entries.

    Raises:
        ConfigError: A quota cannot be counted exactly, or its state would be too large.
    """

    def __init__(
        self, rules: tuple[Rule, ...], prepare: Callable[[tuple[Algorithm, ...]], T], *, shared: bool = False
    ) -> None:
        self._rules = rules
        self._shared = shared
        known = {tier for rule in rules for tier in rule.tiers}
        own, by_tier = self._algorithms(None), {tier: self._algorithms(tier) for tier in known}
        everyone = [a.capacity for algorithms in (own, *by_tier.values()) for a in algorithms]
        self.always_fits = min(filter(None, everyone), default=0)
        """A plain cost from 0 up to this one needs no closer look."""
        if any(rule.kind == "concurrent" for rule in rules):
            self.always_fits = -1
        self.own = prepare(own)
        self.by_tier = {tier: prepare(algorithms) for tier, algorithms in by_tier.items()}
        # Not a dictionary for good: quotas come from callers' data, and may be as many as there are callers.
        self._by_quotas = lru_cache(maxsize=QUOTAS_KEPT)(
            lambda tier, quotas: prepare(self._algorithms(tier, quotas))
        )

    def of(self, tier: str | None, quotas: Quotas | None = None) -> T:
        """Return what decides for callers of this tier, with these quotas."""
        if quotas is not None:
            return self._by_quotas(tier if tier in self.by_tier else None, quotas)
        return self.own if tier is None else self.by_tier.get(tier, self.own)

    def for_request(self, request: Request) -> T:
        """Return what decides a request, if its cost can be asked for.

        Raises:
            ConfigError: The cost is not a whole number of units, or a rule counts only holds, and this is none.
            CostTooHigh: No waiting would ever admit it.
        """
        cost = request.cost
        if type(cost) is not int or not 0 <= cost <= self.always_fits:
            check_costs(self._rules, request)
        return self.of(request.tier, request.quotas)

    def _algorithms(self, tier: str | None, quotas: Quotas | None = None) -> tuple[Algorithm, ...]:
        algorithms = []
        for rule, own in zip(self._rules, quotas or (None,) * len(self._rules), strict=True):
            quota = own or rule.quota_for(tier)
            if self._shared:
                check_entries(rule, quota)
            algorithms.append(algorithm_for(rule, quota))
        return tuple(algorithms)


def plain_tiers(rules: tuple[Rule, ...], *, shared: bool = False) -> Tiers[tuple[Algorithm, ...]]:
    """Return the tiers of a store that needs nothing but the algorithms."""
    return Tiers(rules, tuple, shared=shared)


def check_entries(rule: Rule, quota: Quota) -> None:
    """Refuse a quota whose state could have more entries than a shared store accepts.

    Raises:
        ConfigError: The limit of a sliding log, or the number of buckets, is above `MAX_ENTRIES`.
    """
    # With a limit of MAX_UNITS, which none can reach, counts are read and nothing is charged.
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
    """Refuse costs that no rule could take, or not as this request.

    Raises:
        ConfigError: A cost is not a whole number of units, or a rule counts only holds, and this is none.
        CostTooHigh: No waiting would ever admit it.
    """
    for cost in request.cost if isinstance(request.cost, tuple) else (request.cost,):
        check_whole(cost)
    quotas = request.quotas or (None,) * len(rules)
    for rule, cost, own in zip(rules, request.costs(len(rules)), quotas, strict=True):
        if rule.kind == "concurrent" and cost and request.operation in ("hit", "record"):
            raise ConfigError(f"rule {rule.name!r} counts what is held at once: use limiter.hold(...)")
        quota = own or rule.quota_for(request.tier)
        capacity = quota.limit if quota.burst is None else quota.burst
        if cost > capacity > 0 and request.operation not in ("record", "renew"):
            raise CostTooHigh(cost, capacity, rule.name, rule.unit)


def given_back(
    prepared: Iterable[T], receipts: Receipts, cost: Costs
) -> Iterator[tuple[T, tuple[object, Receipt], int]]:
    """Yield, for each rule of which a hold took units, what was prepared for it, its receipt, and how many to give back."""
    costs = cost if isinstance(cost, tuple) else (cost,) * len(receipts)
    for each, entry, units in zip(prepared, receipts, costs, strict=True):
        if entry[1] and units:
            yield each, entry, units


def check_deadline(seconds: float) -> float:
    """Return how many seconds a call may take, if it is a time that every store accepts."""
    if not is_number(seconds) or not 0 < seconds <= LONGEST_DEADLINE:  # also false for NaN
        raise ConfigError(
            f"a deadline is a number of seconds above 0 and at most {LONGEST_DEADLINE}, not {seconds!r}"
        )
    return float(seconds)


class CountedLock(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock for Python 3.11 before 3.11.6 and 3.12.0, where it says only in its `repr` how often it was taken."""

    def _recursion_count(self) -> int:
        return int(repr(self).partition(" count=")[2].split()[0]) if self._is_owned() else 0


HAS_COUNT = hasattr(threading.RLock(), "_recursion_count")
new_rlock: Callable[[], Any] = threading.RLock if HAS_COUNT else CountedLock
"""Makes the locks for `while_locked`."""


def while_locked(lock: Any, work: Callable[..., T], *args: Any) -> T:
    """Return what some work returns while a lock is held; it is released also if a signal handler raises, wherever that is.

    A `with` statement alone does not see to that if the handler raises before its block begins. This can happen since
    Python 3.14, where taking the lock is a call like any other.
    """
    taken = lock._recursion_count()
    try:
        lock.acquire()
        result = work(*args)
        lock.release()
    except BaseException:
        release_down_to(lock, taken)
        raise
    return result


def release_down_to(lock: Any, taken: int) -> None:
    """Release a lock until this thread has taken it only so often."""
    while lock._recursion_count() > taken:
        lock.release()


class HeldInForks:
    """Holds the lock of a store during forks: one that another thread has taken would stay taken for ever in the child."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # by thread that forks, how often it had taken the lock before

    def before(self, lock: Any) -> None:
        """Take the lock; if that is repeated, what was known of it stands."""
        self._taken.setdefault(threading.get_ident(), lock._recursion_count())
        lock.acquire()

    def after_in_parent(self, lock: Any) -> None:
        """Release what was taken here, if anything was."""
        if (taken := self._taken.get(threading.get_ident())) is not None:
            release_down_to(lock, taken)
            del self._taken[threading.get_ident()]

    def after_in_child(self, lock: Any, new_lock: Callable[[], Any]) -> Any:
        """Return the lock to go on with: the same, because a call of this thread may be inside of it, or wait for it while
        its signal handler has forked; a new one in place of that of a thread which is not in this process.
        """
        if lock._is_owned():  # also used by `Condition`
            release_down_to(lock, self._taken.get(threading.get_ident(), 0))
        else:
            lock = new_lock()
        self._taken.clear()
        return lock


def check_note(name: str, text: str, seconds: float) -> int:
    """Return for how many microseconds a note is to be kept, if it can be."""
    if not isinstance(name, str) or not isinstance(text, str):
        raise ConfigError(f"a note is a text under a name, not {type(text).__name__} under {name!r}")
    if not is_number(seconds) or not 0 < seconds <= LONGEST_NOTE:  # also false for NaN
        raise ConfigError(f"a note is kept for more than 0 and up to {LONGEST_NOTE} seconds, not {seconds!r}")
    return max(1, to_microseconds(seconds))


def note_bytes(text: str) -> bytes:
    """Return the text of a note as it is stored."""
    return text.encode("utf-8", "surrogatepass")


def note_text(stored: bytes) -> str:
    """Return the text of a note that is stored so.

    Raises:
        StoreConflict: It is none of ours.
    """
    try:
        return stored.decode("utf-8", "surrogatepass")
    except (AttributeError, UnicodeDecodeError) as error:
        raise StoreConflict(f"what is stored as a note is none: {stored!r:.80}") from error
