"""When a store is down: whether it is worth asking, and who answers meanwhile.

A `Breaker` knows whether a store is worth asking. The first call that fails opens it, and from then on nobody waits for the
store any more. It is probed in the background, by nobody's call, ever less often; once a probe succeeds, one single call
is tried, and if that succeeds too, all go back. (A probe only reads. A server that has become a read-only replica, or has no
memory left, answers it and still cannot count.)

A `StandIn` answers while the store does not, by the limiter's policy. Nothing here waits, so threads and tasks share it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd
from typing import Literal

from headgate._fork import watch
from headgate.algorithms import Algorithm, algorithm_for
from headgate.decision import Decision, Verdict
from headgate.errors import ConfigError, CostTooHigh, StoreError, StoreUnavailable
from headgate.keys import Key, key_picker
from headgate.quota import Quota
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Gate, Receipts, Tiers, check_whole
from headgate.stores.memory import MemoryStore
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
"""Seconds between two probes; each pause is twice the one before."""

TRY_AGAIN_US = 1_000_000
"""What a refusal by policy names as its `retry_after`: when the store will be back, nobody knows."""


@dataclass(frozen=True, slots=True)
class Local:
    """Limit in the memory of each process, with a share of each limit; made by `local`."""

    share: Fraction


OnStoreError = Literal["open", "closed", "raise"] | Local
"""What a limiter answers when its store cannot be asked."""


def local(share: float = 0.25) -> Local:
    """Return the policy to limit in this process's memory with a share of each limit while the store is down.

    With n processes, an outage admits at most n times the share of each limit. A share that leaves less than one whole
    unit of a limit admits nothing there.
    """
    if not 0 < share <= 1:  # also false for NaN
        raise ConfigError(f"a share is above 0 and at most 1, not {share!r}")
    return Local(
        Fraction(repr(share))
    )  # the number as it was written: 0.3 of 10 is 3, though the double is below it


def check_policy(policy: OnStoreError) -> OnStoreError:
    """Refuse what is no policy."""
    if isinstance(policy, Local) or policy in ("open", "closed", "raise"):
        return policy
    raise ConfigError(f"on_store_error is 'open', 'closed', 'raise' or local(share=0.25), not {policy!r}")


class Breaker:
    """Whether a store is worth asking; shared by all limiters on it.

    Attributes:
        is_closed: Whether calls go to the store.
        outages: How often the store has become unavailable.
        failures: How many calls had to wait for the store before it failed them; probes are nobody's calls.
        reason: Why it did, the last time.
        memory: Where limiters count that limit locally meanwhile. It is the store's, so that a limiter made anew in an
            outage goes on with what was counted, and does not hand out its share again.
    """

    def __init__(self, store: object, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.is_closed = True
        self.outages = 0
        self.failures = 0
        self.memory = MemoryStore()
        self._name = repr(store)
        self._monotonic = monotonic
        self._lock = watch(threading.Lock())
        self._epoch = (
            0  # counts changes, so that a call that was sent before one says nothing about the time after it
        )
        self._is_on_trial = False
        self._since = 0.0
        self._pause = FIRST_PAUSE
        self._next_probe = 0.0
        self.reason = ""
        self._has_reported = False

    def admit(self, charges: bool = True) -> int | None:
        """Return a ticket to ask the store with, or `None` if it is not worth asking.

        On trial, one call that charges is let through; calls that only look may pass too, but prove nothing.
        """
        if self.is_closed:
            return self._epoch
        with self._lock:
            if not self._is_on_trial:
                return None
            if charges:
                self._is_on_trial = False
            return self._epoch

    def succeeded(self, ticket: int, charges: bool = True) -> None:
        """Take note that the store has answered."""
        if self.is_closed or not charges:
            return
        with self._lock:
            if ticket != self._epoch or self.is_closed:
                return
            self.is_closed = True
            self._epoch += 1
            self._pause = FIRST_PAUSE
            seconds = self._monotonic() - self._since
        logger.warning("%s is back after %.1f s", self._name, seconds)

    def failed(self, ticket: int, error: StoreError) -> None:
        """Take note that the store has not answered, or not as it should."""
        if not isinstance(error, StoreUnavailable):
            return self._report(error)
        with self._lock:
            self.failures += 1
            if ticket != self._epoch:
                return None
            self._is_on_trial = False
            self._next_probe = self._monotonic() + self._pause
            self.reason = str(error)
            if not self.is_closed:
                return None
            self.is_closed = False
            self._epoch += 1
            self._since = self._monotonic()
            self.outages += 1
        logger.warning(
            "%s is unavailable, its limiters answer by their policies: %s", self._name, self.reason
        )
        return None

    def gave_up(self, ticket: int) -> None:
        """Take note that a call ended without telling anything about the store, so that another may try."""
        with self._lock:
            if ticket == self._epoch and not self.is_closed:
                self._is_on_trial = True

    def wants_probe(self) -> bool:
        """Return whether the caller should start a probe, now and in the background; true for one caller at a time."""
        now = self._monotonic()
        with self._lock:
            if self.is_closed or self._is_on_trial or now < self._next_probe:
                return False
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            # Counted from its start: nothing waits for the end of a probe whose event loop or process may be gone.
            self._next_probe = now + self._pause
            return True

    def probed(self) -> None:
        """Take note that a probe was answered."""
        with self._lock:
            self._is_on_trial = not self.is_closed

    def error(self) -> StoreUnavailable:
        """Return the error of a call that the store was not asked for."""
        return StoreUnavailable(f"not asked, because it was unavailable a moment ago: {self.reason}")

    def _report(self, error: StoreError) -> None:
        """Log, the first time, that the store is there but something is wrong with what it holds."""
        with self._lock:
            if self._has_reported:
                return
            self._has_reported = True
        logger.warning("%s; such calls are answered by policy, which is logged only once", error)


_breakers: weakref.WeakKeyDictionary[object, Breaker] = weakref.WeakKeyDictionary()
_breakers_lock = watch(threading.Lock())


def breaker_of(store: object) -> Breaker:
    """Return the breaker of a store, so that an outage is found out once and not once per limiter."""
    with _breakers_lock:
        breaker = _breakers.get(store)
        if breaker is None:
            breaker = _breakers[store] = Breaker(store)
        return breaker


class LocalPlace:
    """Where a hold was taken that the store knows nothing of."""

    __slots__ = ("place",)

    def __init__(self, place: object) -> None:
        self.place = place


class StandIn:
    """What a limiter answers while its store does not; every decision is marked as degraded.

    Args:
        limiter: Name of the limiter.
        rules: Its rules.
        policy: Its policy.
        memory: Where it counts if it limits locally.

    Attributes:
        answers: How many decisions it has made.
    """

    def __init__(
        self, limiter: str, rules: tuple[Rule, ...], policy: OnStoreError, memory: MemoryStore
    ) -> None:
        self.answers = 0
        self._policy = policy
        self._names = tuple(rule.name for rule in rules)
        self._tiers = Tiers(rules)
        self._pick = key_picker(rules)
        self._local: Gate | None = None
        if isinstance(policy, Local):
            self._local = memory.bind(limiter, tuple(_shared(rule, policy.share) for rule in rules))

    def ask(self, request: Request, error: StoreError) -> Answer:
        """Answer a request that the store could not, because of this error."""
        if request.operation == "record":
            return self._record(request, error)
        algorithms = self._tiers.admitting(request.tier, request.cost)
        self._pick(request.key)
        self._raise_if_asked(error)
        self.answers += 1
        if self._local is not None:
            return self._ask_local(self._local, request)
        verdict = _open if self._policy == "open" else _closed
        decision = Decision.make(self._names, [verdict(a, request.cost) for a in algorithms], degraded=True)
        if self._policy == "open" or algorithms or not request.cost:
            return decision, None
        return decision.as_refused(TRY_AGAIN_US), None  # it has no rules here, because its server has them

    def _record(self, request: Request, error: StoreError) -> Answer:
        check_whole(request.cost)
        self._pick(request.key)
        self._raise_if_asked(error)
        return RECORDED if self._local is None else self._local.ask(request)

    def _ask_local(self, local: Gate, request: Request) -> Answer:
        try:
            decision, receipts = local.ask(request)
        except CostTooHigh:  # for the share of this process, not for the limit itself
            left = local.ask(Request("peek", request.key, 0, request.tier, request.now))[0].verdicts
            refused = [v._replace(allowed=False, retry_after_us=TRY_AGAIN_US) for v in left]
            return Decision.make(self._names, refused, degraded=True), None
        taken = receipts and tuple((LocalPlace(place), receipt) for place, receipt in receipts)
        return decision.as_degraded(), taken

    def refund_failed(self, error: StoreError) -> None:
        """Leave units counted that could not be given back to the store: they expire by themselves."""
        self._raise_if_asked(error)

    def refund_local(self, receipts: Receipts, cost: int, now: int | None) -> bool:
        """Give back what was taken here; false if it was not."""
        if not receipts or not isinstance(receipts[0][0], LocalPlace):
            return False
        if self._local is not None:
            own = tuple(
                (place.place, receipt) for place, receipt in receipts if isinstance(place, LocalPlace)
            )
            self._local.refund(own, cost, now)
        return True

    def reset(self, key: Key | None) -> None:
        """Forget what was counted here."""
        if self._local is not None:
            self._local.reset(key)

    def _raise_if_asked(self, error: StoreError) -> None:
        if self._policy == "raise":
            raise error


class Health:
    """How a limiter's store has been doing; one that never fails is always well."""

    def __init__(self, breaker: Breaker | None = None, stand_in: StandIn | None = None) -> None:
        self._breaker = breaker
        self._stand_in = stand_in

    @property
    def available(self) -> bool:
        """Whether calls go to the store."""
        return self._breaker is None or self._breaker.is_closed

    @property
    def reason(self) -> str | None:
        """Why calls do not go to the store, without credentials; `None` if they do."""
        return None if self._breaker is None or self._breaker.is_closed else self._breaker.reason

    @property
    def outages(self) -> int:
        """How often the store has become unavailable."""
        return 0 if self._breaker is None else self._breaker.outages

    @property
    def failures(self) -> int:
        """How many calls, of all limiters on this store, had to wait for it before it failed them."""
        return 0 if self._breaker is None else self._breaker.failures

    @property
    def degraded(self) -> int:
        """How many decisions of this limiter were made by its policy instead of the store."""
        return 0 if self._stand_in is None else self._stand_in.answers

    def __repr__(self) -> str:
        state = "available" if self.available else "unavailable"
        return (
            f"<Health: {state}, {self.outages} outages, {self.failures} failures, {self.degraded} degraded>"
        )


