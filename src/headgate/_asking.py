"""What limiters do on every call, apart from the rest of them because it is compiled too, with the types in `_asking.pxd`.
An `AsyncLimiter` answers with an `Awaiting`; see there.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import Any, NoReturn

from headgate._awaiting import NOT_AWAITED, Awaiting, decided, is_asked_by_asyncio
from headgate.clock import instant
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.keys import Key
from headgate.quotas import QuotaValue
from headgate.stores.base import AsyncGate, Gate
from headgate.stores.counters import ImmediateGate
from headgate.stores.request import Operation, Request, new_request


class Asking:
    """The calls of a `Limiter` that only decide.

    Attributes:
        gate: The limiter's rules bound to its store, for what keeps receipts itself, as the server does.
    """

    gate: Gate

    def _ask(self, operation: Operation, key: Any, cost: Any, tier: Any, quota: Any, now: Any) -> Decision:
        """As `hit` and `check`, with a cost by unit or a quota of the call's own; for the limiter to say."""
        raise NotImplementedError

    def hit(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Decision:
        """Ask for units, and take them if all rules admit.

        A refusal takes nothing. A cost of 0 is admitted and writes nothing.

        Raises:
            CostTooHigh: The cost is above what a rule could ever admit at once.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        if type(cost) is not int or quota is not None:
            return self._ask("hit", key, cost, tier, quota, now)
        return self.gate.ask(new_request("hit", key, cost, tier, None if now is None else instant(now)))[0]

    def check(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Decision:
        """Return what `hit` would answer, and take nothing; of rules that count only holds, what `hold` would."""
        if type(cost) is not int or quota is not None:
            return self._ask("peek", key, cost, tier, quota, now)
        return self.gate.ask(new_request("peek", key, cost, tier, None if now is None else instant(now)))[0]


class AsyncAsking:
    """The calls of an `AsyncLimiter` that only decide.

    Attributes:
        gate: The limiter's rules bound to its store, for what keeps receipts itself, as the server does.
    """

    gate: AsyncGate

    async def _ask(
        self, operation: Operation, key: Any, cost: Any, tier: Any, quota: Any, now: Any
    ) -> Decision:
        """As `hit` and `check`, with a cost by unit or a quota of the call's own; for the limiter to say."""
        raise NotImplementedError

    def hit(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Awaiting[Decision]:
        """Ask for units, and take them if all rules admit: `await limiter.hit(key)`.

        A refusal takes nothing. A cost of 0 is admitted and writes nothing.

        Raises:
            CostTooHigh: The cost is above what a rule could ever admit at once.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        if type(cost) is not int or quota is not None:
            return Awaiting(self._ask("hit", key, cost, tier, quota, now))
        return awaiting(self.gate, new_request("hit", key, cost, tier, None if now is None else instant(now)))

    def check(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Awaiting[Decision]:
        """Return what `hit` would answer, and take nothing; of rules that count only holds, what `hold` would."""
        if type(cost) is not int or quota is not None:
            return Awaiting(self._ask("peek", key, cost, tier, quota, now))
        return awaiting(
            self.gate, new_request("peek", key, cost, tier, None if now is None else instant(now))
        )


def awaiting(gate: AsyncGate, request: Request) -> Awaiting[Decision]:
    """Return the decision of a gate, to be awaited."""
    if type(gate) is ImmediateGate:
        immediate: ImmediateGate = gate
        answer = AwaitingDecision.__new__(AwaitingDecision)  # as `new_request` does
        answer.gate = immediate.gate
        answer.request = request
        return answer  # type: ignore[return-value]  # registered below
    return Awaiting(decided(gate, request))


# Compiled with no_gc and freelist(8): it cannot be part of a cycle, and every call makes one.
class AwaitingDecision:
    """The decision of a gate that never waits, made when it is awaited; no coroutine is needed for that."""

    __slots__ = ("gate", "request")

    gate: Gate
    request: Request | None

    def __await__(self) -> Generator[Any, None, Decision]:
        return self.decide()
        yield  # which makes this a generator, as an awaitable needs

    def decide(self) -> Decision:
        """Ask the gate, once."""
        request = self.request
        if request is None:
            raise RuntimeError("this answer was already awaited")
        self.request = None
        return self.gate.ask(request)[0]

    def send(self, value: Any) -> Any:
        """Run to the end, as an event loop does."""
        return next(self.__await__())

    def throw(self, *error: Any) -> Any:
        """Raise an exception instead of deciding."""
        self.request = None
        return self.__await__().throw(*error)

    def close(self) -> None:
        """End it without a decision."""
        self.request = None

    def __bool__(self) -> NoReturn:
        if is_asked_by_asyncio():
            return True  # type: ignore[misc]  # to everybody else it is an error
        self.request = None
        raise TypeError(NOT_AWAITED)

    def __del__(self) -> None:
        if self.request is not None:
            warnings.warn(f"the answer to {self.request} was never awaited", RuntimeWarning, stacklevel=2)


Awaiting.register(AwaitingDecision)
if not __file__.endswith(".py"):
    decide_when_awaited()  # type: ignore[name-defined]  # noqa: F821  # in C, in `_asking.pxd`
