"""The part of limiters that does not call the store, for threads and coroutines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Literal, NoReturn, TypeVar

from headgate._checks import Unpicklable, check_text
from headgate._fair_queue import FairQueue
from headgate.clock import MICROSECONDS, Clock, SteadyClock, WallClock, check_clock, instant
from headgate.costs import Cost, Units
from headgate.decision import Decision
from headgate.errors import ConfigError, listed
from headgate.keys import Key, PlainKey, key_picker
from headgate.leases.chunks import ChunkBook, leased_rules, with_lease
from headgate.outage.fallback import Health
from headgate.quota import Quotas
from headgate.quotas import QuotaCache, QuotaValue, quotas_of
from headgate.rules import Rule, rules_from
from headgate.stores import MemoryStore, open_handle
from headgate.stores.base import AnyStore, Guarantees, Operation, Receipts
from headgate.stores.handle import StoreHandle
from headgate.stores.request import Request

S = TypeVar("S", bound=AnyStore)
G = TypeVar("G")

HeaderStyle = Literal["both", "ietf", "x-ratelimit", "none"]
"""Which header fields HTTP edges write, in a word."""


Place = tuple[str, PlainKey]
"""Identity of a `concurrent` rule, and a key."""


class LimiterBase(Unpicklable, Generic[S, G]):
    """A named set of rules over a store: everything that does not call the store."""

    gate: G
    new_hold: Callable[..., Any]

    def _prepare(
        self,
        rules: tuple[str | Rule, ...],
        name: str | None,
        store: S | str | None,
        clock: Clock | None,
        method: str,
        lease: str | float | timedelta | None,
    ) -> None:
        """Check the arguments that need no store, and open the store.

        Args:
            rules: As for the class; so are name, store and clock.
            method: The method of the store that binds rules for this kind of limiter.
            lease: As for the class.
        """
        self.rules = rules_from(rules)
        if store is not None and not name:
            raise ConfigError(
                "a limiter on a given store needs a name=, to tell its counts from those of others"
            )
        self.name = check_text("a limiter's name", name or "", 0)
        self.units = Units(self.name, self.rules)
        self.health = Health()
        self._lines = FairQueue()
        self._turn_of = key_picker(self.rules)
        self._ping: Any = None
        given = check_clock(clock)
        self._handle = _handle_on(store, clock)
        self.store: S = self._checked(store, method) if self._handle is None else self._handle.store
        if lease is not None:
            if given is not None:
                raise ConfigError("a lease is measured by the machine's clock: use either lease= or clock=")
            self.rules = leased_rules(self.rules, lease, self.store)
            self._chunks = ChunkBook(self.rules) if self.rules else None
        self._clock: Clock = given or _pace_of(self.store)
        self._has_real_time = isinstance(self._clock, SteadyClock | WallClock)

    def _checked(self, store: Any, method: str) -> Any:
        """Return a given store if it can bind rules for this kind of limiter."""
        if hasattr(store, method) and not isinstance(store, type):
            return store
        raise ConfigError(
            f"{type(self).__name__} takes a URL or a store for it, like RedisStore(…), not {store!r:.60}"
        )

    def request(
        self,
        operation: Operation,
        key: Key | None,
        cost: Cost = 1,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
        *,
        is_final: bool = True,
    ) -> Request:
        """Return the request that a call sends to the gate, for code that calls the gate itself.

        With `is_final=False` no penalty counts its refusal.

        Raises:
            ConfigError: The cost does not fit the units of the rules, or the quota does not fit the rules.
        """
        if tier is not None:
            self._check_tier(tier)
        request = Request(operation, key, self.units.costs(cost), tier, instant(now), is_final=is_final)
        return request if quota is None else request.with_quotas(quotas_of(self.rules, quota))

    def _watch_tiers(self, strict: bool, *, is_used_otherwise: bool) -> None:
        """Report unknown tiers, unless a server has the rules or a quota function receives the tier.

        If no rule has tiers, only a strict limiter reports them: an application may pass the tier to all its limiters.
        """
        self._has_strict_tiers = strict
        known = frozenset(tier for rule in self.rules for tier in rule.tiers)
        if (known or strict) and not is_used_otherwise and not self.store.has_rules:
            self._known_tiers = known

    def _check_tier(self, tier: str) -> None:
        """Report a tier that no rule has: raise an error, or warn once.

        Raises:
            ConfigError: With `strict_tiers=True`.
        """
        known = self._known_tiers
        if known is None or not isinstance(tier, str) or tier in known or not self.rules:
            return
        has = f"its tiers are {listed(known)}" if known else "no rule has tiers="
        limiter = f"limiter {self.name!r}" if self.name else "the limiter"
        message = f"{limiter} has no tier {tier!r}, {has}: add it, or pass tier=None for the default quota"
        if self._has_strict_tiers:
            raise ConfigError(message)
        self._known_tiers = None  # warn once
        warnings.warn(message, stacklevel=3)

    def _is_too_late(self, refusal: Decision, deadline: int | None) -> bool:
        """Return whether waiting would end after the deadline, or never."""
        pause, _ = self._waits_for(refusal)
        return pause is None or (deadline is not None and self._clock.now_us() + pause > deadline)

    def _waits_for(self, refusal: Decision) -> tuple[int | None, str | None]:
        """Return the shortest wait in microseconds, and the name of the `concurrent` rule if only places are missing.

        The wait is `None` if the call will never be admitted. A place may be released at any time, long before its lease
        ends.
        """
        pause = refusal.retry_after_us
        if pause is None or not self.units.has_places:
            return pause, None
        has_places = {rule.name: rule.kind == "concurrent" for rule in self.rules}
        verdicts = zip(refusal.names, refusal.verdicts, strict=True)
        refusing = {name: verdict.retry_after_us for name, verdict in verdicts if not verdict.allowed}
        others = [wait or 0 for name, wait in refusing.items() if not has_places.get(name)]
        if others or not refusing:
            return max(others, default=pause), None
        return 1, refusal.rule

    def _place_pause(self, refusal: Decision, deadline: int | None) -> float:
        """Return the seconds after which a waiter tries again to take a place, even if none was released."""
        seconds = refusal.retry_after or 0
        if deadline is not None:
            seconds = min(seconds, (deadline - self._clock.now_us()) / MICROSECONDS)
        return max(0.0, seconds)

    def _release_places(self, key: Key | None) -> None:
        """Wake the first waiter of each place that a hold of this key has released."""
        self._queues.released(self._turn_of(key))

    # A limiter of a policy file changes with the file. HTTP edges prepare their headers for `current`, and again when
    # `current` is replaced. Other limiters never change.

    headers: HeaderStyle | None = None
    """The header fields that the policy configures."""

    terms_for: Callable[[Key | None, str | None, Quotas | None], tuple[str | None, Quotas | None]] | None = (
        None
    )
    """Returns the tier and quotas that decide a call, from its key, tier and quotas; `None` if calls keep theirs."""

    quotas: QuotaCache | None = None
    """Cached results of the function for callers' quotas; `None` without one."""

    _queues: Any
    """The queues of waiting calls."""

    _chunks: ChunkBook | None = None
    """The chunks of leased units; `None` without a lease."""

    def _stop_leases(self) -> None:
        """End all chunks, and take no more."""
        if self._chunks is not None:
            self._chunks.stop()

    @property
    def guarantees(self) -> Guarantees:
        """The guarantees of its store, with the changes by a lease."""
        return self.store.guarantees if self._chunks is None else with_lease(self.store.guarantees)

    _known_tiers: frozenset[str] | None = None
    """The tiers of all rules; `None` if unknown tiers are not reported."""

    _has_strict_tiers = False

    def settling(self, receipts: Receipts | None) -> G:
        """Return the gate on which a hold with these receipts is settled."""
        return self.gate

    @property
    def clock(self) -> Clock:
        """The clock for waits: the given clock, or that of the store."""
        return self._clock

    def _on_change(self, notify: Callable[[], None]) -> None:
        """Register a method to be called whenever `current` was replaced; its object is referenced weakly."""

    def __repr__(self) -> str:
        rules = ", ".join(str(rule) for rule in self.rules) or "unlimited"
        return f"<{type(self).__name__} {self.name or 'unnamed'}: {rules}>"


