# Generated from src/headgate/policy/_async/limiter.py by tools/unasync.py. Do not edit.
"""A limiter that follows a policy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

from headgate._fork import watch
from headgate._sync.hold import Hold
from headgate._sync.limiter import Limiter
from headgate._sync.observed import observed
from headgate._sync.turns import Turns
from headgate.clock import Clock, instant
from headgate.decision import Decision
from headgate.hooks import Hook, Hooks, logger
from headgate.keys import Key, PlainKey
from headgate.policy._sync.policed import Policed
from headgate.policy._sync.shadow import Shadow
from headgate.policy.model import LimiterPolicy
from headgate.policy.tally import ShadowCount, Tally
from headgate.rules import Rule
from headgate.stores import local
from headgate.stores.base import Gate, Store
from headgate.stores.outage import Health, OnStoreError


class Version(Limiter):
    """A limiter as one version of a policy describes it. It never changes.

    Args:
        policy: What the file says of the limiter.
        store: Where it counts.
        clock: Where time comes from, instead of the store's own clock.
        hooks: Who is told what the live rules decide.
        shadow_hooks: Who is told what the shadow rules would have decided.
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
        self._headers = policy.headers
        self._told = hooks
        self._policed: Policed | None = None
        tallies = {} if before is None else {shadow.rule: shadow.tally for shadow in before.shadows}
        self.shadows: tuple[Shadow, ...] = tuple(
            Shadow(
                rule, policy, store, clock, shadow_hooks, tallies.get(rule) or Tally(policy.name, rule.name)
            )
            for rule in policy.shadow
        )
        super().__init__(
            *policy.rules,
            name=policy.name,
            store=store,
            clock=clock,
            on_store_error=_on_store_error(policy.on_store_error),
            deadline=policy.deadline,
        )
        if self._policed is not None:
            pick, own = self._turn_of, self._policed.without_foreign
            self._turn_of = lambda key: pick(own(key))

    def _around(self, gate: Gate, hooks: Iterable[Hook]) -> tuple[Gate, Callable[..., Hold]]:
        new_hold: Callable[..., Hold] = Hold
        if self._told is not None:
            gate, new_hold = observed(gate, self.name, self._told)
        if self.policy.decides_alike and not self.shadows:
            return gate, new_hold
        together = getattr(self.store, "remote", False)
        self._policed = Policed(gate, self.policy, self.shadows, together=together)
        return self._policed.gate(), new_hold

    def _take(self, key: Key | None, cost: int, tier: str | None, now: float | None) -> Hold:
        if self._policed is None:
            return super()._take(key, cost, tier, now)
        at = instant(now)
        decision, receipts = self._gate.hold(key, cost, tier, at)
        return self._new_hold(self._policed.settling(receipts), decision, receipts, key, cost, tier, at)

    def _decided_as(self) -> Callable[[Key | None, str | None], str | None] | None:
        return None if self.policy.decides_alike else self.policy.tier_for


class PolicyLimiter(Limiter):
    """A limiter of a policy: everything that an `Limiter` does, always by the newest policy.

    It is made by `LivePolicy`, and stays the same object whatever the file says later. Every call is decided by one
    version of the policy as a whole. A hold is settled by the version that it was taken by; whoever waits is decided by
    the newest one at every try. Its store belongs to the policy, so closing the limiter does nothing.
    """

    def __init__(self, version: Version) -> None:
        # Not that of a limiter with rules of its own: all there is to prepare is in the version.
        self.name = version.name
        self._owns_store = False
        self._turns = Turns()
        self._clock = version._clock
        self._lock = watch(threading.Lock())
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._current = version

    @property
    def policy(self) -> LimiterPolicy:
        """What the newest policy says of it."""
        return self._current.policy

    @property
    def rules(self) -> tuple[Rule, ...]:  # type: ignore[override]  # read only, as it changes with the file
        """The rules that decide."""
        return self._current.rules

    @property
    def store(self) -> Store:  # type: ignore[override]
        """Where it counts."""
        return self._current.store

    @property
    def health(self) -> Health:  # type: ignore[override]
        """How its store has been doing."""
        return self._current.health

    # Every call of a limiter goes through one of these, and takes the version of the moment with it.

    @property
    def _gate(self) -> Gate:  # type: ignore[override]
        return self._current._gate

    @property
    def _hit(self) -> Callable[[Key | None, int, str | None, int | None], Decision]:  # type: ignore[override]
        return self._current._hit

    def _take(self, key: Key | None, cost: int, tier: str | None, now: float | None) -> Hold:
        return self._current._take(key, cost, tier, now)

    def _turn_of(self, key: Key | None) -> tuple[PlainKey, ...]:
        return self._current._turn_of(key)

    def _as_of_now(self) -> Limiter:
        return self._current

    def shadow_report(self) -> dict[str, ShadowCount]:
        """Return what each shadow rule would have done, by its name, in this process.

        A rule counts from its first appearance in the policy, or its last change.
        """
        return {shadow.rule.name: shadow.tally.so_far() for shadow in self._current.shadows}

    def _on_change(self, tell: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = [listener for listener in self._listeners if listener() is not None]
            self._listeners.append(weakref.WeakMethod(tell))

    def _use(self, version: Version) -> None:
        """Decide by another version from now on. It never raises."""
        self._current = version
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            tell = listener()
            if tell is not None:
                try:
                    tell()
                except Exception:  # noqa: BLE001  # the version is in force, whatever listeners make of it
                    logger.exception("%r failed when told of a new policy", tell)


def _on_store_error(policy: str | float) -> OnStoreError:
    if isinstance(policy, float):
        return local(policy)
    return "closed" if policy == "closed" else "open"
