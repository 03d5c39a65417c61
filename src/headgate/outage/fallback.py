"""Answers by policy while the store is down, and the health for users.

Nothing here waits, so threads and tasks share it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import gcd
from typing import Literal, NamedTuple

from headgate.algorithms import Algorithm, Penalty, algorithm_for, limit_of
from headgate.costs import Costs
from headgate.decision import Decision, Verdict
from headgate.errors import (
    ConfigError,
    CostTooHigh,
    StoreError,
    StoreMisconfigured,
    StoreOverloaded,
    StoreUnavailable,
)
from headgate.keys import Key, key_picker
from headgate.outage.breaker import Breaker
from headgate.outage.policies import Local, OnOverload, OnStoreError
from headgate.quota import Quota
from headgate.rules import Rule, leased
from headgate.stores.base import RECORDED, Answer, Gate, Receipts, plain_tiers
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

TRY_AGAIN_US = 1_000_000
"""The `retry_after` of a refusal by policy, because the end of the outage is unknown."""

OVERLOAD_US = 100_000
"""The `retry_after` of a refusal for overload: long enough for this process to catch up."""

_NEVER_DOWN = Breaker("a store that cannot fail")


class Health:
    """The health of a limiter's store; a store that cannot fail is always available.

    Attributes:
        misconfiguration: The reason why the store refuses this limiter, until a call succeeds; otherwise `None`.
        degraded: Decisions of this limiter that the store did not make.
    """

    def __init__(self, breaker: Breaker = _NEVER_DOWN) -> None:
        self.misconfiguration: str | None = None
        self.degraded = 0
        self._breaker = breaker

    @property
    def state(self) -> Literal["available", "unavailable", "misconfigured"]:
        """The state of the store: it counts, it is down, or its configuration must be changed."""
        if not self._breaker.is_closed:
            return "unavailable"
        return "available" if self.misconfiguration is None else "misconfigured"

    @property
    def available(self) -> bool:
        """Whether the store counts for this limiter."""
        return self.state == "available"

    @property
    def reason(self) -> str | None:
        """The reason why the store is not available, without credentials; `None` if it is available."""
        return self.misconfiguration if self._breaker.is_closed else self._breaker.reason

    @property
    def outages(self) -> int:
        """Number of outages."""
        return self._breaker.outages

    @property
    def failures(self) -> int:
        """Calls of all limiters on this store that waited for it and failed."""
        return self._breaker.failures

    @property
    def overloads(self) -> int:
        """Calls of all limiters on this store that this process could not send in time."""
        return self._breaker.overloads

    def __repr__(self) -> str:
        return (
            f"<Health: {self.state}, {self.outages} outages, {self.failures} failures, "
            f"{self.overloads} overloads, {self.degraded} degraded>"
        )


class LocalPlace(NamedTuple):
    """Marks a receipt of a hold that the fallback took, not the store."""

    place: object


class FallbackLimiter:
    """Answers for a limiter while its store is down; every decision is marked as degraded.

    Args:
        limiter: Name of the limiter.
        rules: Its rules.
        policy: Its failure policy.
        breaker: The breaker of its store; its memory has the counts of the policy `local`.
        on_overload: Whether to refuse, or to answer by policy, when this process could not send a call.

    Attributes:
        health: The health of the store for this limiter.
        lost: The first request that the store failed to answer, for probes; `None` when it is back.
    """

    def __init__(
        self,
        limiter: str,
        rules: tuple[Rule, ...],
        policy: OnStoreError,
        breaker: Breaker,
        on_overload: OnOverload = "refuse",
    ) -> None:
        self.health = Health(breaker)
        self.lost: Request | None = None
        self._breaker = breaker
        self._policy = policy
        self._refuses_overload = on_overload == "refuse"
        rules = leased(rules, 0)  # it takes no chunks
        self._names = tuple(rule.name for rule in rules)
        self._tiers = plain_tiers(rules)
        self._pick = key_picker(rules)
        self._rules = rules
        self._local: Gate | None = None
        if isinstance(policy, Local):
            self._local = breaker.memory.bind(
                limiter, tuple(_shared(rule, policy.fraction) for rule in rules)
            )

    def decide(self, request: Request, error: StoreError) -> Answer:
        """Answer a request that the store failed to answer with this error."""
        self.note_misconfiguration(error)
        algorithms = self._tiers.for_request(request)
        self._pick(request.key)
        if (
            isinstance(error, StoreUnavailable) and self.lost is None
        ):  # a probe with an invalid key would never succeed
            self.lost = request
        is_overload = isinstance(error, StoreOverloaded) and self._refuses_overload
        is_record = request.operation == "record"
        if is_record or not is_overload:
            self.raise_if_asked(error)
        self.health.degraded += 1
        if is_record:
            if self._local is not None:
                self._local.decide(self._for_local(request))
            return RECORDED[0].as_degraded(), None
        costs = request.costs(len(algorithms))
        # The store may still count this place: admit its renewal, so that the work can continue.
        is_kept = request.operation == "renew" and self._local is not None
        if (self._policy == "open" or is_kept) and not is_overload:
            verdicts = list(map(_open, algorithms, costs))
            return Decision.make(self._names, verdicts, degraded=True), None
        if self._local is not None and not is_overload:
            with suppress(CostTooHigh):  # for the share of this process, not for the limit itself
                decision, receipts = self._local.decide(self._for_local(request))
                taken = receipts and tuple((LocalPlace(place), receipt) for place, receipt in receipts)
                return decision.as_degraded(), taken
        pause_us = OVERLOAD_US if is_overload else TRY_AGAIN_US
        verdicts = [_closed(a, cost, pause_us) for a, cost in zip(algorithms, costs, strict=True)]
        decision = Decision.make(self._names, verdicts, degraded=True)
        if algorithms or not request.charges:
            return decision, None
        # The limiter has no rules here, because its server has them.
        return decision.as_refused(pause_us), None

    def renew(self, request: Request) -> Answer | None:
        """Renew the leases of a hold that was taken here; return `None` if it was not."""
        if self._local is None or not self.has_taken(request.replaces):
            return None
        self.health.degraded += 1
        return self._local.decide(self._for_local(request))[0].as_degraded(), None

    def _for_local(self, request: Request) -> Request:
        """Return the request for local memory: with a share of the caller's quotas, and its local receipts."""
        request = request.as_attempt()  # its refusals do not count for penalties
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

    def has_taken(self, receipts: Receipts | None) -> bool:
        """Return whether a hold was taken here and not in the store."""
        return _local_part(receipts) is not None

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> bool:
        """Give back local units; return false if the store took them."""
        own = _local_part(receipts)
        if own is None:
            return False
        if self._local is not None:
            self._local.refund(own, cost, now)
        return True

    def reset(self, key: Key | None) -> None:
        """Forget local counts."""
        if self._local is not None:
            self._local.reset(key)

    def raise_if_asked(self, error: StoreError) -> None:
        """Raise the error of a store if that is the policy."""
        if self._policy == "raise":
            raise error

    def note_misconfiguration(self, error: StoreError) -> None:
        """Log a refusal of the store once; raise it if the store has never worked, because it is probably being set up."""
        if not isinstance(error, StoreMisconfigured):
            return
        if not self._breaker.has_worked:
            raise error
        if self.health.misconfiguration is None:
            logger.error("the store is misconfigured, its limiters answer by their policies: %s", error)
        self.health.misconfiguration = str(error)

    def note_success(self) -> None:
        """Log the end of a misconfiguration, if there was one."""
        if self.health.misconfiguration is not None:
            logger.warning("the store is configured correctly again after: %s", self.health.misconfiguration)
            self.health.misconfiguration = None


