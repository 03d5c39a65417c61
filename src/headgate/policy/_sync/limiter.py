# Generated from src/headgate/policy/_async/limiter.py by tools/unasync.py. Do not edit.
"""A limiter that follows a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from headgate._sync.gates import Observed
from headgate._sync.hold import Hold, ObservedHold
from headgate._sync.limiter import Limiter
from headgate.clock import Clock
from headgate.costs import Cost
from headgate.hooks import Hook, Hooks
from headgate.keys import Key
from headgate.policy._sync.policed import Policed
from headgate.policy._sync.shadow import Shadow
from headgate.policy.following import FollowingLimiter
from headgate.policy.model import LimiterPolicy
from headgate.policy.tally import ShadowTally
from headgate.quotas import QuotaValue
from headgate.stores import MemoryStore
from headgate.stores.base import Gate, Receipts, Store


class Version(Limiter):
    """A limiter as one version of a policy describes it. It never changes.

    Args:
        policy: What the file says of the limiter.
        store: Where it counts.
        clock: Where time comes from, instead of the store's own clock.
        hooks: What hears of the decisions of the live rules.
        shadow_hooks: What hears of what the shadow rules would have decided.
        before: The version before: a shadow rule that is still the same goes on with its tally.
    """

    def __init__(
        self,
        policy: LimiterPolicy,
        store: Store,
        clock: Clock | None,
        hooks: Hooks | None,
        shadow_hooks: Hooks,
        before: Version | None,
    ) -> None:
        self.policy = policy
        self.headers = policy.headers
        self.tier_for = None if policy.decides_alike else policy.tier_for
        self._heard = hooks
        self._policed: Policed | None = None
        tallies = {} if before is None else {shadow.rule: shadow.tally for shadow in before.shadows}
        self.shadows: tuple[Shadow, ...] = tuple(
            Shadow(
                rule,
                policy,
                store,
                clock,
                shadow_hooks,
                tallies.get(rule) or ShadowTally(policy.name, rule.name),
            )
            for rule in policy.shadow
        )
        super().__init__(
            *policy.rules,
            name=policy.name,
            store=store,
            clock=clock,
            on_store_error=policy.on_store_error,
            deadline=policy.deadline,
            on_overload=policy.on_overload,
        )
        if self._policed is not None:
            pick, own = self._turn_of, self._policed.without_foreign
            self._turn_of = lambda key: pick(own(key))

    def _around(self, gate: Gate, hooks: Iterable[Hook]) -> tuple[Gate, Callable[..., Hold]]:
        new_hold: Callable[..., Hold] = Hold
        if self._heard is not None:
            gate = Observed(gate, self.name, self.units, self._heard)
            new_hold = partial(ObservedHold, self._heard, self.name)
        if self.policy.decides_alike and not self.shadows:
            return gate, new_hold
        self._policed = Policed(gate, self.policy, self.shadows, together=self.store.remote)
        return self._policed, new_hold

    def in_memory(self, clock: Clock | None) -> Version:
        return Version(self.policy, MemoryStore(clock=clock), None, None, Hooks(()), None)

    def settling(self, receipts: Receipts | None) -> Gate:
        return self.gate if self._policed is None else self._policed.settling(receipts)


class PolicyLimiter(FollowingLimiter[Version], Limiter):
    """A limiter of a policy: everything that an `Limiter` does, always by the newest policy.

    It is made by `LivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; a caller that waits is decided
    by the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    def in_memory(self, clock: Clock | None) -> Version:
        return self._version.in_memory(clock)

    def _take(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, now: float | None
    ) -> Hold:
        return self._version._take(key, cost, tier, quota, now)  # gate and holds of one version
