# Generated from src/headgate/policy/_async/shadow.py by tools/unasync.py. Do not edit.
"""Shadow rules: asked beside the live ones, to see what they would do. They never refuse, and never raise."""

from __future__ import annotations

from collections.abc import Mapping

from headgate._sync.limiter import Limiter
from headgate.clock import Clock
from headgate.costs import Costs
from headgate.errors import ConfigError, CostTooHigh
from headgate.hooks import Call, Hooks
from headgate.keys import Key
from headgate.policy.model import LimiterPolicy, known_tiers
from headgate.policy.tally import ShadowTally
from headgate.rules import SHARED, Rule
from headgate.stores.base import Receipts, Store
from headgate.stores.request import Request


class Shadow:
    """One shadow rule, decided on its own: what another one would refuse must not keep it from counting.

    Attributes:
        rule: The rule.
        candidate_for: The name of the live rule that it is a candidate for; `None` if for none.
        tally: What it has answered.
    """

    def __init__(
        self,
        rule: Rule,
        policy: LimiterPolicy,
        store: Store,
        clock: Clock | None,
        hooks: Hooks,
        tally: ShadowTally,
    ) -> None:
        self.rule = rule
        self.candidate_for = policy.candidate_for.get(rule.name)
        self.tally = tally
        self._policy = policy
        self._hooks = hooks
        # The tiers that would be known if the rule were live.
        self._known = known_tiers((*policy.rules, rule))
        # A cost for each live rule is, for this one, that of a live rule that counts the same.
        self._like = next(
            (
                i
                for i, live in enumerate(policy.rules)
                if live.unit == rule.unit and (live.kind == "concurrent") is (rule.kind == "concurrent")
            ),
            None,
        )
        limiter = Limiter(
            rule,
            name=policy.name,
            store=store,
            clock=clock,
            on_store_error="open",
            deadline=policy.deadline,
        )
        self._gate = limiter.gate

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

    def _own_request(self, request: Request) -> Request:
        cost, replaces = self.cost_in(request.cost), request.replaces
        key, tier = self._own(request.key), self._policy.tier_among(self._known, request.key, request.tier)
        costs = cost if replaces is None else (cost,)
        return Request(request.operation, key, costs, tier, request.now, None, replaces)

    def cost_in(self, cost: Costs) -> int:
        """Return what this rule is charged of a cost; nothing if no live rule counts the same."""
        if isinstance(cost, int):
            return cost
        return 0 if self._like is None else cost[self._like]

    def _own(self, key: Key | None) -> Key | None:
        """Return the part of a call's key that this rule counts by."""
        scope = self.rule.scope
        if scope is None or scope == SHARED or not isinstance(key, Mapping):
            return key
        if scope not in key:
            raise ConfigError(f"the key has no entry for {scope!r}, which the rule counts by")
        return {scope: key[scope]}
