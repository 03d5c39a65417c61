# Generated from src/headgate/policy/_async/shadow.py by tools/unasync.py. Do not edit.
"""Shadow rules: asked beside the live ones, to see what they would do. They never refuse, and never raise."""

from __future__ import annotations

from headgate._sync.limiter import Limiter
from headgate.costs import Costs
from headgate.errors import CostTooHigh
from headgate.hooks import Call
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
        # A hold is shown as the hit that it is at first: hooks hear nothing of its end.
        call = Call(self._policy.name, "hit", request.key, self.cost_in(request.cost), request.tier)
        try:
            with self._hooks.watch(call) as seconds:
                decision, receipts = self._gate.ask(self._own_request(request))
        except CostTooHigh:
            self.tally.count(refused=True)
            return None
        except Exception as error:  # noqa: BLE001  # a shadow must not be felt
            self.tally.count(failed=True)
            self.tally.report(error)
            return None
        # What the store was not asked about says nothing of the rule; the store's failure is in the log already.
        self.tally.count(
            refused=not decision.allowed and not decision.degraded,
            failed=decision.degraded,
            was_refused=was_refused,
        )
        self._hooks.decided(call, decision, seconds())
        return receipts

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give units back."""
        with self.tally.reporting():
            self._gate.refund(receipts, cost, now)

    def reset(self, key: Key | None) -> None:
        """Forget what was counted for a key."""
        with self.tally.reporting():
            self._gate.reset(self._own(key))
