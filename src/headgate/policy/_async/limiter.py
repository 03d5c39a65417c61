"""A limiter that follows a policy."""

from __future__ import annotations

from headgate._async.hold import AsyncHold
from headgate._async.limiter import AsyncLimiter
from headgate.costs import Cost
from headgate.keys import Key
from headgate.policy._async.policed import AsyncPoliced
from headgate.policy._async.shadow import AsyncShadow
from headgate.policy.following import FollowingLimiter, PolicyVersion
from headgate.quotas import QuotaValue
from headgate.stores.base import AsyncGate, AsyncStore


class AsyncVersion(PolicyVersion[AsyncStore, AsyncGate], AsyncLimiter):
    """A limiter as one version of a policy describes it. It never changes.

    Args:
        policy: What the file says of the limiter.
        store: Where it counts.
        clock: Where time comes from, instead of the store's own clock.
        hooks: What hears of the decisions of the live rules.
        shadow_hooks: What hears of what the shadow rules would have decided.
        before: The version before: a shadow rule that is still the same goes on with its tally.
    """

    _shadow_type = AsyncShadow
    _policed_type = AsyncPoliced
    shadows: tuple[AsyncShadow, ...]


class AsyncPolicyLimiter(FollowingLimiter[AsyncVersion], AsyncLimiter):
    """A limiter of a policy: everything that an `AsyncLimiter` does, always by the newest policy.

    It is made by `AsyncLivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; a caller that waits is decided
    by the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    async def _take(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, now: float | None
    ) -> AsyncHold:
        return await self._version._take(key, cost, tier, quota, now)  # gate and holds of one version
