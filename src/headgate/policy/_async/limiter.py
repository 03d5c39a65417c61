"""A limiter that follows a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from headgate._async.gates import AsyncObserved
from headgate._async.hold import AsyncHold, AsyncObservedHold
from headgate._async.limiter import AsyncLimiter
from headgate.clock import Clock
from headgate.costs import Cost
from headgate.hooks import Hook, Hooks
from headgate.keys import Key
from headgate.policy._async.policed import AsyncPoliced
from headgate.policy._async.shadow import AsyncShadow
from headgate.policy.following import FollowingLimiter
from headgate.policy.model import LimiterPolicy
from headgate.policy.tally import ShadowTally
from headgate.quotas import QuotaValue
from headgate.stores import MemoryStore
from headgate.stores.base import AsyncGate, AsyncStore, Receipts


class AsyncVersion(AsyncLimiter):
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
        store: AsyncStore,
        clock: Clock | None,
        hooks: Hooks | None,
        shadow_hooks: Hooks,
        before: AsyncVersion | None,
    ) -> None:
        self.policy = policy
        self.headers = policy.headers
        self.tier_for = None if policy.decides_alike else policy.tier_for
        self._heard = hooks
        self._policed: AsyncPoliced | None = None
        tallies = {} if before is None else {shadow.rule: shadow.tally for shadow in before.shadows}
        self.shadows: tuple[AsyncShadow, ...] = tuple(
            AsyncShadow(
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

    def _around(self, gate: AsyncGate, hooks: Iterable[Hook]) -> tuple[AsyncGate, Callable[..., AsyncHold]]:
        new_hold: Callable[..., AsyncHold] = AsyncHold
        if self._heard is not None:
            gate = AsyncObserved(gate, self.name, self.units, self._heard)
            new_hold = partial(AsyncObservedHold, self._heard, self.name)
        if self.policy.decides_alike and not self.shadows:
            return gate, new_hold
        self._policed = AsyncPoliced(gate, self.policy, self.shadows, together=self.store.remote)
        return self._policed, new_hold

    def in_memory(self, clock: Clock | None) -> AsyncVersion:
        return AsyncVersion(self.policy, MemoryStore(clock=clock), None, None, Hooks(()), None)

    def settling(self, receipts: Receipts | None) -> AsyncGate:
        return self.gate if self._policed is None else self._policed.settling(receipts)


class AsyncPolicyLimiter(FollowingLimiter[AsyncVersion], AsyncLimiter):
    """A limiter of a policy: everything that an `AsyncLimiter` does, always by the newest policy.

    It is made by `AsyncLivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; a caller that waits is decided
    by the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    def in_memory(self, clock: Clock | None) -> AsyncVersion:
        return self._version.in_memory(clock)

    async def _take(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, now: float | None
    ) -> AsyncHold:
        return await self._version._take(key, cost, tier, quota, now)  # gate and holds of one version
