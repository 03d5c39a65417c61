# Generated from src/headgate/_async/resilience.py by tools/unasync.py. Do not edit.
"""A gate that goes on answering when its store does not."""

from __future__ import annotations

import threading

from headgate.costs import Costs
from headgate.errors import ConfigError, HeadgateError, StoreError, StoreUnavailable
from headgate.keys import Key
from headgate.quota import MAX_UNITS
from headgate.rules import Rule
from headgate.stores.base import Answer, Gate, Receipts, Store
from headgate.stores.outage import Breaker, Health, OnStoreError, StandIn, breaker_of, check_policy
from headgate.stores.request import Request


def bind(
    store: Store,
    limiter: str,
    rules: tuple[Rule, ...],
    on_store_error: OnStoreError | None,
    deadline: float | None,
) -> tuple[Gate, Health]:
    """Return a limiter's gate on a store, and what is known of the store's health.

    A store over a network admits by default when it cannot be asked (`"open"`); the errors of any other are raised.

    Raises:
        ConfigError: There is no such policy, or the store takes no deadline.
    """
    policy = check_policy(on_store_error or ("open" if store.remote else "raise"))
    if deadline is not None and not store.remote and store.guarantees.shared:
        raise ConfigError(f"deadline= is for stores over a network; {type(store).__name__} has no use for it")
    gate = store.bind(limiter, rules, deadline=deadline)
    if not store.remote and (policy == "raise" or not store.guarantees.shared):
        return gate, Health()
    breaker = breaker_of(store)
    stand_in = StandIn(limiter, rules, policy, breaker.memory)
    return Resilient(gate, breaker, stand_in), Health(breaker, stand_in)


class Resilient:
    """A gate that asks its store while that is worth it, and a stand-in otherwise."""

    def __init__(self, gate: Gate, breaker: Breaker, stand_in: StandIn) -> None:
        self.breaker = breaker
        self.stand_in = stand_in
        self._gate = gate

    def ask(self, request: Request) -> Answer:
        """Ask the store, or the stand-in if the store is not worth asking or fails."""
        breaker, charges = self.breaker, request.operation != "peek"
        ticket = breaker.admit(charges)
        if ticket is None:
            if breaker.wants_probe():
                self._probe(request)
            return self.stand_in.ask(request, breaker.error())
        try:
            answer = self._ask(request)
        except StoreError as error:
            breaker.failed(ticket, error)
            return self.stand_in.ask(request, error)
        except BaseException:
            breaker.gave_up(ticket)
            raise
        if not breaker.is_closed:
            breaker.succeeded(ticket, charges)
        return answer

    def _ask(self, request: Request) -> Answer:
        """Ask the store; units that it never saw are given back where they were taken, once it has taken them."""
        if request.replaces is None or not self.stand_in.has_taken(request.replaces):
            return self._gate.ask(request)
        answer = self._gate.ask(request.replacing(None))
        if answer[0].allowed:
            self.stand_in.refund_local(request.replaces, MAX_UNITS, request.now)
        return answer

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give units back where they were taken; if that is the store and it is down, they stay counted."""
        if self.stand_in.refund_local(receipts, cost, now):
            return
        ticket = self.breaker.admit()
        if ticket is None:
            self.stand_in.refund_failed(self.breaker.error())
            return
        try:
            self._gate.refund(receipts, cost, now)
        except StoreError as error:
            self.breaker.failed(ticket, error)
            self.stand_in.refund_failed(error)
        except BaseException:
            self.breaker.gave_up(ticket)
            raise
        else:
            self.breaker.succeeded(ticket)

    def reset(self, key: Key | None) -> None:
        """Forget; no policy can stand in for that, so a store that is down raises."""
        self.stand_in.reset(key)
        ticket = self.breaker.admit()
        if ticket is None:
            raise self.breaker.error()
        try:
            self._gate.reset(key)
        except StoreError as error:
            self.breaker.failed(ticket, error)
            raise
        except BaseException:
            self.breaker.gave_up(ticket)
            raise
        self.breaker.succeeded(ticket)

    def _probe(self, request: Request) -> None:
        """Look in the background whether the store is back."""
        threading.Thread(target=self._look, args=(request,), daemon=True).start()

    def _look(self, request: Request) -> None:
        try:
            self._gate.ask(Request("peek", request.key, 0, request.tier, request.now))
        except StoreUnavailable:
            return  # the next probe is due by itself
        except StoreError:
            self.breaker.probed()  # it is there, whatever it holds
        except HeadgateError:
            return  # the caller has asked for something impossible, and has an error for it; the next one may not
        else:
            self.breaker.probed()