def _open(algorithm: Algorithm, cost: int) -> Verdict:
    """Admit as if nothing had been counted; but what is never admitted needs no store to be refused."""
    if cost and not algorithm.capacity:
        return Verdict(False, 0, 0, None, None)
    return Verdict(True, algorithm.capacity, algorithm.capacity - cost, None, 0)


def _closed(algorithm: Algorithm, cost: int) -> Verdict:
    if not cost:
        return Verdict(True, algorithm.capacity, 0, None, None)
    return Verdict(False, algorithm.capacity, 0, TRY_AGAIN_US if algorithm.capacity else None, None)


def _shared(rule: Rule, share: Fraction) -> Rule:
    """Return a rule with a share of each of its quotas."""
    return replace(
        rule,
        quota=_share_of(rule, rule.quota, share),
        tiers={tier: _share_of(rule, quota, share) for tier, quota in rule.tiers.items()},
    )


def _share_of(rule: Rule, quota: Quota, share: Fraction) -> Quota:
    limit = int(quota.limit * share)
    burst = None if quota.burst is None else int(quota.burst * share)
    if limit == 0 or burst == 0:
        return Quota(0, quota.period_us)
    shared = Quota(limit, quota.period_us, burst)
    try:
        algorithm_for(rule, shared)
    except ConfigError:
        # A token bucket counts exactly if its limit and period have much in common; the share of a round limit need
        # not. The share of the part that is not in common is a little less, and as round as the limit itself.
        common = gcd(quota.limit, quota.period_us)
        limit = int(quota.limit // common * share) * common
        return Quota(limit, quota.period_us, burst) if limit else Quota(0, quota.period_us)
    return shared
