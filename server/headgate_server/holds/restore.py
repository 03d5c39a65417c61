"""Rebuild a hold from its record, so that any worker can settle, confirm or renew it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headgate import AsyncHold, AsyncLimiter, ConfigError, CostTooHigh
from headgate.algorithms import algorithm_for
from headgate.costs import Cost, Units
from headgate.policy import SHADOW, AsyncVersion
from headgate.quotas import quotas_of
from headgate.stores import UNLIMITED
from headgate_server.holds.record import StoredHold

logger = logging.getLogger("headgate")


class RestoredHold:
    """A hold, rebuilt from its record for the current rules of its limiter.

    If these have changed, the hold is settled by the rules that are left of its own. Other rules, and shadow rules, neither
    get units back nor count more. Neither does a store that did not charge the hold.

    Args:
        limiter: The limiter.
        stored: The hold in the store.
    """

    def __init__(self, limiter: AsyncLimiter, stored: StoredHold) -> None:
        self._limiter = limiter
        self._stored = stored
        by_identity = {rule.identity: rule for rule in limiter.rules}
        self.has_same_rules = tuple(by_identity) == stored.record.rules
        self._rules = tuple(
            by_identity[identity] for identity in stored.record.rules if identity in by_identity
        )
        self._units = Units(limiter.name, self._rules)
        held = stored.record.cost
        if not isinstance(held, int):  # without units that no rule counts now
            held = {rule.unit: held.get(rule.unit, 0) for rule in self._rules} or 0
        self._cost = held

    def final_cost(self, cost: Cost) -> Cost:
        """Return the final cost if the hold is settled at this cost.

        Raises:
            ConfigError: The cost is not a whole number, or names a unit that the limiter does not count.
            CostTooHigh: The excess could not be recorded even in a fresh state.
        """
        held = self._units.costs(self._cost)
        final = self._units.settled(cost, held)
        _, more = self._units.difference(held, final)
        each = more if isinstance(more, tuple) else (more,) * len(self._rules)
        for rule, units in zip(self._rules, each, strict=True):
            if units:
                algorithm_for(rule, rule.quota_for(self._stored.record.tier)).record(None, 0, units, 0)
        return cost if isinstance(cost, int) else self._units.named(final)

    def hold(self, *, calls_hooks: bool = False, to_renew: bool = False) -> AsyncHold:
        """Return the hold.

        Args:
            calls_hooks: Whether the limiter's hooks are called at its end.
            to_renew: Whether its leases are renewed; then receipts that may have been used are included.
        """
        limiter, record = self._limiter, self._stored.record
        may_refund = limiter.store.notes is self._stored.notes and (to_renew or not record.lost)
        receipts = (record.receipts or ()) if may_refund else ()
        live = tuple(receipt for receipt in receipts if _shadow_rule(receipt) is None)
        if self.has_same_rules:
            known = _shadow_rules(limiter)
            shadows = tuple(receipt for receipt in receipts if _shadow_rule(receipt) in known)
            gate, kept = limiter.settling(shadows), live + shadows
            quotas = quotas_of(limiter.rules, record.quota)
        else:
            own = AsyncLimiter(*self._rules, name=limiter.name, store=limiter.store)
            charged = dict(zip(record.rules, live, strict=False))
            gate = own.gate
            kept = tuple(charged[rule.identity] for rule in self._rules if rule.identity in charged)
            quotas = None
        new_hold: Callable[..., AsyncHold] = limiter.new_hold if calls_hooks else AsyncHold
        return new_hold(
            *(gate, UNLIMITED, kept or None, record.key, self._cost, record.tier),
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
                self._stored.record.cost,
                self._limiter.name,
                error,
            )
        return hold.degraded


def _shadow_rules(limiter: AsyncLimiter) -> set[str | None]:
    """Return the identities of a limiter's shadow rules."""
    return (
        {shadow.rule.identity for shadow in limiter.shadows} if isinstance(limiter, AsyncVersion) else set()
    )


def _shadow_rule(receipt: tuple[object, object]) -> str | None:
    """Return the identity of the shadow rule of a receipt; `None` for a live rule."""
    match receipt:
        case ((marked, str(identity), _), _) if marked == SHADOW:
            return identity
    return None
