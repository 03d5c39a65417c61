"""A policy that follows its file, and its limiters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

# begin async only
from weakref import WeakValueDictionary

# end async only
from headgate._async.hold import AsyncHold
from headgate._async.limiter import AsyncLimiter
from headgate.clock import Clock
from headgate.costs import Cost
from headgate.errors import StoreError
from headgate.hooks import Hooks
from headgate.keys import Key
from headgate.policy._async.shadows import AsyncShadow, AsyncShadowedGate
from headgate.policy.limiters import ReloadingLimiter
from headgate.policy.live import AsyncWatched
from headgate.policy.model import LimiterPolicy
from headgate.policy.shadows import ShadowTally
from headgate.quotas import QuotaValue
from headgate.rules import Rule
from headgate.stores import MemoryStore
from headgate.stores.base import AsyncGate, AsyncStore, Receipts

_NO_HOOKS = Hooks(())


class AsyncVersion(AsyncLimiter):
    """A limiter of one version of a policy. It never changes.

    Args:
        policy: The limiter in the file.
        store: The store.
        clock: A clock instead of the store's.
        hooks: Hooks called on decisions of the live rules.
        shadow_hooks: Hooks called on decisions of the shadow rules.
        before: The previous version; shadow rules that did not change keep their counts.
    """

    shadows: tuple[AsyncShadow, ...]

    def __init__(
        self,
        policy: LimiterPolicy,
        store: AsyncStore,
        clock: Clock | None = None,
        hooks: Hooks | None = None,
        shadow_hooks: Hooks = _NO_HOOKS,
        before: AsyncVersion | None = None,
    ) -> None:
        self.policy = policy
        self.headers = policy.headers
        self.terms_for = None if policy.keeps_terms else policy.terms_for
        self._policy_hooks = hooks
        # begin async only
        self._shadow_hooks = shadow_hooks
        self._own_clock = clock
        self._parts: WeakValueDictionary[int, AsyncVersion] = WeakValueDictionary()
        # end async only
        self._shadowed: AsyncShadowedGate | None = None
        tallies = {} if before is None else {shadow.rule: shadow.tally for shadow in before.shadows}
        self.shadows = tuple(
            AsyncShadow(
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

    def _shadow_gate(self, rule: Rule, store: AsyncStore, clock: Clock | None) -> AsyncGate:
        """Return the gate of a limiter with one shadow rule."""
        name, deadline = self.policy.name, self.policy.deadline
        return AsyncLimiter(
            rule, name=name, store=store, clock=clock, on_store_error="open", deadline=deadline
        ).gate

    def _wrap(self, gate: AsyncGate, hooks: Hooks | None) -> tuple[AsyncGate, Callable[..., AsyncHold]]:
        gate, new_hold = super()._wrap(gate, self._policy_hooks)
        if self.policy.keeps_terms and not self.shadows:
            return gate, new_hold
        self._shadowed = AsyncShadowedGate(gate, self.policy, self.shadows, together=self.store.remote)
        return self._shadowed, new_hold

    # begin async only
    def part(
        self, rules: tuple[Rule, ...], shadow: tuple[Rule, ...] = (), *, deadline: float | None = None
    ) -> AsyncVersion:
        """Return the same limiter with other rules, usually some of its own; those keep their counts.

        Args:
            rules: The live rules. Units are leased only if all of them are rules of this limiter.
            shadow: The shadow rules.
            deadline: Seconds to wait for a network store, if that is shorter than the limiter's deadline.
        """
        deadlines = [each for each in (self.policy.deadline, deadline) if each is not None]
        least = min(deadlines) if deadlines and self.store.remote else self.policy.deadline
        lease = self.policy.lease if all(rule in self.rules for rule in rules) else None
        policy = replace(self.policy, rules=rules, shadow=shadow, deadline=least, lease=lease)
        hooks, shadow_hooks = self._policy_hooks, self._shadow_hooks
        found = AsyncVersion(policy, self.store, self._own_clock, hooks, shadow_hooks, self)
        self._parts[id(found)] = found
        return found

    def _stop_leases(self) -> None:
        super()._stop_leases()
        for part in self._living_parts():
            part._stop_leases()

    async def aclose(self) -> None:
        """Return the units of leases, also of its parts."""
        await super().aclose()
        for part in self._living_parts():
            await part.aclose()

    def _living_parts(self) -> list[AsyncVersion]:
        return [part for reference in self._parts.valuerefs() if (part := reference()) is not None]

    # end async only
    def _in_memory(self, clock: Clock | None) -> AsyncVersion:
        """See `Limiter._in_memory`."""
        return AsyncVersion(replace(self.policy, lease=None), MemoryStore(clock=clock))

    def settling(self, receipts: Receipts | None) -> AsyncGate:
        return self.gate if self._shadowed is None else self._shadowed.settling(receipts)


class AsyncPolicyLimiter(ReloadingLimiter[AsyncVersion], AsyncLimiter):
    """An `AsyncLimiter` that always decides by the newest policy.

    `AsyncLivePolicy` creates it, and it stays the same object when the file changes. Every call uses one version of the
    policy. A hold is settled by the version that took it; a waiting call uses the newest version at every attempt. Its
    store belongs to the policy, so closing the limiter only ends its leases.
    """

    async def _take(
        self,
        key: Key | None,
        cost: Cost,
        tier: str | None,
        quota: QuotaValue | None,
        now: float | None,
        is_final: bool = True,
    ) -> AsyncHold:
        # gate and holds of one version
        return await self._version._take(key, cost, tier, quota, now, is_final)

    async def aclose(self) -> None:
        """Return the units of leases; the store stays open."""
        await self._version.aclose()


class AsyncLivePolicy(AsyncWatched[AsyncPolicyLimiter]):
    """The limiters of a policy by name, always with the newest policy.

        live = AsyncLivePolicy.from_file("headgate.toml")
        await live["login"].hit("alice")

    A limiter stays the same object. If a newer policy does not contain it, it is removed from the mapping, but works
    unchanged for code that still uses it; if a later policy contains it again, it is the same object. All limiters with
    the same URL share one store, also across reloads; `aclose` closes the stores, except network stores that are shared
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

    _version_type = AsyncVersion
    _limiter_type = AsyncPolicyLimiter

    async def ping(self) -> dict[str, StoreError | None]:
        """Check that every store can count; return its error or `None` by URL.

        The error is `StoreUnavailable` if the store is down, and `StoreMisconfigured` if it refuses.
        """
        found: dict[str, StoreError | None] = {}
        # Limiters with rules first: without rules, `ping` does not call the store.
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
        """Return the units of leases, and close all stores, except network stores that are shared with other code."""
        for limiter in self.values():
            await limiter.aclose()
        for handle in list(self._handles.values()):  # a reload may open another store at the same time
            await handle.aclose()

    async def __aenter__(self) -> AsyncLivePolicy:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
