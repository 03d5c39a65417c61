# Generated from src/headgate/policy/_async/live.py by tools/unasync.py. Do not edit.
"""A policy that follows its file, and its limiters."""

from __future__ import annotations

from headgate._sync.hold import Hold
from headgate._sync.limiter import Limiter
from headgate.costs import Cost
from headgate.errors import StoreError
from headgate.keys import Key
from headgate.policy._sync.shadows import Shadow, ShadowedGate
from headgate.policy.limiters import PolicyVersion, ReloadingLimiter
from headgate.policy.live import Watched
from headgate.quotas import QuotaValue
from headgate.stores.base import Gate, Store


class Version(PolicyVersion[Store, Gate], Limiter):
    """A limiter as one version of a policy describes it. It never changes.

    Args:
        policy: The limiter in the file.
        store: The store.
        clock: A clock instead of the store's.
        hooks: Hooks called on decisions of the live rules.
        shadow_hooks: Hooks called on decisions of the shadow rules.
        before: The previous version; shadow rules that did not change keep their counts.
    """

    _shadow_type = Shadow
    _shadowed_gate_type = ShadowedGate
    shadows: tuple[Shadow, ...]


class PolicyLimiter(ReloadingLimiter[Version], Limiter):
    """A limiter of a policy: everything that an `Limiter` does, always by the newest policy.

    It is made by `LivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; a caller that waits is decided
    by the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    def _take(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, now: float | None
    ) -> Hold:
        return self._version._take(key, cost, tier, quota, now)  # gate and holds of one version


class LivePolicy(Watched[PolicyLimiter]):
    """The limiters of a policy by name, always as the newest policy says.

        live = LivePolicy.from_file("headgate.toml")
        live["login"].hit("alice")

    A limiter is the same object for life. One that a newer policy no longer has is no longer in the mapping, but goes on
    working unchanged for code that still has it; if a later policy names it again, it is the same object. There is one store
    per URL, which all its limiters share, also over reloads; `close` closes them, except network stores that others use.

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

    _version_type = Version
    _limiter_type = PolicyLimiter

    def ping(self) -> dict[str, StoreError | None]:
        """Ask every store whether it can count; return by its URL what is wrong, `None` if nothing is.

        `StoreUnavailable` if it is down: limiters then answer by their policies. `StoreMisconfigured` if it refuses.
        """
        found: dict[str, StoreError | None] = {}
        # Without rules none is asked.
        for limiter in sorted(self.values(), key=lambda limiter: not limiter.rules):
            if limiter.policy.store not in found:
                try:
                    limiter.ping()
                except StoreError as error:
                    found[limiter.policy.store] = error
                else:
                    found[limiter.policy.store] = None
        return found

    def close(self) -> None:
        """Close all stores, except those that others in this process share."""
        for handle in list(self._handles.values()):  # a reload may open another store at the same time
            handle.close()

    def __enter__(self) -> LivePolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
