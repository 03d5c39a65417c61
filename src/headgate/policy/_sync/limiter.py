# Generated from src/headgate/policy/_async/limiter.py by tools/unasync.py. Do not edit.
"""A limiter that follows a policy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from headgate._fork import watch
from headgate._sync.gates import Observed
from headgate._sync.hold import Hold, ObservedHold
from headgate._sync.limiter import Limiter
from headgate._sync.turns import Turns
from headgate.clock import Clock
from headgate.costs import Cost
from headgate.hooks import Hook, Hooks, logger
from headgate.keys import Key
from headgate.policy._sync.policed import Policed
from headgate.policy._sync.shadow import Shadow
from headgate.policy.model import LimiterPolicy
from headgate.policy.tally import ShadowCount, ShadowTally
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


class PolicyLimiter(Limiter):
    """A limiter of a policy: everything that an `Limiter` does, always by the newest policy.

    It is made by `LivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; a caller that waits is decided
    by the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    def __init__(self, version: Version) -> None:
        # Not that of a limiter with rules of its own: all there is to prepare is in the version.
        self.name = version.name
        self._owns_store = False
        self._turns = Turns()
        self._clock = version._clock
        self._lock = watch(threading.Lock())
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._adopt(version)

    def _adopt(self, version: Version) -> None:
        """Take over everything that a version has prepared. A call reads the gate once, so it sees one version."""
        self._version = version
        self.rules = version.rules
        self.units = version.units
        self.store = version.store
        self.health = version.health
        self._ping = version._ping
        self._turn_of = version._turn_of
        self.new_hold = version.new_hold
        self.gate = version.gate

    @property
    def policy(self) -> LimiterPolicy:
        """What the newest policy says of it."""
        return self._version.policy

    @property
    def current(self) -> Version:
        return self._version

    def in_memory(self, clock: Clock | None) -> Version:
        return self._version.in_memory(clock)

    def _take(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, now: float | None
    ) -> Hold:
        return self._version._take(key, cost, tier, quota, now)  # gate and holds of one version

    def shadow_report(self) -> dict[str, ShadowCount]:
        """Return what each shadow rule would have done, by its name, in this process.

        A rule counts from its first appearance in the policy, or its last change.
        """
        return {shadow.rule.name: shadow.tally.so_far() for shadow in self._version.shadows}

    def on_change(self, notify: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = list(filter(lambda listener: listener() is not None, self._listeners))
            self._listeners.append(weakref.WeakMethod(notify))

    def _use(self, version: Version) -> None:
        """Decide by another version from now on. It never raises."""
        self._adopt(version)
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            notify = listener()
            if notify is not None:
                try:
                    notify()
                except Exception:  # noqa: BLE001  # the version is in force, whatever listeners make of it
                    logger.exception("%r failed on a new policy", notify)
