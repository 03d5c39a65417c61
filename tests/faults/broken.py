"""Stores with seeded bugs; the checker must find each bug."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from headgate.decision import Decision
from headgate.stores.base import Answer, Gate, Receipts
from headgate.stores.request import Request

FORGETS_ONE_IN = 10_000
LEAKS_ONE_IN = 1000
FAILS_OPEN_AT = 300


class Forgets:
    """Admits one request in ten thousand without counting it."""

    def __init__(self, gate: Gate, numbers: count[int]) -> None:
        self._gate = gate
        self._numbers = numbers
        self.refund, self.reset = gate.refund, gate.reset

    def decide(self, request: Request) -> Answer:
        look = Request("peek", request.key, request.cost, request.tier, request.now, request.quotas)
        would_charge = request.operation == "hit" and self._gate.decide(look)[0].allowed
        is_forgotten = would_charge and next(self._numbers) % FORGETS_ONE_IN == FORGETS_ONE_IN - 1
        return self._gate.decide(look if is_forgotten else request)


class FailsOpen:
    """Admits one request beyond the limit, once."""

    def __init__(self, gate: Gate, numbers: count[int]) -> None:
        self._gate = gate
        self._numbers = numbers
        self.refund, self.reset = gate.refund, gate.reset

    def decide(self, request: Request) -> Answer:
        decision, receipts = self._gate.decide(request)
        if request.operation == "hit" and not decision and next(self._numbers) == FAILS_OPEN_AT:
            admitted = [(True, limit, left, None, reset) for _, limit, left, _, reset in decision.fields]
            return Decision.make(decision.names, admitted), None
        return decision, receipts


class Leaks:
    """Releases the holds of cancelled callers, except one in a thousand."""

    def __init__(self, gate: Gate, numbers: count[int]) -> None:
        self._gate = gate
        self._numbers = numbers

    async def decide(self, request: Request) -> Answer:
        answer = self._gate.decide(request)
        try:
            for _ in range(4):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            receipts = answer[1] if request.is_given_up else None
            if receipts is not None and next(self._numbers) % LEAKS_ONE_IN != LEAKS_ONE_IN - 1:
                self._gate.refund(receipts, request.cost, request.now)
            raise
        return answer

    async def refund(self, *arguments: Any) -> None:
        self._gate.refund(*arguments)

    async def reset(self, *arguments: Any) -> None:
        self._gate.reset(*arguments)


class RenewsAnother:
    """Renews a lease by replacing it with a new one, which is lost if the caller is cancelled."""

    def __init__(self, gate: Gate, numbers: count[int]) -> None:
        self._gate = gate
        self._current: dict[Any, Any] = {}
        """Receipts of replacement leases, by the receipt of the original lease."""

    async def decide(self, request: Request) -> Answer:
        is_renewal = request.operation == "renew"
        answer = self._renew(request) if is_renewal else self._gate.decide(self._with_current(request))
        try:
            for _ in range(4):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if answer[1] is not None and request.is_given_up:
                self._gate.refund(answer[1], request.cost, request.now)
            raise
        if is_renewal and answer[1] is not None and request.replaces is not None:
            self._current[request.replaces[0]] = answer[1][0]
        return answer

    def _renew(self, request: Request) -> Answer:
        if not self._gate.decide(self._with_current(request))[0].allowed:
            return self._gate.decide(self._with_current(request))
        self._gate.refund(self._with_current(request).replaces or (), request.cost, request.now)
        return self._gate.decide(
            Request("hold", request.key, request.cost, request.tier, request.now, request.quotas)
        )

    def _with_current(self, request: Request) -> Request:
        return request if request.replaces is None else request.replacing(self._newest(request.replaces))

    def _newest(self, receipts: Receipts) -> Receipts:
        return (self._current.get(receipts[0], receipts[0]), *receipts[1:])

    async def refund(self, receipts: Receipts, cost: Any, now: int | None) -> None:
        self._gate.refund(self._newest(receipts), cost, now)

    async def reset(self, *arguments: Any) -> None:
        self._gate.reset(*arguments)


BUGS: dict[str, Any] = {
    "forgets": Forgets,
    "fails open": FailsOpen,
    "leaks": Leaks,
    "renews another": RenewsAnother,
}


class BrokenStore:
    """A store with a bug."""

    def __init__(self, bug: str, store: Any) -> None:
        self._bug = BUGS[bug]
        self._numbers = count()
        self._store = store

    def bind(self, *arguments: Any, **options: Any) -> Any:
        return self._bug(self._store.bind(*arguments, **options), self._numbers)

    bind_async = bind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
