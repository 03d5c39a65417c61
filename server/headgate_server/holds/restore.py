"""Rebuild a hold from its record, so that any worker can settle, confirm or renew it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headgate import AsyncHold, AsyncLimiter, ConfigError, CostTooHigh, Rule, StoreError
from headgate.algorithms import algorithm_for
from headgate.costs import Cost, Costs, Units
from headgate.keys import Key
from headgate.policy import SHADOW, AsyncVersion
from headgate.quotas import quotas_of
from headgate.stores import UNLIMITED, Answer, AsyncGate, Receipts, Request
from headgate_server.holds.stored import StoredHold

logger = logging.getLogger("headgate")


class RestoredHold:
    """A hold, rebuilt from its record for the current rules of its limiter.

    Rules added since the hold was taken get nothing back. Neither does a store that did not charge the hold.

    Args:
        limiter: The limiter.
        stored: The hold in the store.
        to_renew: Whether its leases are renewed; then receipts that may have been used are included.
    """

    def __init__(self, limiter: AsyncLimiter, stored: StoredHold, *, to_renew: bool = False) -> None:
        self._limiter = limiter
        self._record = record = stored.record
        may_refund = limiter.store.notes is stored.notes and (to_renew or not record.lost)
        receipts = (record.receipts or ()) if may_refund else ()
        charged = dict(zip(record.rules, (r for r in receipts if _shadow_rule(r) is None), strict=False))
        self._gate, shadows = _shadowed(limiter, receipts)
        by_identity = {rule.identity: rule for rule in limiter.rules}
        rules = limiter.rules
        if record.rules != tuple(by_identity):
            rules = tuple(by_identity[identity] for identity in record.rules if identity in by_identity)
            charged = {identity: charged[identity] for identity in charged if identity in by_identity}
            self._gate = _RemainingRules(self._gate, limiter, rules, tuple(charged.values()), shadows)
        self._receipts: Receipts | None = (*charged.values(), *shadows) or None
        self._rules = rules
        self._units = Units(limiter.name, rules)
        self._cost = self._known(record.cost)

    def final_cost(self, cost: Cost) -> Cost:
        """Return the final cost if the hold is settled at this cost.

        Raises:
            ConfigError: The cost is not a whole number, or names a unit that the limiter does not count.
        """
        final = self._units.settled(cost, self._units.costs(self._cost))
        return cost if isinstance(cost, int) else self._units.named(final)

    def check_excess(self, cost: Cost) -> None:
        """Refuse a cost that could not be recorded even in a fresh state, before it becomes final.

        Raises:
            CostTooHigh: The excess is above what a rule can count.
            ConfigError: The cost is not a whole number, or names a unit that the limiter does not count.
        """
        held = self._units.costs(self._cost)
        _, more = self._units.difference(held, self._units.settled(cost, held))
        each = more if isinstance(more, tuple) else (more,) * len(self._rules)
        for rule, units in zip(self._rules, each, strict=True):
            if units:
                algorithm_for(rule, rule.quota_for(self._record.tier)).record(None, 0, units, 0)

    def hold(self, *, calls_hooks: bool) -> AsyncHold:
        """Return the hold; with `calls_hooks`, the limiter's hooks are called at its end."""
        limiter, record = self._limiter, self._record
        new_hold: Callable[..., AsyncHold] = limiter.new_hold if calls_hooks else AsyncHold
        quotas = quotas_of(limiter.rules, record.quota) if self._rules == limiter.rules else None
        return new_hold(
            self._gate,
            UNLIMITED,
            self._receipts,
            record.key,
            self._cost,
            record.tier,
            units=self._units,
            quotas=quotas,
        )

    async def settle(self, cost: Cost, *, calls_hooks: bool) -> bool:
        """Give units back or record more, after the outcome became final; return `AsyncHold.degraded`."""
        hold = self.hold(calls_hooks=calls_hooks)
        try:
            await hold.settle(cost)
        except (ConfigError, CostTooHigh) as error:  # too late to refuse the cost
            logger.warning(
                "units above a hold of %s could not be recorded, in limiter %r: %s",
                self._record.cost,
                self._limiter.name,
                error,
            )
        return hold.degraded

    def _known(self, cost: Cost) -> Cost:
        """Return a cost without units that no rule counts now."""
        if isinstance(cost, int):
            return cost
        return {rule.unit: cost.get(rule.unit, 0) for rule in self._rules} or 0


class _RemainingRules:
    """The gate of a hold, if its limiter has other rules now: refunds go to the rules that are left."""

    def __init__(
        self,
        gate: AsyncGate,
        limiter: AsyncLimiter,
        rules: tuple[Rule, ...],
        kept: Receipts,
        shadows: Receipts,
    ) -> None:
        self._gate = gate
        self._bound = limiter.store.bind_async(limiter.name, rules)
        self._kept = kept
        self._shadows = shadows
        self._places = [rules.index(rule) if rule in rules else None for rule in limiter.rules]

    async def decide(self, request: Request) -> Answer:
        costs = self._of_all(request.cost)
        return await self._gate.decide(
            Request(request.operation, request.key, costs, request.tier, request.now)
        )

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        if self._kept:
            try:
                await self._bound.refund(self._kept, cost, now)
            except StoreError as error:
                logger.warning("a hold could not be given back, so it counts until it expires: %s", error)
        if self._shadows:
            await self._gate.refund(self._shadows, self._of_all(cost), now)

    async def reset(self, key: Key | None) -> None:
        await self._gate.reset(key)

    def _of_all(self, cost: Costs) -> Costs:
        """Return the costs of the remaining rules as costs of all rules of the limiter."""
        if isinstance(cost, int):
            return cost
        return tuple(0 if place is None else cost[place] for place in self._places)


def _shadowed(limiter: AsyncLimiter, receipts: Receipts) -> tuple[AsyncGate, Receipts]:
    """Return the gate to settle a hold on, and the receipts of the shadow rules that the limiter still has."""
    known = (
        {shadow.rule.identity for shadow in limiter.shadows} if isinstance(limiter, AsyncVersion) else set()
    )
    shadows = tuple(receipt for receipt in receipts if _shadow_rule(receipt) in known)
    return limiter.settling(shadows), shadows


def _shadow_rule(receipt: tuple[object, object]) -> str | None:
    """Return the identity of the shadow rule of a receipt; `None` for a live rule."""
    match receipt:
        case ((marked, str(identity), _), _) if marked == SHADOW:
            return identity
    return None
