"""Shadow rules, their counts, and live rules with shadow rules: the code that does not call a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Self, TypeGuard, TypeVar

from headgate._fork import watch
from headgate.costs import Costs
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh
from headgate.hooks import Call, Hooks, logger
from headgate.keys import Key
from headgate.policy.model import LimiterPolicy, tiers_of
from headgate.rules import SHARED, Rule
from headgate.stores.base import Receipts
from headgate.stores.request import Request

SHADOW = "shadow"
"""First entry in the place of a shadow rule's receipt: `(SHADOW, identity of the rule, place)`.

These are plain values, so that another process can use the receipt."""


class ShadowCount(NamedTuple):
    """Answers of a shadow rule in this process, since it was read or changed.

    Attributes:
        asked: Hits and holds that the live rules admitted. For a candidate, also calls that only its live rule refused.
        refused: Calls that the shadow rule would have refused.
        failed: Calls that it could not decide: the store was down, or the key lacks its scope.
        admitted: Calls that a candidate would have admitted although its live rule refused them.
    """

    asked: int
    refused: int
    failed: int
    admitted: int = 0


class ShadowTally:
    """Counts the answers of a shadow rule, in any thread."""

    def __init__(self, limiter: str, rule: str) -> None:
        self._limiter = limiter
        self._rule = rule
        self._counts = [0, 0, 0, 0]
        self._has_reported = False
        self._lock = watch(threading.Lock())

    def count(self, *, refused: bool = False, failed: bool = False, was_refused: bool = False) -> None:
        """Count one answer; with `was_refused`, of a candidate whose live rule refused the call."""
        with self._lock:
            self._counts[0] += 1
            self._counts[1] += refused
            self._counts[2] += failed
            self._counts[3] += was_refused and not refused and not failed

    def report(self, error: Exception) -> None:
        """Log why the rule could not count, the first time only."""
        with self._lock:
            if self._has_reported:
                return
            self._has_reported = True
        logger.warning(
            "shadow rule %r of limiter %r could not count a call; this is logged only once: %s",
            self._rule,
            self._limiter,
            error,
        )

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Log an exception of the block instead of raising it: a shadow rule must not affect calls."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.report(error)

    def so_far(self) -> ShadowCount:
        """Return the counts."""
        with self._lock:
            return ShadowCount(*self._counts)


class ShadowRule:
    """One shadow rule. Each is decided separately, so that a refusal of one does not affect the counts of another.

    Attributes:
        rule: The rule.
        candidate_for: The name of the live rule that it may replace, or `None`.
        tally: Counts of its answers.
    """

    def __init__(
        self, rule: Rule, policy: LimiterPolicy, gate: Any, hooks: Hooks, tally: ShadowTally
    ) -> None:
        self.rule = rule
        self.candidate_for = policy.candidate_for.get(rule.name)
        self.tally = tally
        self._policy = policy
        self._hooks = hooks
        # The tiers that would be known if the rule were live.
        self._known = tiers_of((*policy.rules, rule))
        # With a cost per live rule, the cost of this rule is that of a live rule with the same unit, if possible with the
        # same scope too.
        alike = [
            i
            for i, live in enumerate(policy.rules)
            if live.unit == rule.unit and (live.kind == "concurrent") is (rule.kind == "concurrent")
        ]
        self._like = next(
            (i for i in alike if policy.rules[i].scope == rule.scope), alike[0] if alike else None
        )
        self._gate = gate

    def cost_in(self, cost: Costs) -> int:
        """Return the cost of this rule; 0 if no live rule has the same unit."""
        if isinstance(cost, int):
            return cost
        return 0 if self._like is None else cost[self._like]

    def _call_of(self, request: Request) -> Call:
        """Return the call for hooks; a hold is reported as a hit, because its end is not reported."""
        return Call(self._policy.name, "hit", request.key, self.cost_in(request.cost), request.tier)

    def _count(self, call: Call, decision: Decision, seconds: float, was_refused: bool) -> None:
        # A degraded decision does not come from the rule; the failure of the store is logged elsewhere.
        self.tally.count(
            refused=not decision.allowed and not decision.degraded,
            failed=decision.degraded,
            was_refused=was_refused,
        )
        self._hooks.decided(call, decision, seconds)

    def _count_failure(self, error: Exception) -> None:
        if isinstance(error, CostTooHigh):
            self.tally.count(refused=True)
        else:
            self.tally.count(failed=True)
            self.tally.report(error)

    def _own_request(self, request: Request) -> Request:
        """Return the request for this rule."""
        cost, replaces = self.cost_in(request.cost), request.replaces
        if request.operation == "renew":
            cost = 1  # a lease keeps its units
        tier = self._policy.tier_among(self._known, request.tier)
        own = self._policy.override_for(request.key).get(self.rule.name)
        costs = cost if replaces is None else (cost,)
        plain = Request(request.operation, self._own(request.key), costs, tier, request.now, None, replaces)
        return plain if own is None else plain.with_quotas((own,))

    def _own(self, key: Key | None) -> Key | None:
        """Return the part of a call's key with the scope of this rule."""
        scope = self.rule.scope
        if scope is None or scope == SHARED or not isinstance(key, Mapping):
            return key
        if scope not in key:
            raise ConfigError(f"the key has no entry for {scope!r}, the scope of the rule")
        return {scope: key[scope]}


