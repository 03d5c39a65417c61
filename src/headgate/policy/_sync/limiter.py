# Generated from src/headgate/policy/_async/limiter.py by tools/unasync.py. Do not edit.
"""A limiter that follows a policy."""

from __future__ import annotations

from headgate._sync.hold import Hold
from headgate._sync.limiter import Limiter
from headgate.costs import Cost
from headgate.keys import Key
from headgate.policy._sync.policed import Policed
from headgate.policy._sync.shadow import Shadow
from headgate.policy.following import FollowingLimiter, PolicyVersion
from headgate.quotas import QuotaValue
from headgate.stores.base import Gate, Store


class Version(PolicyVersion[Store, Gate], Limiter):
    """A limiter as one version of a policy describes it. It never changes.

    Args:
        policy: What the file says of the limiter.
        store: Where it counts.
        clock: Where time comes from, instead of the store's own clock.
        hooks: What hears of the decisions of the live rules.
        shadow_hooks: What hears of what the shadow rules would have decided.
        before: The version before: a shadow rule that is still the same goes on with its tally.
    """

    _shadow_type = Shadow
    _policed_type = Policed
    shadows: tuple[Shadow, ...]


class PolicyLimiter(FollowingLimiter[Version], Limiter):
    """A limiter of a policy: everything that an `Limiter` does, always by the newest policy.

    It is made by `LivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; a caller that waits is decided
    by the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    def _take(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, now: float | None
    ) -> Hold:
        return self._version._take(key, cost, tier, quota, now)  # gate and holds of one version
