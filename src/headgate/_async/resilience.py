"""A gate that goes on answering when its store does not."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from headgate._concurrency import call_later_async
from headgate.costs import Costs
from headgate.errors import (
    ConfigError,
    HeadgateError,
    StoreError,
    StoreMisconfigured,
    StoreOverloaded,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.keys import Key
from headgate.quota import MAX_UNITS
from headgate.rules import Rule, fixed_window, scopes_of
from headgate.stores.base import Answer, AsyncGate, AsyncStore, Receipts, check_deadline
from headgate.stores.breaker import Breaker, breaker_of
from headgate.stores.failure import OnOverload, OnStoreError, check_overload, check_policy
from headgate.stores.outage import Health, StandIn
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Asker = Callable[[], Awaitable[None]]
"""Asks a store whether it can count, and raises if it cannot."""

_PING_KEY = "ping"
_PING_RULE = fixed_window("1/second", name="headgate.ping")
"""What a ping records a unit of: a tiny state of its own, which is gone after a second."""


def bind(
    store: AsyncStore,
    limiter: str,
    rules: tuple[Rule, ...],
    on_store_error: OnStoreError | None,
    deadline: float | None,
    on_overload: OnOverload = "refuse",
) -> tuple[AsyncGate, Health, Asker | None]:
    """Return a limiter's gate on a store, what is known of the store's health, and what asks whether it can count.

    A store over a network admits by default when it cannot be asked (`"open"`); the errors of any other are raised.

    Raises:
        ConfigError: There is no such policy, or the store takes no deadline.
    """
    policy = check_policy(on_store_error or ("open" if store.remote else "raise"))
    check_overload(on_overload)
    if deadline is not None and not store.remote and store.guarantees.shared:
        raise ConfigError(f"deadline= is for stores over a network; {type(store).__name__} has no use for it")
    gate = store.bind_async(limiter, rules, deadline=deadline)
    if not store.remote and not store.guarantees.shared:
        return gate, Health(), None
    is_tight = deadline is not None and check_deadline(deadline) < getattr(store, "deadline", deadline)
    patience = None if is_tight else deadline
    ping = AsyncPing(store, limiter, rules, patience)
    if not store.remote and policy == "raise":
        return gate, Health(), ping
    breaker = breaker_of(store)
    stand_in = StandIn(limiter, rules, policy, breaker.memory, on_overload)
    health = Health(breaker, stand_in)
    patient = store.bind_async(limiter, rules) if is_tight else gate
    resilient = AsyncResilient(gate, patient, ping, stand_in, health, is_tight)
    return resilient, health, resilient.ping


class AsyncPing:
    """Finds out whether a store can count for a limiter: that it answers, and grants all that counting needs."""

    def __init__(
        self, store: AsyncStore, limiter: str, rules: tuple[Rule, ...], deadline: float | None
    ) -> None:
        self.store = store
        if store.has_rules or getattr(store, "pings_by_looking", False):
            # A server whose own store is down answers by its policy, so to look is enough.
            self._gate = store.bind_async(limiter, rules, deadline=deadline)
            self._request = Request("peek", _key_for(rules), 0)
        else:
            self._gate = store.bind_async(limiter, (_PING_RULE,), deadline=deadline)
            self._request = Request("record", _PING_KEY, 1)

    async def __call__(self) -> None:
        """Ask the store, for as long as that may take at least by its own deadline.

        Raises:
            StoreUnavailable: It is down.
            StoreMisconfigured: It is there and refuses.
        """
        await self._gate.ask(self._request)

    async def inspect_server(self) -> None:
        """Let the store read the settings of its server, and warn of those that break a promise."""
        inspect = getattr(self.store, "ainspect_server", None)
        if inspect is not None:
            await inspect()


def _key_for(rules: tuple[Rule, ...]) -> Key:
    """Return a key that fits rules."""
    return dict.fromkeys(scopes_of(rules), _PING_KEY) or _PING_KEY


class AsyncCircuit:
    """Calls to a store through its breaker, with probes in the background while it is open.

    Args:
        breaker: The store's.
        probe: Asks the store for something that it can do only if it is back; raises `StoreUnavailable` if it is not.
        is_tight: Whether calls have a deadline that is shorter than the store's own.
    """

    def __init__(self, breaker: Breaker, probe: Asker, *, is_tight: bool = False) -> None:
        self.breaker = breaker
        self._ask_whether_back = probe
        self._is_tight = is_tight

    async def call(self, charges: bool, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call a function that asks the store, through the breaker, and return its result.

        Raises:
            StoreUnavailable: The store was not asked, because it is known to be down.
            StoreError: What the function has raised; the breaker has taken note of it.
        """
        breaker = self.breaker
        ticket = breaker.admit(charges)
        if ticket is None:
            raise breaker.error()
        try:
            result = await function(*args)
        except StoreError as error:
            self._failed(ticket, error, self._is_tight)
            raise
        if charges and not breaker.is_well:
            breaker.succeeded(ticket)
        return result

    async def ping(self, ask: Asker) -> None:
        """Ask the store even if the breaker is open, within the store's own deadline, and record the outcome."""
        ticket = self.breaker.ticket
        try:
            await ask()
        except StoreError as error:
            self._failed(ticket, error, is_tight=False)
            raise
        self.breaker.succeeded(ticket)

    def _failed(self, ticket: int, error: StoreError, is_tight: bool) -> None:
        """Take note of what an error says about the store: a plain `StoreError` nothing, only this process is to blame."""
        if isinstance(error, StoreOverloaded):
            self.breaker.overloaded(error)
        elif isinstance(error, StoreTimeout) and is_tight:
            if self.breaker.suspected():
                call_later_async(0, self._probe, None)
        elif isinstance(error, StoreUnavailable):
            self._go_on_probing(self.breaker.failed(ticket, error))
        elif type(error) is not StoreError:
            self.breaker.answered(ticket)
            if not isinstance(error, StoreMisconfigured):
                self.breaker.report(error)

    def _go_on_probing(self, prober: int | None) -> None:
        pause = None if prober is None else self.breaker.next_probe(prober)
        if pause is not None:
            call_later_async(pause, self._probe, prober)

    async def _probe(self, prober: int | None) -> None:
        """Look whether the store is back, and go on doing so until it is."""
        ticket = self.breaker.ticket
        try:
            await self._ask_whether_back()
        except StoreUnavailable as error:
            self._go_on_probing(self.breaker.failed(ticket, error, is_probe=True))
        except HeadgateError as error:
            if type(error) in (StoreError, StoreOverloaded):  # that says nothing about the store
                self._go_on_probing(prober)
            else:
                self.breaker.answered(ticket)
        else:
            self.breaker.succeeded(ticket)


