# Generated from src/headgate/policy/_async/live.py by tools/unasync.py. Do not edit.
"""A policy that follows its file, and its limiters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headgate._sync.hold import Hold
from headgate._sync.limiter import Limiter
from headgate.clock import Clock
from headgate.costs import Cost
from headgate.errors import StoreError
from headgate.hooks import Hooks
from headgate.keys import Key
from headgate.policy._sync.shadows import Shadow, ShadowedGate
from headgate.policy.limiters import ReloadingLimiter
from headgate.policy.live import Watched
from headgate.policy.model import LimiterPolicy
from headgate.policy.shadows import ShadowTally
from headgate.quotas import QuotaValue
from headgate.rules import Rule
from headgate.stores import MemoryStore
from headgate.stores.base import Gate, Receipts, Store

_NO_HOOKS = Hooks(())


class Version(Limiter):
    """A limiter of one version of a policy. It never changes.

    Args:
        policy: The limiter in the file.
        store: The store.
        clock: A clock instead of the store's.
        hooks: Hooks called on decisions of the live rules.
        shadow_hooks: Hooks called on decisions of the shadow rules.
        before: The previous version; shadow rules that did not change keep their counts.
    """

    shadows: tuple[Shadow, ...]

    def __init__(
        self,
        policy: LimiterPolicy,
        store: Store,
        clock: Clock | None = None,
        hooks: Hooks | None = None,
        shadow_hooks: Hooks = _NO_HOOKS,
        before: Version | None = None,
    ) -> None:
        self.policy = policy
        self.headers = policy.headers
        self.terms_for = None if policy.keeps_terms else policy.terms_for
        self._policy_hooks = hooks
        self._shadowed: ShadowedGate | None = None
        tallies = {} if before is None else {shadow.rule: shadow.tally for shadow in before.shadows}
        self.shadows = tuple(
            Shadow(
                rule,
                policy,
                self._shadow_gate(rule, store, clock),
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
            lease=policy.lease if clock is None else None,  # a lease is measured by the machine's clock
        )
        if policy.default_tier is not None:
            self._known_tiers = None  # callers may have any tier
        if before is not None:
            self._lines = before._lines  # waiting callers stay where they are
            self._queues = self._bind_queues()
        if self._shadowed is not None:
            pick, own = self._turn_of, self._shadowed.without_foreign
            self._turn_of = lambda key: pick(own(key))

    def _shadow_gate(self, rule: Rule, store: Store, clock: Clock | None) -> Gate:
        """Return the gate of a limiter with one shadow rule."""
        name, deadline = self.policy.name, self.policy.deadline
        return Limiter(
            rule, name=name, store=store, clock=clock, on_store_error="open", deadline=deadline
        ).gate

    def _wrap(self, gate: Gate, hooks: Hooks | None) -> tuple[Gate, Callable[..., Hold]]:
        gate, new_hold = super()._wrap(gate, self._policy_hooks)
        if self.policy.keeps_terms and not self.shadows:
            return gate, new_hold
        self._shadowed = ShadowedGate(gate, self.policy, self.shadows, together=self.store.remote)
        return self._shadowed, new_hold

    def _in_memory(self, clock: Clock | None) -> Version:
        """See `Limiter._in_memory`."""
        return Version(replace(self.policy, lease=None), MemoryStore(clock=clock))

    def settling(self, receipts: Receipts | None) -> Gate:
        return self.gate if self._shadowed is None else self._shadowed.settling(receipts)


class PolicyLimiter(ReloadingLimiter[Version], Limiter):
    """An `Limiter` that always decides by the newest policy.

    `LivePolicy` creates it, and it stays the same object when the file changes. Every call uses one version of the
    policy. A hold is settled by the version that took it; a waiting call uses the newest version at every attempt. Its
    store belongs to the policy, so closing the limiter only ends its leases.
    """

    def _take(
        self,
        key: Key | None,
        cost: Cost,
        tier: str | None,
        quota: QuotaValue | None,
        now: float | None,
        is_final: bool = True,
    ) -> Hold:
        # gate and holds of one version
        return self._version._take(key, cost, tier, quota, now, is_final)

    def close(self) -> None:
        """Return the units of leases; the store stays open."""
        self._version.close()


class LivePolicy(Watched[PolicyLimiter]):
    """The limiters of a policy by name, always with the newest policy.

        live = LivePolicy.from_file("headgate.toml")
        live["login"].hit("alice")

    A limiter stays the same object. If a newer policy does not contain it, it is removed from the mapping, but works
    unchanged for code that still uses it; if a later policy contains it again, it is the same object. All limiters with
    the same URL share one store, also across reloads; `close` closes the stores, except network stores that are shared
    with other code.

    Args:
        policy: The first policy.
        hooks: Hooks called on every decision.
        shadow_hooks: Hooks called with the decisions of shadow rules (`decided` and `failed`), with the names of the
            limiter and the rule.
        clock: A clock to use instead of the stores' clocks.

    Attributes:
        policy: The newest valid policy.
        clock: The clock used instead of the stores' clocks.
        last_error: The error of the newest file; `None` if it is in force.
    """

    _version_type = Version
    _limiter_type = PolicyLimiter

    def ping(self) -> dict[str, StoreError | None]:
        """Check that every store can count; return its error or `None` by URL.

        The error is `StoreUnavailable` if the store is down, and `StoreMisconfigured` if it refuses.
        """
        found: dict[str, StoreError | None] = {}
        # Limiters with rules first: without rules, `ping` does not call the store.
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
        """Return the units of leases, and close all stores, except network stores that are shared with other code."""
        for limiter in self.values():
            limiter.close()
        for handle in list(self._handles.values()):  # a reload may open another store at the same time
            handle.close()

    def __enter__(self) -> LivePolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
