"""Units that were taken but are not final."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

from headgate._concurrency import run_without_waiting
from headgate._hit import PendingCall
from headgate._holding import NOT_ASYNC_WITH, HoldBase, ObservedHoldBase
from headgate.clock import instant
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.errors import HeadgateError, StoreError
from headgate.stores.base import AsyncGate


class AsyncHold(HoldBase):
    """Units taken from a limiter, to be settled at their true cost or released.

    Its truth value is that of the decision: true if the units were taken. As a context manager it raises `RateLimited` on
    entry if they were not, releases them if the block raises, and keeps the held cost if the block ends without settling.

    The end of the hold always frees its places in a `concurrent` rule.

    Attributes:
        decision: The decision of the hold.
        receipts: Receipts to give the units back; `None` if none were taken.
        key: The key.
        cost: The requested units.
        tier: The caller's tier.
    """

    _gate: AsyncGate

    @overload
    async def settle(self, cost: int, *, now: float | None = None) -> int: ...

    @overload
    async def settle(self, cost: Mapping[str, int], *, now: float | None = None) -> Mapping[str, int]: ...

    async def settle(self, cost: Cost, *, now: float | None = None) -> Cost:
        """Make the hold final at its true cost, and return the final cost.

        If the true cost is lower than the held cost, the difference is given back, as far as it still counts. If it is
        higher, the excess is recorded, even beyond the limit; `degraded` is true if the store could not be reached for it.
        Units that a cost by unit does not name keep their held cost. Only the first call of `settle`, `confirm` or `release`
        has an effect; later ones return its result. A hold with an explicit `now=` is settled at that time by default.
        """
        final = self._units.settled(cost, self._costs)
        at = self._at if now is None else instant(now)
        with self._lock:  # two threads may settle at once, and only one of them may give back
            if self._final is not None:
                return self._final
            # Final before it is sent: if the outcome stays unknown, sending it again could give back twice.
            self._final = standing = self._standing(cost, final)
        back, more = self._units.difference(self._costs, final)
        try:
            if more:
                recorded, _ = await self._gate.decide(self._request("record", more, at))
                self._is_excess_degraded = recorded.degraded
        finally:
            try:
                if back and self.receipts is not None:
                    await self._gate.refund(self.receipts, back, at)
            finally:
                self._tell_end()
        return standing

    async def release(self, *, now: float | None = None) -> Cost:
        """Give all units back, as far as they still count, like `settle(0)`."""
        return await self.settle(0, now=now)

    async def confirm(self, cost: Cost | None = None, *, now: float | None = None) -> Decision:
        """Make the hold final as of now, for work that counts at its end, not at its start.

        The units are given back and taken again in one step, at their true cost if it is given. If they are not available
        now, the decision is a refusal with `retry_after`, and the hold is unchanged and still open. The limit holds for both
        times: that of the hold and that of the confirmation. If the hold is already final, it does not change, and the
        decision is true if its units count.

        Raises:
            CostTooHigh: The cost exceeds the capacity of a rule.
        """
        final = self._costs if cost is None else self._units.settled(cost, self._costs)
        at = self._at if now is None else instant(now)
        with self._lock:
            if self._final is not None:
                return self._ended()
            self._final = self._standing(self.cost if cost is None else cost, final)
        try:
            costs = self._units.without_places(final)
            decision, _ = await self._gate.decide(self._request("hold", costs, at, self.receipts))
            if decision.allowed:
                self._confirmed = decision
            else:
                self._final = None
        except HeadgateError as error:
            if not isinstance(error, StoreError):  # a StoreError may have taken the units
                self._final = None
            raise
        finally:
            self._tell_end()
        return decision

    async def renew(self, *, now: float | None = None) -> Decision:
        """Extend the lease of the hold's places, counted from now; other rules are neither checked nor charged.

        A renewal may be repeated, also after it was cancelled or its reply was lost. If the lease or the hold is over, the
        decision is a refusal without `retry_after`, because other holds may have the places. A hold that a failure policy
        admitted has no lease; the result is its decision.

        Raises:
            ConfigError: No rule of the limiter is `concurrent`.
        """
        request = self._renewal(now)
        if request is None:
            return self.decision if self._final is None else self.decision.as_refused()
        decision, _ = await self._gate.decide(request)
        return decision

    async def __aenter__(self) -> AsyncHold:
        self.decision.raise_if_denied()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc_type is None:
            await self.settle(self.cost)
        # begin async only
        elif exc_type is GeneratorExit:
            run_without_waiting(self.release())
        # end async only
        else:
            await self.release()


class AsyncObservedHold(ObservedHoldBase, AsyncHold):
    """A hold that calls hooks when it ends."""


# begin async only
class PendingHold(PendingCall):
    """A hold that is taken when it is awaited or entered."""

    __slots__ = ("_hold",)

    if TYPE_CHECKING:

        def __await__(self) -> Generator[Any, None, AsyncHold]: ...

    else:

        def __enter__(self) -> NoReturn:
            self.close()
            raise TypeError(NOT_ASYNC_WITH)

        def __exit__(self, *exc: object) -> None: ...

    async def __aenter__(self) -> AsyncHold:
        self._hold = await self
        return await self._hold.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._hold.__aexit__(exc_type, exc, tb)


# end async only
