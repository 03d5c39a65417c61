"""What limiters of a policy have in common for threads and coroutines: all that waits for no store."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar

from headgate._fair_queue import FairQueue
from headgate._fork import watch
from headgate._limiting import G, Limiting, S
from headgate.clock import Clock
from headgate.hooks import Hooks, logger
from headgate.policy.model import LimiterPolicy
from headgate.policy.shadows import ShadowCount, ShadowTally
from headgate.stores import MemoryStore
from headgate.stores.base import Receipts
from headgate.stores.handle import StoreHandle

_NO_HOOKS = Hooks(())

_PREPARED = ("rules", "units", "store", "health", "_ping", "_turn_of", "new_hold", "gate")
"""What a version has prepared. A call reads the gate once, so it sees one version."""


class PolicyVersion(Limiting[S, G]):
    """A limiter as one version of the policy describes it."""

    _shadow_type: ClassVar[Callable[..., Any]]
    _shadowed_gate_type: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        policy: LimiterPolicy,
        store: S,
        clock: Clock | None = None,
        hooks: Hooks | None = None,
        shadow_hooks: Hooks = _NO_HOOKS,
        before: Self | None = None,
    ) -> None:
        self.policy = policy
        self.headers = policy.headers
        self.tier_for = None if policy.decides_alike else policy.tier_for
        self._heard = hooks
        self._shadowed: Any = None
        tallies = {} if before is None else {shadow.rule: shadow.tally for shadow in before.shadows}
        self.shadows: tuple[Any, ...] = tuple(
            self._shadow_type(
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
        if self._shadowed is not None:
            pick, own = self._turn_of, self._shadowed.without_foreign
            self._turn_of = lambda key: pick(own(key))

    def _around(self, gate: G, hooks: Hooks | None) -> tuple[G, Callable[..., Any]]:
        gate, new_hold = super()._around(gate, self._heard)
        if self.policy.decides_alike and not self.shadows:
            return gate, new_hold
        self._shadowed = self._shadowed_gate_type(gate, self.policy, self.shadows, together=self.store.remote)
        return self._shadowed, new_hold

    def in_memory(self, clock: Clock | None) -> Self:
        """See `Limiter.in_memory`."""
        memory: Any = MemoryStore(clock=clock)  # a store of either flavour
        return type(self)(self.policy, memory)

    def settling(self, receipts: Receipts | None) -> G:
        return self.gate if self._shadowed is None else self._shadowed.settling(receipts)


V = TypeVar("V", bound=PolicyVersion[Any, Any])


class ReloadingLimiter(Generic[V]):
    """A limiter that decides by the newest version of its policy."""

    def __init__(self, version: Any) -> None:
        # Not that of a limiter with rules of its own: all there is to prepare is in the version.
        self.name: str = version.name
        self._handle: StoreHandle | None = None  # its store belongs to the policy
        self._queue = FairQueue()  # waiters stay where they are when the version changes
        self._clock = version._clock
        self._lock = watch(threading.Lock())
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._adopt(version)

    def _adopt(self, version: V) -> None:
        """Take over everything that a version has prepared."""
        self._version = version
        for name in _PREPARED:
            setattr(self, name, getattr(version, name))

    @property
    def policy(self) -> LimiterPolicy:
        """What the newest policy says of it."""
        return self._version.policy

    @property
    def current(self) -> V:
        return self._version

    def in_memory(self, clock: Clock | None) -> V:
        """See `Limiter.in_memory`."""
        return self._version.in_memory(clock)

    def shadow_report(self) -> dict[str, ShadowCount]:
        """Return what each shadow rule would have done, by its name, in this process.

        A rule counts from its first appearance in the policy, or its last change.
        """
        return {shadow.rule.name: shadow.tally.so_far() for shadow in self._version.shadows}

    def on_change(self, notify: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = list(filter(lambda listener: listener() is not None, self._listeners))
            self._listeners.append(weakref.WeakMethod(notify))

    def _use(self, version: V) -> None:
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
