# Generated from src/headgate/outage/_async/gate.py by tools/unasync.py. Do not edit.
"""Calls to a store through its breaker, and a gate that answers by policy while the store is down."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

from headgate._checks import Unpicklable
from headgate._concurrency import call_later
from headgate.costs import Costs
from headgate.errors import HeadgateError, StoreError, StoreMisconfigured
from headgate.keys import Key
from headgate.outage.breaker import Breaker, Probe, breaker_of
from headgate.outage.fallback import FallbackLimiter
from headgate.quota import MAX_UNITS
from headgate.stores.base import Answer, AnyStore, Gate, Receipts
from headgate.stores.request import Request

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Circuit:
    """Calls to a store through its breaker, with probes in the background while it is open.

    Args:
        breaker: The breaker of the store.
        probe: Makes a call that succeeds only if the store is back; raises `StoreUnavailable` if it is not.
        is_tight: Whether calls have a deadline that is shorter than the store's own.
    """

    _call_later = staticmethod(call_later)

    def __init__(self, breaker: Breaker, probe: Callable[[], None], *, is_tight: bool = False) -> None:
        self.breaker = breaker
        self._ask_whether_back = probe
        self._is_tight = is_tight

    def call(self, charges: bool, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function that uses the store, and return its result.

        Args:
            charges: Whether a success proves that the store can count.
            function: The function, which raises `StoreError`.
            args: Its arguments.

        Raises:
            StoreUnavailable: The store was not called, because the breaker is open.
            StoreError: The function raised it, and the breaker recorded it.
        """
        breaker = self.breaker
        ticket = breaker.admit(charges)
        if ticket is None:
            raise breaker.error()
        try:
            result = function(*args)
        except StoreError as error:
            self._schedule(breaker.failed(ticket, error, is_tight=self._is_tight))
            raise
        if charges and not breaker.is_well:
            breaker.succeeded(ticket)
        return result

    def ping(self, *, is_probe: bool = False) -> None:
        """Probe the store now, even if the breaker is open, and record the outcome.

        Args:
            is_probe: Whether this is a probe in the background, which is not counted as a call.

        Raises:
            HeadgateError: The probe raised it.
        """
        ticket = self.breaker.ticket
        try:
            self._ask_whether_back()
        except HeadgateError as error:
            self._schedule(self.breaker.failed(ticket, error, is_probe=is_probe))
            raise
        self.breaker.succeeded(ticket)

    def _schedule(self, probe: Probe | None) -> None:
        if probe is not None:
            self._call_later(probe.pause, self._probe, probe.ticket)

    def _probe(self, ticket: int) -> None:
        if ticket == self.breaker.ticket:
            with suppress(HeadgateError):
                self.ping(is_probe=True)


class ResilientGate(Unpicklable):
    """A gate that asks its store while the breaker is closed, and answers by policy otherwise.

    Args:
        store: The store.
        gate: The limiter's gate on it.
        patient: The gate with the store's own deadline.
        ping: Raises if the store cannot count.
        fallback: Answers while the store is down.
        is_tight: Whether the gate's deadline is shorter than the store's.
    """

    def __init__(
        self,
        store: AnyStore,
        gate: Gate,
        patient: Gate,
        ping: Callable[[], object],
        fallback: FallbackLimiter,
        is_tight: bool,
    ) -> None:
        self._store = store
        self._gate = gate
        self._patient = patient
        self._ping = ping
        self._fallback = fallback
        self._health = fallback.health
        self._circuit = Circuit(breaker_of(store), self._probe, is_tight=is_tight)

    def decide(self, request: Request) -> Answer:
        """Decide by the store, or by the fallback if the store is down or fails."""
        if request.operation == "renew" and (renewed := self._fallback.renew(request)) is not None:
            return renewed
        charges = request.operation != "peek" and request.charges
        replaces = request.replaces
        local = replaces if replaces is not None and self._fallback.has_taken(replaces) else None
        try:
            sent = request if local is None else request.replacing(None)
            answer = self._circuit.call(charges, self._gate.decide, sent)
        except StoreError as error:
            return self._fallback.decide(request, error)
        if local is not None and answer[0].allowed:
            self._fallback.refund(local, MAX_UNITS, request.now)
        if charges and self._health.misconfiguration is not None:
            self._fallback.note_success()
        return answer

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give units back to the store or the fallback that took them; if the store is down, they stay counted."""
        if self._fallback.refund(receipts, cost, now):
            return
        try:
            self._circuit.call(True, self._gate.refund, receipts, cost, now)
        except StoreError as error:
            self._fallback.note_misconfiguration(error)
            self._fallback.raise_if_asked(error)

    def reset(self, key: Key | None) -> None:
        """Forget a key; every policy raises if the store is down.

        It may need more rights than counting, so its errors are not recorded as misconfiguration.
        """
        self._fallback.reset(key)
        self._circuit.call(True, self._gate.reset, key)

    def ping(self) -> None:
        """Check whether the store can count, even if the breaker is open, and record the outcome.

        Raises:
            StoreUnavailable: It is down.
            StoreMisconfigured: It is up and refuses.
        """
        try:
            self._circuit.ping()
        except StoreMisconfigured as error:
            self._fallback.note_misconfiguration(error)
            raise
        self._fallback.note_success()
        inspect = getattr(self._store, "inspect_server", None)
        if inspect is not None:  # to warn about settings of the server that break a promise
            inspect()

    def _probe(self) -> None:
        """Repeat the failed request, because another node of a cluster may work; then check whether the store can count."""
        if getattr(self._store, "is_closed", False):
            self._circuit.breaker.stop()
        lost = self._fallback.lost
        if lost is not None:
            self._patient.decide(Request("peek", lost.key, 0, lost.tier, lost.now))
        self._ping()
        self._fallback.lost = None