class AsyncResilient:
    """A gate that asks its store while the breaker is closed, and a stand-in otherwise.

    Args:
        gate: The limiter's gate on the store.
        patient: The same with the store's own deadline.
        ping: Whether the store can count.
        stand_in: Who answers otherwise.
        health: What is seen of all this from outside.
        is_tight: Whether the gate's deadline is shorter than the store's.
    """

    def __init__(
        self,
        gate: AsyncGate,
        patient: AsyncGate,
        ping: AsyncPing,
        stand_in: StandIn,
        health: Health,
        is_tight: bool,
    ) -> None:
        self.breaker = breaker_of(ping.store)
        self._gate = gate
        self._patient = patient
        self._ping = ping
        self._stand_in = stand_in
        self._health = health
        self._circuit = AsyncCircuit(self.breaker, self._probe, is_tight=is_tight)
        self._lost: Request | None = None

    async def ask(self, request: Request) -> Answer:
        """Ask the store, or the stand-in if the store is not worth asking or fails."""
        charges = request.operation != "peek" and request.charges
        try:
            ask = self._gate.ask if request.replaces is None else self._ask_replacing
            answer = await self._circuit.call(charges, ask, request)
        except StoreError as error:
            if isinstance(error, StoreUnavailable) and self._lost is None:
                self._lost = request
            self._note_misconfiguration(error)
            return self._stand_in.ask(request, error)
        if charges and self._health.misconfiguration is not None:
            self._works()
        return answer

    async def _ask_replacing(self, request: Request) -> Answer:
        """Ask the store; units that it never saw are given back where they were taken, once it has taken them."""
        if request.replaces is None or not self._stand_in.has_taken(request.replaces):
            return await self._gate.ask(request)
        answer = await self._gate.ask(request.replacing(None))
        if answer[0].allowed:
            self._stand_in.refund_local(request.replaces, MAX_UNITS, request.now)
        return answer

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give units back where they were taken; if that is the store and it is down, they stay counted."""
        if self._stand_in.refund_local(receipts, cost, now):
            return
        try:
            await self._circuit.call(True, self._gate.refund, receipts, cost, now)
        except StoreError as error:
            self._note_misconfiguration(error)
            self._stand_in.refund_failed(error)

    async def reset(self, key: Key | None) -> None:
        """Forget; no policy can stand in for that, so a store that is down raises.

        It may take rights that counting does not: that they are missing says nothing about the store.
        """
        self._stand_in.reset(key)
        await self._circuit.call(True, self._gate.reset, key)

    async def ping(self) -> None:
        """Ask the store whether it can count, however long it is known to be down, and take note of the answer.

        Raises:
            StoreUnavailable: It is down.
            StoreMisconfigured: It is there and refuses.
        """
        try:
            await self._circuit.ping(self._ping)
        except StoreMisconfigured as error:
            if self.breaker.has_worked:
                self._note_misconfiguration(error)
            raise
        self._works()
        await self._ping.inspect_server()

    async def _probe(self) -> None:
        """Ask what the store failed to answer, for another node of a cluster may be well; then whether it can count."""
        if self._lost is not None:
            await self._patient.ask(Request("peek", self._lost.key, 0, self._lost.tier, self._lost.now))
        await self._ping()
        self._lost = None

    def _note_misconfiguration(self, error: StoreError) -> None:
        """Log, once, that the store refuses us; raise that if it has never worked: it is still being set up."""
        if not isinstance(error, StoreMisconfigured):
            return
        if not self.breaker.has_worked:
            raise error
        if self._health.misconfiguration is None:
            logger.error("the store is misconfigured, its limiters answer by their policies: %s", error)
        self._health.misconfiguration = str(error)

    def _works(self) -> None:
        if self._health.misconfiguration is not None:
            self._health.misconfiguration = None
            logger.warning("the store is configured well again: %r", self._ping.store)
