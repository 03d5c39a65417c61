"""A limiter that follows its policy: the part that does not call the store."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from headgate._fork import watch
from headgate.clock import Clock
from headgate.errors import StoreUnavailable
from headgate.hooks import logger
from headgate.policy.model import LimiterPolicy
from headgate.policy.shadows import ShadowCount, ShadowRule
from headgate.stores.handle import StoreHandle

_PREPARED = (
    "_known_tiers",
    "rules",
    "units",
    "store",
    "health",
    "_ping",
    "_turn_of",
    "_queues",
    "_chunks",
    "new_hold",
    "gate",
)
"""Attributes taken from the current version. A call reads the gate once, so it sees one version."""


class PolicyVersion(Protocol):
    """A limiter of one version of a policy."""

    policy: LimiterPolicy

    @property
    def shadows(self) -> Sequence[ShadowRule]: ...

    def _in_memory(self, clock: Clock | None) -> Any: ...

    def _stop_leases(self) -> None: ...


V = TypeVar("V", bound=PolicyVersion)


class ReloadingLimiter(Generic[V]):
    """A limiter that decides by the newest version of its policy."""

    def __init__(self, version: Any) -> None:
        # The constructor of a limiter is not called: the version has prepared everything.
        self.name: str = version.name
        self._handle: StoreHandle | None = None  # its store belongs to the policy
        self._clock = version._clock
        self._has_real_time = version._has_real_time
        self._lock = watch(threading.Lock())
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._adopt(version)

    def _adopt(self, version: V) -> None:
        """Copy the prepared attributes of a version."""
        self._version = version
        for name in _PREPARED:
            setattr(self, name, getattr(version, name))

    @property
    def policy(self) -> LimiterPolicy:
        """Its part of the newest policy."""
        return self._version.policy

    @property
    def current(self) -> V:
        return self._version

    def _in_memory(self, clock: Clock | None) -> Any:
        """See `Limiter._in_memory`."""
        return self._version._in_memory(clock)

    def shadow_report(self) -> dict[str, ShadowCount]:
        """Return what each shadow rule would have done, by its name, in this process.

        A rule counts from its first appearance in the policy, or its last change.
        """
        return {shadow.rule.name: shadow.tally.so_far() for shadow in self._version.shadows}

    def _on_change(self, notify: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = list(filter(lambda listener: listener() is not None, self._listeners))
            self._listeners.append(weakref.WeakMethod(notify))

    def _use(self, version: V) -> None:
        """Decide by another version from now on. It never raises."""
        before = self._version
        self._adopt(version)
        with suppress(
            StoreUnavailable
        ):  # in a signal handler that interrupted a call, which its chunk may decide
            before._stop_leases()
        with self._lock:
            listeners = list(self._listeners)
        call_listeners(notify for listener in listeners if (notify := listener()) is not None)


def call_listeners(listeners: Iterable[Callable[[], None]]) -> None:
    """Call functions; log their errors, which must not affect the policy."""
    for notify in listeners:
        try:
            notify()
        except Exception:  # noqa: BLE001
            logger.exception("%r failed on a new policy", notify)
