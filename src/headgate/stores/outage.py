"""When a store cannot be asked: who answers meanwhile, and how that is seen from outside.

A `StandIn` answers while the store does not, by the limiter's failure policy. Whether the store is worth asking is known to
its `Breaker`. Nothing here waits, so threads and tasks share it.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import gcd
from typing import Literal

from headgate.algorithms import Algorithm, algorithm_for
from headgate.costs import Costs
from headgate.decision import Decision, Verdict
from headgate.errors import ConfigError, CostTooHigh, StoreError, StoreOverloaded
from headgate.keys import Key, key_picker
from headgate.quota import Quota
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Gate, Receipts, plain_tiers
from headgate.stores.breaker import Breaker
from headgate.stores.failure import Local, OnOverload, OnStoreError
from headgate.stores.memory import MemoryStore
from headgate.stores.request import Request

TRY_AGAIN_US = 1_000_000
"""What a refusal by policy names as its `retry_after`: when the store will be back is unknown."""

OVERLOAD_US = 100_000
"""What a refusal for overload names as its `retry_after`: this process may have caught up by then."""


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
        policy: Its failure policy.
        memory: Where it counts if it limits locally.
        on_overload: Whether it refuses, or answers by its policy, when this process could not send a call.

    Attributes:
        answers: How many decisions it has made.
    """

    def __init__(
        self,
        limiter: str,
        rules: tuple[Rule, ...],
        policy: OnStoreError,
        memory: MemoryStore,
        on_overload: OnOverload = "refuse",
    ) -> None:
        self.answers = 0
        self._policy = policy
        self._refuses_overload = on_overload == "refuse"
        self._names = tuple(rule.name for rule in rules)
        self._tiers = plain_tiers(rules)
        self._pick = key_picker(rules)
        self._rules = rules
        self._local: Gate | None = None
        if isinstance(policy, Local):
            self._local = memory.bind(limiter, tuple(_shared(rule, policy.fraction) for rule in rules))

    def ask(self, request: Request, error: StoreError) -> Answer:
        """Answer a request that the store could not, because of this error."""
        if request.operation == "record":
            return self._record(request, error)
        algorithms = self._tiers.for_request(request)
        costs = request.costs(len(algorithms))
        self._pick(request.key)
        is_overload = isinstance(error, StoreOverloaded) and self._refuses_overload
        if not is_overload:
            self.raise_if_asked(error)
        self.answers += 1
        # A place that the store has counted stays taken, as far as this process can know.
        is_kept = request.operation == "renew" and self._local is not None
        if (self._policy == "open" or is_kept) and not is_overload:
            verdicts = list(map(_open, algorithms, costs))
            return Decision.make(self._names, verdicts, degraded=True), None
        if self._local is not None and not is_overload:
            return self._ask_local(self._local, request)
        pause_us = OVERLOAD_US if is_overload else TRY_AGAIN_US
        verdicts = [_closed(a, cost, pause_us) for a, cost in zip(algorithms, costs, strict=True)]
        decision = Decision.make(self._names, verdicts, degraded=True)
        if algorithms or not request.charges:
            return decision, None
        return decision.as_refused(pause_us), None  # it has no rules here, because its server has them

    def renew_local(self, request: Request) -> Answer | None:
        """Renew the lease of a hold that was taken here; `None` if it was not."""
        if self._local is None or not request.replaces or not self.has_taken(request.replaces):
            return None
        self.answers += 1
        return self._ask_local(self._local, request)

    def _record(self, request: Request, error: StoreError) -> Answer:
        self._tiers.for_request(request)
        self._pick(request.key)
        self.raise_if_asked(error)
        if self._local is not None:
            self._local.ask(self._for_local(request))
        self.answers += 1
        return RECORDED[0].as_degraded(), None

    def _ask_local(self, local: Gate, request: Request) -> Answer:
        try:
            decision, receipts = local.ask(self._for_local(request))
        except CostTooHigh:  # for the share of this process, not for the limit itself
            left = local.ask(Request("peek", request.key, 0, request.tier, request.now))[0].verdicts
            refused = [v._replace(allowed=False, retry_after_us=TRY_AGAIN_US) for v in left]
            return Decision.make(self._names, refused, degraded=True), None
        taken = receipts and tuple((LocalPlace(place), receipt) for place, receipt in receipts)
        return decision.as_degraded(), taken

    def _for_local(self, request: Request) -> Request:
        """Return what is asked of this process's memory: a share of the caller's own quotas, and what was taken here."""
        if request.replaces is not None:
            request = request.replacing(_local_part(request.replaces))
        if request.quotas is None or not isinstance(self._policy, Local):
            return request
        share = self._policy.fraction
        return request.with_quotas(
            tuple(
                q and _share_of(rule, q, share) for rule, q in zip(self._rules, request.quotas, strict=True)
            )
        )

    def has_taken(self, receipts: Receipts) -> bool:
        """Return whether a hold was taken here, so that the store knows nothing of it."""
        return _local_part(receipts) is not None

    def refund_local(self, receipts: Receipts, cost: Costs, now: int | None) -> bool:
        """Give back what was taken here; false if it was not."""
        own = _local_part(receipts)
        if own is None:
            return False
        if self._local is not None:
            self._local.refund(own, cost, now)
        return True

    def reset(self, key: Key | None) -> None:
        """Forget what was counted here."""
        if self._local is not None:
            self._local.reset(key)

    def raise_if_asked(self, error: StoreError) -> None:
        """Raise the error of a store if that is the policy."""
        if self._policy == "raise":
            raise error


