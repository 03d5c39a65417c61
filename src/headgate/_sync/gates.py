# Generated from src/headgate/_async/gates.py by tools/unasync.py. Do not edit.
"""Gates that wrap another gate with a clock, a quota function or hooks; the gate of a limiter without rules."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from headgate.clock import Clock, reading
from headgate.costs import Costs, Units
from headgate.decision import UNLIMITED
from headgate.hooks import Call, Hooks, Operation
from headgate.keys import Key, PlainKey
from headgate.quota import Quotas
from headgate.quotas import QuotaCache, caller_of
from headgate.stores.base import Answer, Gate, Receipts, check_costs
from headgate.stores.request import Request

_CALLED: dict[str, Operation] = {"hit": "hit", "peek": "check", "hold": "hold", "record": "record"}
"""The operation that hooks receive, for a request that does not replace a hold."""


class Unlimited:
    """The gate of a limiter without rules: everything is admitted."""

    def decide(self, request: Request) -> Answer:
        check_costs((), request)
        return UNLIMITED, None

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        return

    def reset(self, key: Key | None) -> None:
        return


class Timed:
    """A gate with a clock, which is used for calls without `now=`."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock

    def decide(self, request: Request) -> Answer:
        return self._gate.decide(request.at(reading(self._clock)))

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self._gate.refund(receipts, cost, reading(self._clock) if now is None else now)

    def reset(self, key: Key | None) -> None:
        self._gate.reset(key)


class Quoted:
    """A gate that calls a function for the quotas of each caller."""

    def __init__(
        self, gate: Gate, quotas: QuotaCache, pick: Callable[[Key | None], tuple[PlainKey, ...]]
    ) -> None:
        self._gate = gate
        self._quotas = quotas
        self._pick = pick

    def decide(self, request: Request) -> Answer:
        if request.quotas is None:
            request = request.with_quotas(self._look_up(request.key, request.tier))
        return self._gate.decide(request)

    def _look_up(self, key: Key | None, tier: str | None) -> Quotas | None:
        self._pick(key)  # raises ConfigError for an invalid key
        caller = caller_of(key, tier)
        is_known, quotas = self._quotas.get(caller)
        if is_known:
            return quotas
        value = self._quotas.function(key, tier)
        return self._quotas.keep(caller, value)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self._gate.refund(receipts, cost, now)

    def reset(self, key: Key | None) -> None:
        self._gate.reset(key)


class Observed:
    """A gate that calls hooks for every answer and every error."""

    def __init__(self, gate: Gate, limiter: str, units: Units, hooks: Hooks) -> None:
        self._gate = gate
        self._limiter = limiter
        self._by_unit = units.by_unit
        self._hooks = hooks

    def decide(self, request: Request) -> Answer:
        called = _CALLED[request.operation] if request.replaces is None else "move"
        call = Call(self._limiter, called, request.key, self._by_unit(request.cost), request.tier)
        start = perf_counter()  # not with `Hooks.watch`, which is slower
        try:
            answer = self._gate.decide(request)
        except Exception as error:
            self._hooks.failed(call, error, perf_counter() - start)
            raise
        seconds = perf_counter() - start
        if request.operation == "record":
            self._hooks.completed(call, seconds, answer[0].degraded)
        else:
            self._hooks.decided(call, answer[0], seconds)
        return answer

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        call = Call(self._limiter, "refund", None, self._by_unit(cost), None)
        with self._hooks.watch(call) as seconds:
            self._gate.refund(receipts, cost, now)
        self._hooks.completed(call, seconds(), False)

    def reset(self, key: Key | None) -> None:
        call = Call(self._limiter, "reset", key, 0, None)
        with self._hooks.watch(call) as seconds:
            self._gate.reset(key)
        self._hooks.completed(call, seconds(), False)
