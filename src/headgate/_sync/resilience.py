# Generated from src/headgate/_async/resilience.py by tools/unasync.py. Do not edit.
"""A gate that goes on answering when its store does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from headgate.errors import ConfigError, HeadgateError, StoreError, StoreUnavailable
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.base import Gate, Receipts, Store
from headgate.stores.outage import Breaker, Health, OnStoreError, StandIn, breaker_of, check_policy

T = TypeVar("T")


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
    remote = getattr(store, "remote", False)
    policy = check_policy(on_store_error or ("open" if remote else "raise"))
    if deadline is not None and not remote and store.guarantees.shared:
        raise ConfigError(f"deadline= is for stores over a network; {type(store).__name__} has no use for it")
    # Not every store must take a deadline, so it is no part of what mypy knows of them.
    bound: Any = store.bind
    gate: Gate = bound(limiter, rules, deadline=deadline) if remote else bound(limiter, rules)
    if not remote and (policy == "raise" or not store.guarantees.shared):
        return gate, Health()
    breaker = breaker_of(store)
    stand_in = StandIn(limiter, rules, policy, breaker.memory)
    return Resilient(gate, breaker, stand_in).gate(), Health(breaker, stand_in)


class Resilient:
    """A gate that asks its store while that is worth it, and a stand-in otherwise."""

    def __init__(self, gate: Gate, breaker: Breaker, stand_in: StandIn) -> None:
        self.breaker = breaker
        self.stand_in = stand_in
        self._gate = gate

    def gate(self) -> Gate:
        """Return the operations."""
        return Gate(
            partial(self._ask, self._gate.hit, self.stand_in.hit),
            partial(self._ask, self._gate.peek, self.stand_in.peek, charges=False),
            partial(self._ask, self._gate.hold, self.stand_in.hold),
            partial(self._ask, self._gate.record, self.stand_in.record),
            self.refund,
            self.reset,
        )

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        """Give units back to whom they were taken from; if that is the store and it is down, they stay counted."""
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

    def _ask(
        self,
        ask: Callable[[Key | None, int, str | None, int | None], Any],
        ask_instead: Callable[[StoreError, Key | None, int, str | None, int | None], T],
        key: Key | None,
        cost: int,
        tier: str | None,
        now: int | None,
        charges: bool = True,
    ) -> T:
        breaker = self.breaker
        ticket = breaker.admit(charges)
        if ticket is None:
            if breaker.wants_probe():
                self._probe(key, tier, now)
            return ask_instead(breaker.error(), key, cost, tier, now)
        try:
            answer: T = ask(key, cost, tier, now)
        except StoreError as error:
            breaker.failed(ticket, error)
            return ask_instead(error, key, cost, tier, now)
        except BaseException:
            breaker.gave_up(ticket)
            raise
        if not breaker.is_closed:
            breaker.succeeded(ticket, charges)
        return answer

    def _probe(self, key: Key | None, tier: str | None, now: int | None) -> None:
        """Look whether the store is back, at nobody's expense."""
        threading.Thread(target=self._look, args=(key, tier, now), daemon=True).start()

    def _look(self, key: Key | None, tier: str | None, now: int | None) -> None:
        try:
            self._gate.peek(key, 0, tier, now)
        except StoreUnavailable:
            return  # the next probe is due by itself
        except StoreError:
            self.breaker.probed()  # it is there, whatever it holds
        except HeadgateError:
            return  # the caller has asked for something impossible, and is told so; the next one may not
        else:
            self.breaker.probed()
