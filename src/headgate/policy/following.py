"""What limiters of a policy have in common for threads and coroutines: how they change to the newest version of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from headgate._fork import watch
from headgate.hooks import logger
from headgate.policy.model import LimiterPolicy
from headgate.policy.tally import ShadowCount

_PREPARED = ("rules", "units", "store", "health", "_ping", "_turn_of", "new_hold", "gate")
"""What a version has prepared. A call reads the gate once, so it sees one version."""


class PolicyVersion(Protocol):
    """A limiter as one version of the policy describes it."""

    policy: LimiterPolicy
    shadows: Any


V = TypeVar("V", bound=PolicyVersion)


class FollowingLimiter(Generic[V]):
    """A limiter that decides by the newest version of its policy."""

    def __init__(self, version: Any) -> None:
        # Not that of a limiter with rules of its own: all there is to prepare is in the version.
        self.name: str = version.name
        self._owns_store = False
        self._turns = type(version._turns)()  # waiters stay where they are when the version changes
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