class Health:
    """How a limiter's store has been doing; one that never fails is always well.

    Attributes:
        misconfiguration: Why the store refuses this limiter, until a call succeeds; `None` if it does not.
    """

    def __init__(self, breaker: Breaker | None = None, stand_in: StandIn | None = None) -> None:
        self.misconfiguration: str | None = None
        self._breaker = breaker
        self._stand_in = stand_in

    @property
    def state(self) -> Literal["available", "unavailable", "misconfigured"]:
        """Whether the store counts; if not, whether it is down or somebody has to change something."""
        if self._breaker is not None and not self._breaker.is_closed:
            return "unavailable"
        return "available" if self.misconfiguration is None else "misconfigured"

    @property
    def available(self) -> bool:
        """Whether the store counts for this limiter."""
        return self.state == "available"

    @property
    def reason(self) -> str | None:
        """Why the store is not available, without credentials; `None` if it is."""
        if self._breaker is not None and not self._breaker.is_closed:
            return self._breaker.reason
        return self.misconfiguration

    @property
    def outages(self) -> int:
        """How often the store has become unavailable."""
        return 0 if self._breaker is None else self._breaker.outages

    @property
    def failures(self) -> int:
        """How many calls, of all limiters on this store, had to wait for it before it failed them."""
        return 0 if self._breaker is None else self._breaker.failures

    @property
    def overloads(self) -> int:
        """How many calls, of all limiters on this store, this process could not send in time."""
        return 0 if self._breaker is None else self._breaker.overloads

    @property
    def degraded(self) -> int:
        """How many decisions of this limiter were not made by the store."""
        return 0 if self._stand_in is None else self._stand_in.answers

    def __repr__(self) -> str:
        return (
            f"<Health: {self.state}, {self.outages} outages, {self.failures} failures, "
            f"{self.overloads} overloads, {self.degraded} degraded>"
        )


def _local_part(receipts: Receipts | None) -> Receipts | None:
    """Return the receipts of a hold that was taken while the store was down, as the memory gave them."""
    if not receipts or not isinstance(receipts[0][0], LocalPlace):
        return None
    return tuple((place.place, receipt) for place, receipt in receipts if isinstance(place, LocalPlace))


def _open(algorithm: Algorithm, cost: int) -> Verdict:
    """Admit as if nothing had been counted; but what is never admitted needs no store to be refused."""
    if cost and not algorithm.capacity:
        return Verdict(False, 0, 0, None, None)
    return Verdict(True, algorithm.capacity, algorithm.capacity - cost, None, 0)


def _closed(algorithm: Algorithm, cost: int, pause_us: int) -> Verdict:
    if not cost:
        return Verdict(True, algorithm.capacity, 0, None, None)
    return Verdict(False, algorithm.capacity, 0, pause_us if algorithm.capacity else None, None)


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
