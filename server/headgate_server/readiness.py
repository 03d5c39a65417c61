"""Whether the stores can count, for `/readyz`.

A check asks every store and may write to it, and anybody may ask for it. So its result is kept for a second, and requests
during a check share it.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from headgate.errors import StoreError
from headgate.policy import AsyncLivePolicy, AsyncPolicyLimiter, Policy
from headgate_server.describe import store_shown
from headgate_server.wire import StoreShown

KEPT_SECONDS = 1.0
"""How long the result of a check is kept."""

Reasons = dict[int, str | None]
"""By a store's `id`, why it cannot count; `None` if it can."""


class StoreChecks:
    """Checks the stores of the limiters.

    Args:
        live: The limiters.
    """

    def __init__(self, live: AsyncLivePolicy) -> None:
        self._live = live
        self._check: asyncio.Task[Reasons] | None = None
        self._policy: Policy | None = None
        """The policy for whose stores the last check was."""
        self._ended_at = 0.0

    async def stores(self) -> list[StoreShown]:
        """Return the state of each limiter's store; a store that is known to be down is not waited for."""
        reasons = await self._reasons()
        return [
            store_shown(limiter, limiter.policy, reasons.get(id(limiter.store)))
            for limiter in self._live.values()
        ]

    async def _reasons(self) -> Reasons:
        """Return the result of the last check, or of a new one if it is too old or the policy has changed."""
        is_old = self._check is None or (self._check.done() and monotonic() - self._ended_at >= KEPT_SECONDS)
        if self._check is None or is_old or self._policy is not self._live.policy:
            self._policy = self._live.policy
            self._check = asyncio.ensure_future(self._ask_all())
        return await asyncio.shield(self._check)

    async def _ask_all(self) -> Reasons:
        # Without rules no store is asked, so limiters with rules come last and win.
        limiters = sorted(self._live.values(), key=lambda limiter: bool(limiter.rules))
        by_store = {id(limiter.store): limiter for limiter in limiters}
        reasons = await asyncio.gather(*(_reason_against(limiter) for limiter in by_store.values()))
        self._ended_at = monotonic()
        return dict(zip(by_store, reasons, strict=True))


async def _reason_against(limiter: AsyncPolicyLimiter) -> str | None:
    """Return why a store cannot count; `None` if it can. A store known to be down is not asked."""
    if limiter.health.state == "unavailable":
        return limiter.health.reason
    try:
        await limiter.ping()
    except StoreError as error:
        return str(error)
    return None
