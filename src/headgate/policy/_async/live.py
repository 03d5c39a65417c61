"""A policy that follows its file, and its limiters."""

from __future__ import annotations

from headgate._async.hold import AsyncHold
from headgate._async.limiter import AsyncLimiter
from headgate.costs import Cost
from headgate.errors import StoreError
from headgate.keys import Key
from headgate.policy._async.shadows import AsyncShadow, AsyncShadowedGate
from headgate.policy.limiters import PolicyVersion, ReloadingLimiter
from headgate.policy.live import AsyncWatched
from headgate.quotas import QuotaValue
from headgate.stores.base import AsyncGate, AsyncStore


class AsyncVersion(PolicyVersion[AsyncStore, AsyncGate], AsyncLimiter):
    """A limiter as one version of a policy describes it. It never changes.

    Args:
        policy: The limiter in the file.
        store: The store.
        clock: A clock instead of the store's.
        hooks: Hooks called on decisions of the live rules.
        shadow_hooks: Hooks called on decisions of the shadow rules.
        before: The previous version; shadow rules that did not change keep their counts.
    """

    _shadow_type = AsyncShadow
    _shadowed_gate_type = AsyncShadowedGate
    shadows: tuple[AsyncShadow, ...]


class AsyncPolicyLimiter(ReloadingLimiter[AsyncVersion], AsyncLimiter):
    """A limiter of a policy: everything that an `AsyncLimiter` does, always by the newest policy.

    It is made by `AsyncLivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; a caller that waits is decided
    by the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    async def _take(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, now: float | None
    ) -> AsyncHold:
        return await self._version._take(key, cost, tier, quota, now)  # gate and holds of one version


class AsyncLivePolicy(AsyncWatched[AsyncPolicyLimiter]):
    """The limiters of a policy by name, always as the newest policy says.

        live = AsyncLivePolicy.from_file("headgate.toml")
        await live["login"].hit("alice")

    A limiter is the same object for life. One that a newer policy no longer has is no longer in the mapping, but goes on
    working unchanged for code that still has it; if a later policy names it again, it is the same object. There is one store
    per URL, which all its limiters share, also over reloads; `aclose` closes them, except network stores that others use.

    Args:
        policy: What to begin with.
        hooks: What hears of the limiters' decisions.
        shadow_hooks: What hears what shadow rules would have decided, as `decided` and `failed`, with the limiter's name
            and the rule's.
        clock: Where time comes from, instead of the stores' own clocks.

    Attributes:
        policy: The newest policy that could be used.
        clock: Where time comes from, instead of the stores' own clocks.
        last_error: Why the newest file is not in force; `None` if it is.
    """

    _version_type = AsyncVersion
    _limiter_type = AsyncPolicyLimiter

    async def ping(self) -> dict[str, StoreError | None]:
        """Ask every store whether it can count; return by its URL what is wrong, `None` if nothing is.

        `StoreUnavailable` if it is down: limiters then answer by their policies. `StoreMisconfigured` if it refuses.
        """
        found: dict[str, StoreError | None] = {}
        # Without rules none is asked.
        for limiter in sorted(self.values(), key=lambda limiter: not limiter.rules):
            if limiter.policy.store not in found:
                try:
                    await limiter.ping()
                except StoreError as error:
                    found[limiter.policy.store] = error
                else:
                    found[limiter.policy.store] = None
        return found

    async def aclose(self) -> None:
        """Close all stores, except those that others in this process share."""
        for handle in list(self._handles.values()):  # a reload may open another store at the same time
            await handle.aclose()

    async def __aenter__(self) -> AsyncLivePolicy:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
