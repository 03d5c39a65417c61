"""A gate that goes on answering when its store does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from headgate._concurrency import call_later_async
from headgate._resilience import Probing, Resilience
from headgate.costs import Costs
from headgate.errors import HeadgateError, StoreError, StoreMisconfigured, StoreOverloaded, StoreUnavailable
from headgate.keys import Key
from headgate.quota import MAX_UNITS
from headgate.stores.base import Answer, AsyncGate, Receipts
from headgate.stores.request import Request

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Asker = Callable[[], Awaitable[None]]
"""Asks a store whether it can count, and raises if it cannot."""


class AsyncCircuit(Probing[Asker]):
    """Calls to a store through its breaker, with probes in the background while it is open.

    Args:
        breaker: The store's.
        probe: Asks the store for something that it can do only if it is back; raises `StoreUnavailable` if it is not.
        is_tight: Whether calls have a deadline that is shorter than the store's own.
    """

    _call_later = staticmethod(call_later_async)

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


class AsyncResilient(Resilience):
    """A gate that asks its store while the breaker is closed, and a stand-in otherwise."""

    _circuit_type = AsyncCircuit
    _circuit: AsyncCircuit
    _gate: AsyncGate
    _patient: AsyncGate
    _ask_whether_well: Asker

    async def ask(self, request: Request) -> Answer:
        """Ask the store, or the stand-in if the store is not worth asking or fails."""
        if request.operation == "renew" and (renewed := self._stand_in.renew_local(request)) is not None:
            return renewed
        charges = request.operation != "peek" and request.charges
        try:
            ask = self._gate.ask if request.replaces is None else self._ask_replacing
            answer = await self._circuit.call(charges, ask, request)
        except StoreError as error:
            return self._answer_instead(request, error)
        if charges and self.health.misconfiguration is not None:
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
            self._stand_in.raise_if_asked(error)

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
            await self._circuit.ping(self._ask_whether_well)
        except StoreMisconfigured as error:
            if self.breaker.has_worked:
                self._note_misconfiguration(error)
            raise
        self._works()
        inspect = getattr(self._store, "ainspect_server", None)
        if inspect is not None:  # to warn of settings of its server that break a promise
            await inspect()

    async def _probe(self) -> None:
        """Ask what the store failed to answer, for another node of a cluster may be well; then whether it can count."""
        if self._lost is not None:
            await self._patient.ask(Request("peek", self._lost.key, 0, self._lost.tier, self._lost.now))
        await self._ask_whether_well()
        self._lost = None