def _local_part(receipts: Receipts | None) -> Receipts | None:
    """Return the receipts of a hold that was taken while the store was down, in the form of the memory store."""
    if not receipts or not isinstance(receipts[0][0], LocalPlace):
        return None
    return tuple((place.place, receipt) for place, receipt in receipts if isinstance(place, LocalPlace))


def _open(algorithm: Algorithm, cost: int) -> Verdict:
    """Admit as if nothing had been counted; a rule with the limit 0 still refuses."""
    if cost and not algorithm.capacity:
        return Verdict(False, 0, 0, None, None)
    return Verdict(True, limit_of(algorithm), algorithm.capacity - cost, None, 0)


def _closed(algorithm: Algorithm, cost: int, pause_us: int) -> Verdict:
    if isinstance(algorithm, Penalty):
        return _open(algorithm, cost)
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
    if rule.kind == "penalty":
        return quota
    limit = int(quota.limit * share)
    burst = None if quota.burst is None else int(quota.burst * share)
    if limit == 0 or burst == 0:
        return Quota(0, quota.period_us)
    shared = Quota(limit, quota.period_us, burst)
    try:
        algorithm_for(rule, shared)
    except ConfigError:
        # A token bucket counts exactly only if its limit and period have a large common divisor, which the share of a
        # limit may not have. Then the common divisor is kept, and the share of the other factor is rounded down.
        common = gcd(quota.limit, quota.period_us)
        limit = int(quota.limit // common * share) * common
        return Quota(limit, quota.period_us, burst) if limit else Quota(0, quota.period_us)
    return shared
