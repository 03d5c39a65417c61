"""The part of holds that does not call the store, for threads and coroutines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from headgate._checks import Unpicklable
from headgate.clock import instant
from headgate.costs import Cost, Costs, Units
from headgate.decision import Decision
from headgate.errors import ConfigError
from headgate.hooks import Call, Hooks
from headgate.keys import Key
from headgate.quota import Quotas
from headgate.stores.base import Receipts
from headgate.stores.request import Request

NOT_ASYNC_WITH = "a hold of an AsyncLimiter needs `async with`: write `async with limiter.hold(key) as hold:`"


class HoldBase(Unpicklable):
    """Units taken from a limiter; `Hold` and `AsyncHold` settle them."""

    is_observed = False
    """Whether hooks are called at its end."""

    on_end: Callable[[], None] | None = None
    """Called when the hold ends, to wake callers that wait for its places."""

    _is_excess_degraded = False

    def __init__(
        self,
        gate: Any,
        decision: Decision,
        receipts: Receipts | None,
        key: Key | None,
        cost: Cost,
        tier: str | None,
        at: int | None = None,
        *,
        units: Units,
        quotas: Quotas | None = None,
    ) -> None:
        self.decision = decision
        self._units = units
        self._costs = units.costs(cost)
        self.cost: Cost = self._standing(cost, self._costs)
        self._gate = gate
        self.receipts = receipts
        self.key = key
        self.tier = tier
        self._quotas = quotas
        self._at = at
        self._final: Cost | None = None if decision.allowed else 0
        self._confirmed: Decision | None = None
        self._lock = threading.Lock()

    @property
    def allowed(self) -> bool:
        """Whether the units were taken."""
        return self.decision.allowed

    @property
    def degraded(self) -> bool:
        """Whether the store could not be reached for the hold or for its excess cost, so the units may not be counted."""
        return self.decision.degraded or self._is_excess_degraded

    @property
    def final(self) -> Cost | None:
        """The final cost; `None` while the hold is open."""
        return self._final

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same hold would be taken, as of the decision."""
        return self.decision.retry_after

    def __bool__(self) -> bool:
        return self.decision.allowed

    if not TYPE_CHECKING:  # type checkers report a hold of the wrong kind themselves
        # `Hold` and `AsyncHold` replace the methods of the context manager protocol that they support.

        def __enter__(self) -> NoReturn:
            raise TypeError(NOT_ASYNC_WITH)

        def __exit__(self, *exc: object) -> None: ...

        async def __aenter__(self) -> NoReturn:
            raise TypeError("a hold of a Limiter is for `with`; use an AsyncLimiter for `async with`")

        async def __aexit__(self, *exc: object) -> None: ...

    def forget(self) -> None:
        """Make the hold inactive, without hooks, because its receipts are settled elsewhere."""
        self._final = self.cost

    def _request(
        self,
        operation: Literal["hold", "record", "renew"],
        costs: Costs,
        at: int | None,
        replaces: Receipts | None = None,
    ) -> Request:
        if self._quotas is not None and isinstance(costs, int):
            costs = (costs,) * len(self._quotas)
        # A confirmation replaces nothing if the hold took no units, but no penalty counts its refusal either.
        is_final = operation != "hold"
        return Request(operation, self.key, costs, self.tier, at, self._quotas, replaces, is_final)

    def _renewal(self, now: float | None) -> Request | None:
        """Return the request that extends the lease of the hold's places; `None` if there is nothing to extend.

        Raises:
            ConfigError: It has no places.
        """
        if not self._units.has_places:
            raise ConfigError(
                "nothing to renew: no rule of this limiter is concurrent, so the hold has no lease"
            )
        at = self._at if now is None else instant(now)
        if self._final is not None or self.receipts is None:
            return None
        places = self._units.only_places(self._costs)
        leases = tuple(  # receipts of shadow rules follow those of the limiter's rules
            (place, receipt if i >= len(places) or places[i] else ())
            for i, (place, receipt) in enumerate(self.receipts)
        )
        return self._request("renew", places, at, leases)

    def _standing(self, cost: Cost, final: Costs) -> Cost:
        """Return a final cost in the form of the given cost: a number, or a mapping by unit."""
        return cost if isinstance(cost, int) else self._units.named(final)

    def _tell_end(self) -> None:
        """If the hold is final, wake waiters; also after a store failure."""
        if self._final is not None and self.on_end is not None:
            self.on_end()

    def _ended(self) -> Decision:
        if self._confirmed is not None or not self.decision.allowed:
            return self._confirmed or self.decision
        return self.decision if self._final else self.decision.as_refused()

    def __repr__(self) -> str:
        state = "open" if self._final is None else f"settled at {self._final}"
        return f"<{type(self).__name__} of {self.cost}, {state}: {self.decision}>"


class ObservedHoldBase(HoldBase):
    """Calls hooks when a hold ends; its further arguments are those of any hold."""

    is_observed = True

    def __init__(self, hooks: Hooks, limiter: str, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._hooks = hooks
        # By unit, as when it was taken.
        self._call = Call(limiter, "hold", self.key, self._units.by_unit(self._costs), self.tier)

    def _tell_end(self) -> None:
        super()._tell_end()
        if self._final is not None:
            self._hooks.settled(self._call, self._final)

    def __del__(self) -> None:
        if self._final is None:
            self._hooks.settled(self._call, None)
