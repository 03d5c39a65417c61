"""What a store is: the thing that makes the algorithms atomic, and nothing else.

A store *binds* a limiter's rules once and is then called often. Binding is where keys are prepared, scripts registered and
shapes packed. The bound *gate* has one way in, `ask`, for every kind of request, besides `refund` and `reset`. What stands
around a gate (a clock, hooks, a failure policy, a live policy) is a gate itself.

All times are whole microseconds; `None` means the store's own clock.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from headgate.algorithms import Algorithm, Receipt, algorithm_for, check_cost
from headgate.clock import Clock, to_microseconds
from headgate.decision import UNLIMITED, Decision
from headgate.errors import ConfigError, StoreConflict
from headgate.keys import Key
from headgate.quota import MAX_UNITS
from headgate.rules import Rule
from headgate.stores.request import Request

Receipts = tuple[tuple[object, Receipt], ...]
"""What a hold needs to give its units back: per rule, where they were charged and the algorithm's receipt."""

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

NewBirth = Callable[[], int]
"""Returns a number that no other state has as its birth."""


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


class AsyncNotes(Protocol):
    """What a store may be able to do besides: keep a short text under a name, decided once for all callers.

    The first caller decides what the text is, whatever the concurrency, in tasks and processes, and every caller gets the
    same. So that what must be done once is done once, also after a restart. To note the same again does nothing, so
    a call whose outcome is unknown may be repeated. Notes share nothing with states: neither names nor room.
    """

    @property
    def remote(self) -> bool:
        """Whether calls go over a network."""

    async def note(self, name: str, text: str, seconds: float) -> str:
        """Keep a text under a name for at least so long, unless there is one already, and return the one that is kept.

        Raises:
            ConfigError: These are no name, text and time.
            StoreError: It could not be kept, or nobody knows whether it was.
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
        answered with `RECORDED`.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
            CostTooHigh: No waiting would ever admit the cost.
            StoreError: The store could not answer.
        """

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        """Give back up to `cost` units of a hold, as far as they still count."""

    def reset(self, key: Key | None) -> None:
        """Forget what was counted for a key."""


class AsyncGate(Protocol):
    """As `Gate`, with methods to be awaited."""

    async def ask(self, request: Request) -> Answer:
        """See `Gate.ask`."""

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        """See `Gate.refund`."""

    async def reset(self, key: Key | None) -> None:
        """See `Gate.reset`."""


class ImmediateGate:
    """A gate that never waits, for coroutines."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    async def ask(self, request: Request) -> Answer:
        """See `Gate.ask`."""
        return self.gate.ask(request)

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        """See `Gate.refund`."""
        self.gate.refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        """See `Gate.reset`."""
        self.gate.reset(key)


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


def births() -> NewBirth:
    """Return a source of numbers for new states: a random start, then one by one.

    Two sources, in two processes or before and after a restart, meet with a chance of about one in 2^53 per pair. A fork
    gives the child a start of its own: counting on from the parent's, both would give the same birth to two states.
    """
    numbers, process = count(), -1

    def new_birth() -> int:
        nonlocal numbers, process
        if process != os.getpid():
            numbers = count(random.SystemRandom().randrange(1, MAX_UNITS))
            process = os.getpid()
        return next(numbers) % (MAX_UNITS - 1) + 1

    return new_birth


class Tiers:
    """The algorithms of a limiter's rules, by tier."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        known = {tier for rule in rules for tier in rule.tiers}
        self._own = tuple(algorithm_for(rule) for rule in rules)
        self._by_tier = {
            tier: tuple(algorithm_for(rule, rule.quota_for(tier)) for rule in rules) for tier in known
        }
        everyone = [a.capacity for algorithms in (self._own, *self._by_tier.values()) for a in algorithms]
        self._always_fits = min(filter(None, everyone), default=0)  # a cost that needs no closer look

    def algorithms(self, tier: str | None) -> tuple[Algorithm, ...]:
        """Return what decides each rule for callers of this tier."""
        return self._own if tier is None else self._by_tier.get(tier, self._own)

    def admitting(self, tier: str | None, cost: int) -> tuple[Algorithm, ...]:
        """As `algorithms`, for a call that must be able to succeed.

        Raises:
            ConfigError: The cost is not a whole number of units.
            CostTooHigh: No waiting would ever admit it.
        """
        algorithms = self.algorithms(tier)
        if type(cost) is not int or not 0 <= cost <= self._always_fits:
            check_whole(cost)
            check_cost(algorithms, cost)
        return algorithms

    def recording(self, tier: str | None, cost: int) -> tuple[Algorithm, ...]:
        """As `algorithms`, for units that are counted even beyond the limits.

        Raises:
            ConfigError: The cost is not a whole number of units.
        """
        check_whole(cost)
        return self.algorithms(tier)

    def for_request(self, request: Request) -> tuple[Algorithm, ...]:
        """Return what decides each rule for a request, if its cost can be asked for."""
        choose = self.recording if request.operation == "record" else self.admitting
        return choose(request.tier, request.cost)


def check_whole(cost: int) -> None:
    """Refuse a cost that is not a whole number of units."""
    if type(cost) is not int or not 0 <= cost <= MAX_UNITS:
        raise ConfigError(f"a cost is a whole number from 0 to {MAX_UNITS}, not {cost!r}")


def check_deadline(seconds: float) -> float:
    """Return how many seconds a call may take, if it is a time that every store accepts."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= LONGEST_DEADLINE:  # also false for NaN
        raise ConfigError(
            f"a deadline is a number of seconds above 0 and at most {LONGEST_DEADLINE}, not {seconds!r}"
        )
    return float(seconds)


def release_down_to(lock: Any, taken: int) -> None:
    """Release a lock until this thread has taken it only so often.

    A `with` statement does so itself, but not if a signal handler raises before its block begins. That can happen since
    Python 3.14, where taking the lock is a call like any other.
    """
    while lock._recursion_count() > taken:
        lock.release()


def check_note(name: str, text: str, seconds: float) -> int:
    """Return for how many microseconds a note is to be kept, if it can be."""
    if not isinstance(name, str) or not isinstance(text, str):
        raise ConfigError(f"a note is a text under a name, not {type(text).__name__} under {name!r}")
    if not 0 < seconds <= LONGEST_NOTE:  # also false for NaN
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