S = TypeVar("S", bound=ShadowRule)


class ShadowedRules(Generic[S]):
    """Base of the gate of a limiter with a policy.

    Args:
        live: The gate of the live rules.
        policy: The policy of the limiter.
        shadows: Its shadow rules.
        together: Whether shadow rules are called concurrently: on a network store, which can batch the calls.
    """

    def __init__(self, live: Any, policy: LimiterPolicy, shadows: Sequence[S], *, together: bool) -> None:
        self._live = live
        self._policy = policy
        self._shadows = tuple(shadows)
        self._by_identity = {shadow.rule.identity: shadow for shadow in shadows}
        # Not concurrent rules: the duration of a refused hold is unknown.
        self._candidates = [s for s in shadows if s.candidate_for is not None and s.rule.kind != "concurrent"]
        self._together = together and len(self._shadows) > 1
        live_scopes = {rule.scope for rule in policy.rules}
        self._foreign = frozenset(rule.scope for rule in policy.shadow) - live_scopes
        """Scopes of shadow rules that no live rule has."""

    def settling(self, receipts: Receipts | None) -> Self:
        """Return the gate for the settlement of a hold.

        It excludes shadow rules that would have refused the hold, so they do not count its excess cost.
        """
        holders = {place[1] for place, _ in receipts or () if is_shadow(place)}
        if len(holders) == len(self._shadows):
            return self
        holding = [shadow for shadow in self._shadows if shadow.rule.identity in holders]
        return type(self)(self._live, self._policy, holding, together=self._together)

    def _for_live(self, request: Request) -> Request:
        """Return the request for the live rules, with tier and quotas from the policy."""
        tier, quotas = self._policy.terms_for(request.key, request.tier, request.quotas)
        live = request.for_key(self.without_foreign(request.key), tier).with_quotas(quotas)
        if live.replaces is None:
            return live
        own = live_part(live.replaces)
        if request.operation == "renew" and not own:  # only shadow rules counted the hold
            live = live.with_costs(0)
        return live.replacing(own or None)

    def _candidates_for(self, request: Request, refusal: Decision) -> list[S]:
        """Return the candidates for the refusing rule, if it was the only one."""
        if not self._candidates or refusal.degraded or request.replaces is not None:
            return []
        refused_by = [result.name for result in refusal.results if not result.allowed]
        return [shadow for shadow in self._candidates if [shadow.candidate_for] == refused_by]

    def without_foreign(self, key: Key | None) -> Key | None:
        """Return a call's key without scopes that only shadow rules have, which live rules would refuse."""
        if not self._foreign or not isinstance(key, Mapping):
            return key
        return {scope: part for scope, part in key.items() if scope not in self._foreign}


def as_hit(request: Request) -> Request:
    """Return a hit for a refused hold, which is never settled."""
    return Request("hit", request.key, request.cost, request.tier, request.now, request.quotas)


def live_part(receipts: Receipts) -> Receipts:
    """Return the receipts of the live rules."""
    return tuple(entry for entry in receipts if not is_shadow(entry[0]))


def own_part(receipts: Receipts | None, shadow: ShadowRule) -> Receipts | None:
    """Return the receipt of a shadow rule."""
    own = [
        (place[2], receipt)
        for place, receipt in receipts or ()
        if is_shadow(place) and place[1] == shadow.rule.identity
    ]
    return tuple(own) or None


def is_shadow(place: object) -> TypeGuard[tuple[str, str, object]]:
    """Return whether the place of a receipt is that of a shadow rule."""
    return isinstance(place, tuple) and place[:1] == (SHADOW,)
