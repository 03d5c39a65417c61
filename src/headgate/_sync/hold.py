# Generated from src/headgate/_async/hold.py by tools/unasync.py. Do not edit.
"""Units that were taken but are not final."""

from __future__ import annotations

import threading
from types import TracebackType

from headgate.clock import instant
from headgate.decision import Decision
from headgate.hooks import Call, Hooks
from headgate.keys import Key
from headgate.stores.base import Gate, Receipts, check_whole
from headgate.stores.request import Request


class Hold:
    """Units taken from a limiter, to be settled at their true cost or released.

    It can be asked like a decision: true if the units were taken. As a context manager it raises `RateLimited` on entry
    if they were not, releases them if the block raises, and keeps what was held if the block ends without settling.

    Attributes:
        decision: The answer to the hold.
        receipts: What gives its units back; `None` if none were taken.
        key: Whose units.
        cost: The units asked for.
        tier: The caller's tier.
    """

    is_observed = False
    """Whether hooks hear of its end."""

    def __init__(
        self,
        gate: Gate,
        decision: Decision,
        receipts: Receipts | None,
        key: Key | None,
        cost: int,
        tier: str | None,
        at: int | None = None,
    ) -> None:
        self.decision = decision
        self.cost = cost
        self._gate = gate
        self.receipts = receipts
        self.key = key
        self.tier = tier
        self._at = at
        self._final: int | None = None if decision.allowed else 0
        self._lock = threading.Lock()

    @property
    def allowed(self) -> bool:
        """Whether the units were taken."""
        return self.decision.allowed

    @property
    def final(self) -> int | None:
        """The cost that stands; `None` while the hold is open."""
        return self._final

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same hold would be taken, as of the decision."""
        return self.decision.retry_after

    def __bool__(self) -> bool:
        return self.decision.allowed

    def settle(self, cost: int, *, now: float | None = None) -> int:
        """Make the hold final at its true cost, and return the cost that stands.

        Units held beyond it are given back as far as they still count; units above what was held are recorded, even
        beyond the limit. Only the first call of `settle` or `release` counts; later ones return its result. A hold that
        was taken at a time of the caller's own is settled at that time unless another one is given.
        """
        check_whole(cost)
        at = self._at if now is None else instant(now)
        with self._lock:  # two threads may settle at once, and only one of them may give back
            if self._final is not None:
                return self._final
            # Final before it is sent: if the outcome stays unknown, sending it again could give back twice.
            self._final = cost
        if cost < self.cost and self.receipts is not None:
            self._gate.refund(self.receipts, self.cost - cost, at)
        elif cost > self.cost:
            self._gate.ask(Request("record", self.key, cost - self.cost, self.tier, at))
        return cost

    def release(self, *, now: float | None = None) -> int:
        """Give all units back, as far as they still count; as `settle(0)`."""
        return self.settle(0, now=now)

    def forget(self) -> None:
        """Take the hold to be settled elsewhere, by its receipts: it does nothing more, and hooks hear no more of it."""
        self._final = self.cost

    def __enter__(self) -> Hold:
        self.decision.raise_if_denied()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.settle(self.cost)
        else:
            self.release()

    def __repr__(self) -> str:
        state = "open" if self._final is None else f"settled at {self._final}"
        return f"<{type(self).__name__} of {self.cost}, {state}: {self.decision}>"


class ObservedHold(Hold):
    """A hold of whose end hooks hear."""

    is_observed = True

    def __init__(
        self,
        hooks: Hooks,
        limiter: str,
        gate: Gate,
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

    def settle(self, cost: int, *, now: float | None = None) -> int:
        was_open = self._final is None
        try:
            return super().settle(cost, now=now)
        finally:
            # Also if the store failed: the hold is final then, too.
            if was_open and self._final is not None:
                self._hooks.settled(self._call, self._final)

    def __del__(self) -> None:
        if self._final is None:
            self._hooks.settled(self._call, None)
