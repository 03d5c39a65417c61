"""A gate with a policy around it: which tier a call is in, and shadow rules beside the live ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeGuard, TypeVar

from headgate.costs import Costs
from headgate.decision import Decision
from headgate.keys import Key
from headgate.policy._async.shadow import AsyncShadow
from headgate.policy.model import LimiterPolicy
from headgate.stores.base import Answer, AsyncGate, Receipts
from headgate.stores.request import Request

T = TypeVar("T")

SHADOW = "shadow"
"""What the place of a shadow rule's receipt begins with: `(SHADOW, identity of the rule, place)`. Plain values, so that
receipts can be kept for another process."""


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
        self._policy = policy
        self._shadows = tuple(shadows)
        self._by_identity = {shadow.rule.identity: shadow for shadow in shadows}
        self._has_candidates = any(shadow.candidate_for is not None for shadow in shadows)
        self._together = together and len(self._shadows) > 1
        live_scopes = {rule.scope for rule in policy.rules}
        self._foreign = frozenset(rule.scope for rule in policy.shadow) - live_scopes
        """Scopes that only shadow rules count by."""

    def settling(self, receipts: Receipts | None) -> AsyncGate:
        """Return the gate for the settlement of a hold.

        What it cost beyond what was held is counted where it was held; not by a shadow rule that would have refused it.
        """
        holders = {place[1] for place, _ in receipts or () if _is_shadow(place)}
        if len(holders) == len(self._shadows):
            return self
        holding = [shadow for shadow in self._shadows if shadow.rule.identity in holders]
        return AsyncPoliced(self._live, self._policy, holding, together=self._together)

    async def ask(self, request: Request) -> Answer:
        decision, receipts = await self._live.ask(self._for_live(request))
        if request.operation == "peek" or not self._shadows:
            return decision, receipts
        if not decision.allowed:
            await self._ask_candidates(request, decision)
            return decision, receipts
        try:
            taken = await self._all(
                lambda shadow: shadow.ask(request.replacing(_own(request.replaces, shadow)))
            )
        except BaseException:
            # Cancelled, or interrupted: this hold will never be settled. Units that were moved are final, or not lost.
            if receipts is not None and request.replaces is None:
                await self._live.refund(receipts, request.cost, request.now)
            raise
        also = tuple(
            ((SHADOW, shadow.rule.identity, place), receipt)
            for shadow, own in zip(self._shadows, taken, strict=True)
            for place, receipt in own or ()
        )
        return decision, (receipts or ()) + also or None

    async def _ask_candidates(self, request: Request, refusal: Decision) -> None:
        """Ask the candidates for the rule that refused a call, if it was the only rule that did.

        Not about places: no one knows how long one that was refused would have been held.
        """
        if not self._has_candidates or refusal.degraded or request.replaces is not None:
            return
        refused_by = [result.name for result in refusal.results if not result.allowed]
        # A hold that was refused is never settled.
        hit = Request("hit", request.key, request.cost, request.tier, request.now, request.quotas)
        for shadow in self._shadows:
            if [shadow.candidate_for] == refused_by and shadow.rule.kind != "concurrent":
                await shadow.ask(hit, was_refused=True)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        if live := _live_part(receipts):
            await self._live.refund(live, cost, now)
        for place, receipt in receipts:
            if _is_shadow(place) and (shadow := self._by_identity.get(place[1])) is not None:
                await shadow.refund(((place[2], receipt),), shadow.cost_in(cost), now)

    async def reset(self, key: Key | None) -> None:
        await self._live.reset(self.without_foreign(key))
        await self._all(lambda shadow: shadow.reset(key))

    def _for_live(self, request: Request) -> Request:
        """Return what the live rules are asked: with the tier that the policy gives the caller."""
        tier = self._policy.tier_for(request.key, request.tier)
        live = request.for_key(self.without_foreign(request.key), tier)
        return live if live.replaces is None else live.replacing(_live_part(live.replaces) or None)

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


def _live_part(receipts: Receipts) -> Receipts:
    return tuple(entry for entry in receipts if not _is_shadow(entry[0]))


def _own(receipts: Receipts | None, shadow: AsyncShadow) -> Receipts | None:
    """Return the receipt of a shadow rule."""
    own = [
        (place[2], receipt)
        for place, receipt in receipts or ()
        if _is_shadow(place) and place[1] == shadow.rule.identity
    ]
    return tuple(own) or None


def _is_shadow(place: object) -> TypeGuard[tuple[str, str, object]]:
    return isinstance(place, tuple) and place[:1] == (SHADOW,)
