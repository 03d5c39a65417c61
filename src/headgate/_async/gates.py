"""Gates that wrap another gate with a clock, a quota function or hooks; the gate of a limiter without rules."""

from __future__ import annotations

# begin async only
import inspect

# end async only
from collections.abc import Callable
from time import perf_counter

from headgate.clock import Clock, reading
from headgate.costs import Costs, Units
from headgate.decision import UNLIMITED
from headgate.hooks import Call, Hooks, Operation
from headgate.keys import Key, PlainKey
from headgate.quota import Quotas
from headgate.quotas import QuotaCache, caller_of
from headgate.stores.base import Answer, AsyncGate, Receipts, check_costs
from headgate.stores.request import Request

_CALLED: dict[str, Operation] = {"hit": "hit", "peek": "check", "hold": "hold", "record": "record"}
"""The operation that hooks receive, for a request that does not replace a hold."""


class AsyncUnlimited:
    """The gate of a limiter without rules: everything is admitted."""

    async def decide(self, request: Request) -> Answer:
        check_costs((), request)
        return UNLIMITED, None

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        return

    async def reset(self, key: Key | None) -> None:
        return


class AsyncTimed:
    """A gate with a clock, which is used for calls without `now=`."""

    def __init__(self, gate: AsyncGate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock

    async def decide(self, request: Request) -> Answer:
        return await self._gate.decide(request.at(reading(self._clock)))

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._gate.refund(receipts, cost, reading(self._clock) if now is None else now)

    async def reset(self, key: Key | None) -> None:
        await self._gate.reset(key)


class AsyncQuoted:
    """A gate that calls a function for the quotas of each caller."""

    def __init__(
        self, gate: AsyncGate, quotas: QuotaCache, pick: Callable[[Key | None], tuple[PlainKey, ...]]
    ) -> None:
        self._gate = gate
        self._quotas = quotas
        self._pick = pick

    async def decide(self, request: Request) -> Answer:
        if request.quotas is None:
            request = request.with_quotas(await self._look_up(request.key, request.tier))
        return await self._gate.decide(request)

    async def _look_up(self, key: Key | None, tier: str | None) -> Quotas | None:
        self._pick(key)  # raises ConfigError for an invalid key
        caller = caller_of(key, tier)
        is_known, quotas = self._quotas.get(caller)
        if is_known:
            return quotas
        value = self._quotas.function(key, tier)
        # begin async only
        if inspect.isawaitable(value):
            value = await value
        # end async only
        return self._quotas.keep(caller, value)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._gate.refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        await self._gate.reset(key)


class AsyncObserved:
    """A gate that calls hooks for every answer and every error."""

    def __init__(self, gate: AsyncGate, limiter: str, units: Units, hooks: Hooks) -> None:
        self._gate = gate
        self._limiter = limiter
        self._by_unit = units.by_unit
        self._hooks = hooks

    async def decide(self, request: Request) -> Answer:
        called = _CALLED[request.operation] if request.replaces is None else "move"
        call = Call(self._limiter, called, request.key, self._by_unit(request.cost), request.tier)
        start = perf_counter()  # not with `Hooks.watch`, which is slower
        try:
            answer = await self._gate.decide(request)
        except Exception as error:
            self._hooks.failed(call, error, perf_counter() - start)
            raise
        seconds = perf_counter() - start
        if request.operation == "record":
            self._hooks.completed(call, seconds, answer[0].degraded)
        else:
            self._hooks.decided(call, answer[0], seconds)
        return answer

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        call = Call(self._limiter, "refund", None, self._by_unit(cost), None)
        with self._hooks.watch(call) as seconds:
            await self._gate.refund(receipts, cost, now)
        self._hooks.completed(call, seconds(), False)

    async def reset(self, key: Key | None) -> None:
        call = Call(self._limiter, "reset", key, 0, None)
        with self._hooks.watch(call) as seconds:
            await self._gate.reset(key)
        self._hooks.completed(call, seconds(), False)
