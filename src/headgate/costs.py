"""Costs of calls: one number for every rule, or a mapping by unit.

    limiter.hold("model", 3)                  # 3 of everything
    limiter.hold("model", {"tokens": 800})    # 800 tokens, and one request

Internally there are no mappings: a request has one number for all rules, or a tuple with one number per rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.errors import ConfigError, listed
from headgate.quota import MAX_UNITS
from headgate.rules import REQUESTS, Rule

__all__ = ["Cost", "Costs", "Units", "total"]

Cost = int | Mapping[str, int]
"""The cost in a call: one number for all units, or a number per unit; `requests` defaults to 1."""


Costs = int | tuple[int, ...]
"""The cost in a request: one number for every rule, or one number per rule."""


def total(cost: Cost) -> int:
    """Return a cost as one number: the sum over all units."""
    return cost if isinstance(cost, int) else sum(cost.values())


class Units:
    """The units of a limiter's rules.

    Attributes:
        is_freed: Per rule, whether it is `concurrent`: the end of a hold frees its units, whatever the cost.
        has_places: Whether there is such a rule.
        has_penalties: Whether a rule is a penalty.
    """

    def __init__(self, limiter: str, rules: tuple[Rule, ...]) -> None:
        self._limiter = limiter
        self._units = tuple(rule.unit for rule in rules)
        self._known = {REQUESTS, *self._units}
        self.is_freed = tuple(rule.kind == "concurrent" for rule in rules)
        self.has_places = any(self.is_freed)
        self.has_penalties = any(rule.kind == "penalty" for rule in rules)

    def costs(self, cost: Cost) -> Costs:
        """Return the cost of a call for each rule.

        Raises:
            ConfigError: A unit is missing or unknown, or its cost is not a whole number.
        """
        if type(cost) is int:  # the gate checks numbers, so that hooks are called with the error
            return cost
        if not isinstance(cost, Mapping):
            check_whole(cost)
            return cost
        self._check(cost)
        missing = self._known - cost.keys() - {REQUESTS}
        if missing:
            raise ConfigError(
                f"{self._name()} also counts {listed(missing)}: add it to the cost {dict(cost)!r}"
            )
        return self._simple(tuple(cost.get(unit, 1) for unit in self._units))

    def settled(self, cost: Cost, held: Costs) -> Costs:
        """Return the final cost of a hold for each rule; units that are not named keep the held cost.

        Raises:
            ConfigError: A unit is unknown, or its cost is not a whole number.
        """
        if isinstance(cost, int) or not isinstance(cost, Mapping):  # in this order, because most are numbers
            check_whole(cost)
            return cost
        self._check(cost)
        return self._simple(
            tuple(cost.get(unit, units) for unit, units in zip(self._units, self._each(held), strict=True))
        )

    def by_unit(self, costs: Costs) -> Cost:
        """Return costs per rule as a cost by unit; a single number stays a number."""
        return self.named(costs) if isinstance(costs, tuple) else costs

    def named(self, costs: Costs) -> Mapping[str, int]:
        """Return costs per rule as a cost by unit."""
        found: dict[str, int] = {}
        for unit, cost in zip(self._units, self._each(costs), strict=True):
            found[unit] = max(cost, found.get(unit, 0))
        return found

    def difference(self, held: Costs, final: Costs) -> tuple[Costs, Costs]:
        """Return the units to give back and the units to record when a hold ends at other costs; 0 for none."""
        if isinstance(held, int) and isinstance(final, int) and not self.has_places:
            return (held - final, 0) if held > final else (0, final - held)
        every = tuple(zip(self._each(held), self._each(final), self.is_freed, strict=True))
        return (
            self._simple(tuple(units if freed else max(0, units - used) for units, used, freed in every)),
            self._simple(tuple(0 if freed else max(0, used - units) for units, used, freed in every)),
        )

    def without_places(self, costs: Costs) -> tuple[int, ...]:
        """Return costs with 0 for `concurrent` rules, whose places are freed when a hold ends."""
        return tuple(
            0 if is_freed else cost for cost, is_freed in zip(self._each(costs), self.is_freed, strict=True)
        )

    def only_places(self, costs: Costs) -> tuple[int, ...]:
        """Return costs with 0 for all rules except `concurrent` ones."""
        return tuple(
            cost if is_freed else 0 for cost, is_freed in zip(self._each(costs), self.is_freed, strict=True)
        )

    def _each(self, costs: Costs) -> tuple[int, ...]:
        return costs if isinstance(costs, tuple) else (costs,) * len(self._units)

    def _simple(self, costs: tuple[int, ...]) -> Costs:
        """Return a single number if all costs are equal, because stores handle numbers faster."""
        return costs[0] if len(set(costs)) == 1 else costs

    def _check(self, cost: Mapping[str, int]) -> None:
        unknown = cost.keys() - self._known
        if unknown and self._units:
            raise ConfigError(
                f"{self._name()} does not count {listed(unknown)}; it counts {listed(self._known)}"
            )
        for units in cost.values():
            check_whole(units)

    def _name(self) -> str:
        return f"limiter {self._limiter!r}" if self._limiter else "the limiter"


def check_whole(cost: object) -> None:
    """Refuse a cost that is not a whole number of units.

    Raises:
        ConfigError: The cost is not a whole number, or out of range.
    """
    if type(cost) is not int or not 0 <= cost <= MAX_UNITS:
        raise ConfigError(f"a cost is a whole number from 0 to {MAX_UNITS}, not {cost!r}")
