"""Gates that go on answering when their store does not: what threads and coroutines share, because it waits for nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from headgate._checks import Unpicklable
from headgate.errors import (
    ConfigError,
    StoreError,
    StoreMisconfigured,
    StoreOverloaded,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.rules import Rule, fixed_window, scopes_of
from headgate.stores.base import Answer, AnyStore, check_deadline
from headgate.stores.breaker import Breaker, breaker_of
from headgate.stores.failure import OnOverload, OnStoreError, check_overload, check_policy
from headgate.stores.outage import Health, StandIn
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

Asker = TypeVar("Asker", bound=Callable[[], Any])
"""Asks a store whether it can count, and raises if it cannot."""

_PING_KEY = "ping"
_PING_RULE = fixed_window("1/second", name="headgate.ping")
"""What a ping records a unit of: a tiny state of its own, which is gone after a second."""


class Probing(Generic[Asker]):
    """A breaker, and probes in the background while it is open; how a store is asked is in `Circuit` and `AsyncCircuit`."""

    _call_later: Callable[..., bool]
    """Calls a method in the background after so many seconds."""
    _probe: Callable[..., Any]
    """Looks whether the store is back, and goes on doing so until it is."""

    def __init__(self, breaker: Breaker, probe: Asker, *, is_tight: bool = False) -> None:
        self.breaker = breaker
        self._ask_whether_back = probe
        self._is_tight = is_tight

    def _failed(self, ticket: int, error: StoreError, is_tight: bool) -> None:
        """Take note of what an error says about the store: a plain `StoreError` nothing, only this process is to blame."""
        if isinstance(error, StoreOverloaded):
            self.breaker.overloaded(error)
        elif isinstance(error, StoreTimeout) and is_tight:
            if self.breaker.suspected():
                self._call_later(0, self._probe, None)
        elif isinstance(error, StoreUnavailable):
            self._go_on_probing(self.breaker.failed(ticket, error))
        elif type(error) is not StoreError:
            self.breaker.answered(ticket)
            if not isinstance(error, StoreMisconfigured):
                self.breaker.report(error)

    def _go_on_probing(self, prober: int | None) -> None:
        pause = None if prober is None else self.breaker.next_probe(prober)
        if pause is not None:
            self._call_later(pause, self._probe, prober)


class Resilience(Unpicklable):
    """A gate on a store with a stand-in; how they are asked is in `Resilient` and `AsyncResilient`.

    Args:
        store: The store.
        gate: The limiter's gate on it.
        patient: The same with the store's own deadline.
        ask_whether_well: Raises if the store cannot count.
        stand_in: Who answers otherwise.
        is_tight: Whether the gate's deadline is shorter than the store's.

    Attributes:
        health: What is seen of all this from outside.
    """

    _circuit_type: ClassVar[Callable[..., Any]]
    _probe: Callable[[], Any]
    """Asks the store whether it is back."""

    def __init__(
        self,
        store: AnyStore,
        gate: Any,
        patient: Any,
        ask_whether_well: Callable[[], Any],
        stand_in: StandIn,
        is_tight: bool,
    ) -> None:
        self.breaker = breaker_of(store)
        self.health = Health(self.breaker, stand_in)
        self._store = store
        self._gate = gate
        self._patient = patient
        self._ask_whether_well = ask_whether_well
        self._stand_in = stand_in
        self._circuit = self._circuit_type(self.breaker, self._probe, is_tight=is_tight)
        self._lost: Request | None = None

    def _answer_instead(self, request: Request, error: StoreError) -> Answer:
        """Answer what the store could not, and keep the first such request for probes."""
        if isinstance(error, StoreUnavailable) and self._lost is None:
            self._lost = request
        self._note_misconfiguration(error)
        return self._stand_in.ask(request, error)

    def _note_misconfiguration(self, error: StoreError) -> None:
        """Log, once, that the store refuses us; raise that if it has never worked: it is still being set up."""
        if not isinstance(error, StoreMisconfigured):
            return
        if not self.breaker.has_worked:
            raise error
        if self.health.misconfiguration is None:
            logger.error("the store is misconfigured, its limiters answer by their policies: %s", error)
        self.health.misconfiguration = str(error)

    def _works(self) -> None:
        if self.health.misconfiguration is not None:
            self.health.misconfiguration = None
            logger.warning("the store is configured well again: %r", self._store)


def bind(
    store: AnyStore,
    bind_to_store: Callable[..., Any],
    resilient_type: Callable[..., Any],
    limiter: str,
    rules: tuple[Rule, ...],
    on_store_error: OnStoreError | None,
    deadline: float | None,
    on_overload: OnOverload,
) -> tuple[Any, Health, Any]:
    """Return a limiter's gate on a store, what is known of the store's health, and what asks whether it can count.

    A store over a network admits by default when it cannot be asked (`"open"`); the errors of any other are raised.

    Raises:
        ConfigError: There is no such policy, or the store takes no deadline.
    """
    policy = check_policy(on_store_error or ("open" if store.remote else "raise"))
    check_overload(on_overload)
    if deadline is not None and not store.remote and store.guarantees.shared:
        raise ConfigError(f"deadline= is for stores over a network; {type(store).__name__} has no use for it")
    gate = bind_to_store(limiter, rules, deadline=deadline)
    if not store.remote and not store.guarantees.shared:
        return gate, Health(), None
    is_tight = deadline is not None and check_deadline(deadline) < getattr(store, "deadline", deadline)
    # A ping takes what the store's own deadline allows, even if calls have less.
    bind_patiently = partial(bind_to_store, deadline=None if is_tight else deadline)
    if store.has_rules or getattr(store, "pings_by_looking", False):
        # A server whose own store is down answers by its policy, so to look is enough.
        key = dict.fromkeys(scopes_of(rules), _PING_KEY) or _PING_KEY
        ping = partial(bind_patiently(limiter, rules).ask, Request("peek", key, 0))
    else:
        ping = partial(bind_patiently(limiter, (_PING_RULE,)).ask, Request("record", _PING_KEY, 1))
    if not store.remote and policy == "raise":
        return gate, Health(), ping
    stand_in = StandIn(limiter, rules, policy, breaker_of(store).memory, on_overload)
    patient = bind_patiently(limiter, rules) if is_tight else gate
    resilient = resilient_type(store, gate, patient, ping, stand_in, is_tight)
    return resilient, resilient.health, resilient.ping