_RULE_OPTIONS = ("burst", "scope", "tiers", "unit", "buckets", "strict", "timezone")


def raise_unknown_option(limiter: str, options: Collection[str]) -> NoReturn:
    """Raise the error for an argument that limiters do not have, with the place where it belongs."""
    option = min(options)
    if option == "burst":
        raise ConfigError(
            f"burst= belongs to a rule: write {limiter}(token_bucket('10/s', burst=20)) or {limiter}('10/s burst 20')"
        )
    if option in _RULE_OPTIONS:
        raise ConfigError(
            f"{option}= belongs to a rule: write for example {limiter}(sliding_window('10/s', {option}=…))"
        )
    raise TypeError(f"{limiter}() got an unexpected keyword argument {option!r}")


def _handle_on(store: object, clock: Clock | None) -> StoreHandle | None:
    """Return a handle on the store of a URL, or on a new memory store without one; `None` if a store was given."""
    if store is None:
        return StoreHandle(partial(MemoryStore, clock=clock))
    return open_handle(store) if isinstance(store, str) else None


def _pace_of(store: AnyStore) -> Clock:
    """Return the clock for the waits of `wait`: the store's, so that the fake clock of a test works.

    A wall clock is replaced by a steady one: a time-out must not end early or late because the wall clock was set.
    """
    clock = store.clock
    return SteadyClock() if clock is None or isinstance(clock, WallClock) else clock
