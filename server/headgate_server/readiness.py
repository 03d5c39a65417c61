"""Whether the stores can count, for `/readyz`."""

from __future__ import annotations

import asyncio

from headgate import StoreError
from headgate.policy import AsyncLivePolicy, AsyncPolicyLimiter
from headgate_server.describe import store_shown
from headgate_server.kept_result import KeptResult
from headgate_server.wire import StoreShown

Reasons = dict[int, str | None]
"""Reasons why stores cannot count, by the store's `id`; `None` for a store that can."""


class StoreChecks:
    """Checks the stores of the limiters, at most once a second, because a check may write and needs no permission.

    Args:
        live: The limiters.
    """

    def __init__(self, live: AsyncLivePolicy) -> None:
        self._live = live
        self._reasons = KeptResult(self._ask_all)
        self._policy = live.policy
        """The policy whose stores were checked last."""

    async def stores(self) -> list[StoreShown]:
        """Return the state of each limiter's store, without waiting for stores that are known to be down."""
        if self._policy is not self._live.policy:
            self._policy = self._live.policy
            self._reasons.forget()
        reasons = await self._reasons.get()
        return [
            store_shown(limiter, limiter.policy, reasons.get(id(limiter.store)))
            for limiter in self._live.values()
        ]

    async def _ask_all(self) -> Reasons:
        # A limiter without rules does not contact its store, so the results of limiters with rules come last and take
        # precedence.
        limiters = sorted(self._live.values(), key=lambda limiter: bool(limiter.rules))
        by_store = {id(limiter.store): limiter for limiter in limiters}
        reasons = await asyncio.gather(*(_reason_against(limiter) for limiter in by_store.values()))
        return dict(zip(by_store, reasons, strict=True))


async def _reason_against(limiter: AsyncPolicyLimiter) -> str | None:
    """Return the reason why a store cannot count, or `None`. A store that is known to be down is not contacted."""
    if limiter.health.state == "unavailable":
        return limiter.health.reason
    try:
        await limiter.ping()
    except StoreError as error:
        return str(error)
    return None
