"""Shadow rules, which never refuse and never raise, and the gate of live and shadow rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headgate.costs import Costs
from headgate.keys import Key
from headgate.policy.shadows import SHADOW, ShadowedRules, ShadowRule, as_hit, is_shadow, live_part, own_part
from headgate.stores.base import Answer, AsyncGate, Receipts
from headgate.stores.request import Request

T = TypeVar("T")


class AsyncShadow(ShadowRule):
    """One shadow rule."""

    _gate: AsyncGate

    async def decide(self, request: Request, *, was_refused: bool = False) -> Receipts | None:
        """Decide by the rule, count the decision, and return the receipts of its units, if any.

        It never raises.
        """
        if request.operation == "record":
            with self.tally.reporting():
                await self._gate.decide(self._own_request(request))
            return None
        call = self._call_of(request)
        try:
            with self._hooks.watch(call) as seconds:
                decision, receipts = await self._gate.decide(self._own_request(request))
        except Exception as error:  # noqa: BLE001  # a shadow rule must not affect calls
            self._count_failure(error)
            return None
        self._count(call, decision, seconds(), was_refused)
        return receipts

    async def renew(self, request: Request) -> None:
        """Extend the lease of a hold in this rule, if there is one."""
        own = own_part(request.replaces, self)
        if self.rule.kind == "concurrent" and own is not None and own[0][1]:
            with self.tally.reporting():
                await self._gate.decide(self._own_request(request.replacing(own)))

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give units back."""
        with self.tally.reporting():
            await self._gate.refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        """Delete the counts of a key."""
        with self.tally.reporting():
            await self._gate.reset(self._own(key))


class AsyncShadowedGate(ShadowedRules[AsyncShadow]):
    """The operations of a limiter with a policy."""

    _live: AsyncGate

    async def decide(self, request: Request) -> Answer:
        decision, receipts = await self._live.decide(self._for_live(request))
        if request.operation == "peek" or not self._shadows:
            return decision, receipts
        if request.operation == "renew":
            if decision.allowed:
                await self._all(lambda shadow: shadow.renew(request))
            return decision, None
        if not decision.allowed:
            for shadow in self._candidates_for(request, decision):
                await shadow.decide(as_hit(request), was_refused=True)
            return decision, receipts
        try:
            taken = await self._all(
                lambda shadow: shadow.decide(request.replacing(own_part(request.replaces, shadow)))
            )
        except BaseException:
            # Cancelled or interrupted: this hold would never be settled. Units that replace a hold stay.
            if receipts is not None and request.replaces is None:
                await self._live.refund(receipts, request.cost, request.now)
            raise
        also = tuple(
            ((SHADOW, shadow.rule.identity, place), receipt)
            for shadow, own in zip(self._shadows, taken, strict=True)
            for place, receipt in own or ()
        )
        return decision, (receipts or ()) + also or None

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        if live := live_part(receipts):
            await self._live.refund(live, cost, now)
        for place, receipt in receipts:
            if is_shadow(place) and (shadow := self._by_identity.get(place[1])) is not None:
                await shadow.refund(((place[2], receipt),), shadow.cost_in(cost), now)

    async def reset(self, key: Key | None) -> None:
        await self._live.reset(self.without_foreign(key))
        await self._all(lambda shadow: shadow.reset(key))

    async def _all(self, decide: Callable[[AsyncShadow], Awaitable[T]]) -> list[T]:
        # begin async only
        if self._together:
            return list(await asyncio.gather(*map(decide, self._shadows)))
        # end async only
        return [await decide(shadow) for shadow in self._shadows]
