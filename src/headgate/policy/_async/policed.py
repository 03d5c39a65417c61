"""A gate with a policy around it: which tier a call is in, and shadow rules beside the live ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard, TypeVar

from headgate.decision import Decision
from headgate.keys import Key
from headgate.policy._async.shadow import AsyncShadow
from headgate.policy.model import LimiterPolicy
from headgate.stores.base import AsyncGate, Receipts

T = TypeVar("T")

SHADOW = "shadow"
"""What the place of a shadow rule's receipt begins with: `(SHADOW, identity of the rule, place)`. Plain, so that whoever
keeps receipts for another process can keep these."""


class AsyncPoliced:
    """The operations of a limiter with a policy.

    Args:
        live: The gate of the live rules.
        policy: What the file says of the limiter.
        shadows: Its shadow rules.
        together: Whether shadow rules are asked all at once: on a store over a network, which then is asked once.
    """

    def __init__(
        self, live: AsyncGate, policy: LimiterPolicy, shadows: Sequence[AsyncShadow], *, together: bool
    ) -> None:
        self._live = live
        self._tier_for = policy.tier_for
        self._shadows = tuple(shadows)
        self._by_identity = {shadow.rule.identity: shadow for shadow in shadows}
        self._together = together and len(self._shadows) > 1
        live_scopes = {rule.scope for rule in policy.rules}
        self._foreign = frozenset(rule.scope for rule in policy.shadow) - live_scopes
        """Scopes that only shadow rules count by."""

    def gate(self) -> AsyncGate:
        """Return the operations."""
        return AsyncGate(self.hit, self.peek, self.hold, self.record, self.refund, self.reset)

    def settling(self, receipts: Receipts | None) -> AsyncGate:
        """Return the operations for the settlement of a hold.

        What it cost beyond what was held is counted where it was held; not by a shadow rule that would have refused it.
        """
        if not self._shadows:
            return self.gate()
        holders = [place[1] for place, _ in receipts or () if _is_shadow(place)]

        async def record(key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
            await self._live.record(self.without_foreign(key), cost, self._tier_for(key, tier), now)
            for identity in holders:
                await self._by_identity[identity].record(key, cost, tier, now)

        return replace(self.gate(), record=record)

    async def hit(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        decision = await self._live.hit(self.without_foreign(key), cost, self._tier_for(key, tier), now)
        if decision.allowed and self._shadows:
            await self._all(lambda shadow: shadow.hit(key, cost, tier, now))
        return decision

    async def peek(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return await self._live.peek(self.without_foreign(key), cost, self._tier_for(key, tier), now)

    async def hold(
        self, key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Decision, Receipts | None]:
        decision, receipts = await self._live.hold(
            self.without_foreign(key), cost, self._tier_for(key, tier), now
        )
        if not decision.allowed or not self._shadows:
            return decision, receipts
        try:
            taken = await self._all(lambda shadow: shadow.hold(key, cost, tier, now))
        except BaseException:
            # Cancelled, or interrupted: nobody will ever settle this hold.
            if receipts is not None:
                await self._live.refund(receipts, cost, now)
            raise
        also = tuple(
            ((SHADOW, shadow.rule.identity, place), receipt)
            for shadow, own in zip(self._shadows, taken, strict=True)
            for place, receipt in own or ()
        )
        return decision, (receipts or ()) + also or None

    async def record(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
        await self._live.record(self.without_foreign(key), cost, self._tier_for(key, tier), now)
        await self._all(lambda shadow: shadow.record(key, cost, tier, now))

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        live = tuple(entry for entry in receipts if not _is_shadow(entry[0]))
        if live:
            await self._live.refund(live, cost, now)
        for place, receipt in receipts:
            if _is_shadow(place) and (shadow := self._by_identity.get(place[1])) is not None:
                await shadow.refund(((place[2], receipt),), cost, now)

    async def reset(self, key: Key | None) -> None:
        await self._live.reset(self.without_foreign(key))
        await self._all(lambda shadow: shadow.reset(key))

    def without_foreign(self, key: Key | None) -> Key | None:
        """Return a call's key without what only shadow rules count by: the live ones would not know it."""
        if not self._foreign or not isinstance(key, Mapping):
            return key
        return {scope: part for scope, part in key.items() if scope not in self._foreign}

    async def _all(self, ask: Callable[[AsyncShadow], Awaitable[T]]) -> list[T]:
        # begin async only
        if self._together:
            return list(await asyncio.gather(*map(ask, self._shadows)))
        # end async only
        return [await ask(shadow) for shadow in self._shadows]


def _is_shadow(place: object) -> TypeGuard[tuple[str, str, object]]:
    return isinstance(place, tuple) and place[:1] == (SHADOW,)
