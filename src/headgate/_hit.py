"""`hit` and `check` of both limiters, and the awaitable of `AsyncLimiter`. Compiled with `_hit.pxd`."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Generator
from types import FrameType
from typing import Any, TypeVar

from headgate.clock import instant
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.keys import Key
from headgate.quotas import QuotaValue
from headgate.stores.base import AsyncGate, Gate, Operation
from headgate.stores.request import Request, new_request

T = TypeVar("T")

NOT_AWAITED = "missing await: write `if await limiter.hit(key):`"


def is_called_by_asyncio() -> bool:
    """Return whether asyncio evaluates the truth value; since Python 3.12 it does so in the `repr` of a task."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") == "headgate._hit":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "asyncio.base_tasks"


class PendingCall:
    """A coroutine without a truth value.

    `if limiter.hit("alice"):` without `await` would be true for every caller, because a coroutine is. With this class it
    raises `TypeError`. It works with `await`, `create_task`, `gather`, `wait_for` and task groups.
    """

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, Any]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Resume the coroutine."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()

    def __bool__(self) -> bool:
        if is_called_by_asyncio():
            return True
        self._coroutine.close()
        raise TypeError(NOT_AWAITED)


Coroutine.register(PendingCall)


def pending_call(coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Return a coroutine without a truth value; if compiled, faster than the constructor."""
    call = PendingCall.__new__(PendingCall)
    call._coroutine = coroutine
    return call


async def decide(gate: AsyncGate, request: Request) -> Decision:
    """Return the decision of a gate."""
    return (await gate.decide(request))[0]


class HitMethods:
    """The calls of a `Limiter` that only decide.

    Attributes:
        gate: The limiter's rules bound to its store, for code that stores receipts itself, like the server.
    """

    gate: Gate

    def _decide(self, operation: Operation, key: Any, cost: Any, tier: Any, quota: Any, now: Any) -> Decision:
        """Like `hit` and `check`, but accepts a cost per unit and a quota for this call."""
        raise NotImplementedError

    def _check_tier(self, tier: str) -> None:
        """Report a tier that no rule has."""
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
        """Take units if all rules admit them.

        A refusal takes nothing. A cost of 0 is admitted and writes nothing.

        Raises:
            CostTooHigh: The cost exceeds the capacity of a rule.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        if type(cost) is not int or quota is not None:
            return self._decide("hit", key, cost, tier, quota, now)
        if tier is not None:
            self._check_tier(tier)
        return self.gate.decide(new_request("hit", key, cost, tier, None if now is None else instant(now)))[0]

    def check(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Decision:
        """Return the decision that `hit` would make, or `hold` for a `concurrent` rule, without taking units."""
        if type(cost) is not int or quota is not None:
            return self._decide("peek", key, cost, tier, quota, now)
        if tier is not None:
            self._check_tier(tier)
        return self.gate.decide(new_request("peek", key, cost, tier, None if now is None else instant(now)))[
            0
        ]


class AsyncHitMethods:
    """The calls of an `AsyncLimiter` that only decide.

    Attributes:
        gate: The limiter's rules bound to its store, for code that stores receipts itself, like the server.
    """

    gate: AsyncGate

    async def _decide(
        self, operation: Operation, key: Any, cost: Any, tier: Any, quota: Any, now: Any
    ) -> Decision:
        """Like `hit` and `check`, but accepts a cost per unit and a quota for this call."""
        raise NotImplementedError

    def _check_tier(self, tier: str) -> None:
        """Report a tier that no rule has."""
        raise NotImplementedError

    def hit(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Coroutine[Any, Any, Decision]:
        """Take units if all rules admit them: `await limiter.hit(key)`.

        A refusal takes nothing. A cost of 0 is admitted and writes nothing.

        Raises:
            CostTooHigh: The cost exceeds the capacity of a rule.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        if type(cost) is not int or quota is not None:
            return pending_call(self._decide("hit", key, cost, tier, quota, now))
        if tier is not None:
            self._check_tier(tier)
        request = new_request("hit", key, cost, tier, None if now is None else instant(now))
        return pending_call(decide(self.gate, request))

    def check(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Coroutine[Any, Any, Decision]:
        """Return the decision that `hit` would make, or `hold` for a `concurrent` rule, without taking units."""
        if type(cost) is not int or quota is not None:
            return pending_call(self._decide("peek", key, cost, tier, quota, now))
        if tier is not None:
            self._check_tier(tier)
        request = new_request("peek", key, cost, tier, None if now is None else instant(now))
        return pending_call(decide(self.gate, request))
