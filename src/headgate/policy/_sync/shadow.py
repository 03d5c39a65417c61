# Generated from src/headgate/policy/_async/shadow.py by tools/unasync.py. Do not edit.
"""Shadow rules: asked beside the live ones, to see what they would do. They never refuse, and never raise."""

from __future__ import annotations

from headgate._sync.limiter import Limiter
from headgate.costs import Costs
from headgate.keys import Key
from headgate.policy.shadows import ShadowRule
from headgate.stores.base import Gate, Receipts
from headgate.stores.request import Request


class Shadow(ShadowRule):
    """One shadow rule."""

    _limiter_type = Limiter
    _gate: Gate

    def ask(self, request: Request, *, was_refused: bool = False) -> Receipts | None:
        """Count what the rule says, and take the units if it admits; return what gives them back, if that is wanted."""
        if request.operation == "record":
            with self.tally.reporting():
                self._gate.ask(self._own_request(request))
            return None
        call = self._call_of(request)
        try:
            with self._hooks.watch(call) as seconds:
                decision, receipts = self._gate.ask(self._own_request(request))
        except Exception as error:  # noqa: BLE001  # a shadow must not be felt
            self._count_failure(error)
            return None
        self._count(call, decision, seconds(), was_refused)
        return receipts

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give units back."""
        with self.tally.reporting():
            self._gate.refund(receipts, cost, now)

    def reset(self, key: Key | None) -> None:
        """Forget what was counted for a key."""
        with self.tally.reporting():
            self._gate.reset(self._own(key))
