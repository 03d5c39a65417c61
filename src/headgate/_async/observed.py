"""A gate that tells hooks what passes through it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headgate._async.hold import AsyncHold
from headgate.decision import Decision
from headgate.hooks import Call, Hooks
from headgate.keys import Key
from headgate.stores.base import AsyncGate, Receipts


def observed(gate: AsyncGate, name: str, hooks: Hooks) -> tuple[AsyncGate, Callable[..., AsyncHold]]:
    """Return the gate with hooks around it, and what makes the holds that tell them of their end."""
    return _observed_gate(gate, name, hooks), partial(ObservedHold, hooks, name)


class ObservedHold(AsyncHold):
    """A hold whose end is told to hooks."""

    def __init__(
        self,
        hooks: Hooks,
        limiter: str,
        gate: AsyncGate,
        decision: Decision,
        receipts: Receipts | None,
        key: Key | None,
        cost: int,
        tier: str | None,
        at: int | None = None,
    ) -> None:
        super().__init__(gate, decision, receipts, key, cost, tier, at)
        self._hooks = hooks
        self._call = Call(limiter, "hold", key, cost, tier)

    async def settle(self, cost: int, *, now: float | None = None) -> int:
        was_open = self._final is None
        try:
            return await super().settle(cost, now=now)
        finally:
            # Also if the store failed: the hold is final then, too.
            if was_open and self._final is not None:
                self._hooks.settled(self._call, self._final)

    def __del__(self) -> None:
        if self._final is None:
            self._hooks.settled(self._call, None)


def _observed_gate(gate: AsyncGate, name: str, hooks: Hooks) -> AsyncGate:
    async def hit(key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        with hooks.watch(Call(name, "hit", key, cost, tier)) as watch:
            decision = await gate.hit(key, cost, tier, now)
        hooks.decided(watch.call, decision, watch.seconds)
        return decision

    async def peek(key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        with hooks.watch(Call(name, "check", key, cost, tier)) as watch:
            decision = await gate.peek(key, cost, tier, now)
        hooks.decided(watch.call, decision, watch.seconds)
        return decision

    async def hold(
        key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Decision, Receipts | None]:
        with hooks.watch(Call(name, "hold", key, cost, tier)) as watch:
            decision, receipts = await gate.hold(key, cost, tier, now)
        hooks.decided(watch.call, decision, watch.seconds)
        return decision, receipts

    async def record(key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
        with hooks.watch(Call(name, "record", key, cost, tier)) as watch:
            await gate.record(key, cost, tier, now)
        hooks.completed(watch.call, watch.seconds)

    async def refund(receipts: Receipts, cost: int, now: int | None) -> None:
        with hooks.watch(Call(name, "refund", None, cost, None)) as watch:
            await gate.refund(receipts, cost, now)
        hooks.completed(watch.call, watch.seconds)

    async def reset(key: Key | None) -> None:
        with hooks.watch(Call(name, "reset", key, 0, None)) as watch:
            await gate.reset(key)
        hooks.completed(watch.call, watch.seconds)

    return AsyncGate(hit, peek, hold, record, refund, reset)
