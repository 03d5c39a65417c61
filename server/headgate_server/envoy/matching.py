"""From the descriptors of a request to the rules that decide them. Pure.

The entries of a descriptor are matched one by one against the tree of a domain: first a node with exactly this value, then
the first one whose wildcards fit, then one for any value. The node of the last entry decides. Its key consists of the
matched values that are counted separately.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from headgate.policy import DescriptorPolicy, DomainPolicy
from headgate.quota import MAX_UNITS, Quota
from headgate.rules import SHARED

_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US
PERIODS_US = {
    1: _SECOND_US,
    2: 60 * _SECOND_US,
    3: 3_600 * _SECOND_US,
    4: _DAY_US,
    5: 30 * _DAY_US,
    6: 365 * _DAY_US,
    7: 7 * _DAY_US,
}
"""Periods by the number of Envoy's unit. Months and years are 30 and 365 days, as in envoyproxy/ratelimit."""


class Asked(NamedTuple):
    """A counter that descriptors of a request refer to.

    Attributes:
        scope: The scope of its rules.
        key: The key in this scope.
        cost: The units; 0 for a check without charging.
        override: The quota of the call; `None` without one.
        places: The positions of its descriptors in the request; several if these are equal.
    """

    scope: str
    key: str
    cost: int
    override: Quota | None
    places: tuple[int, ...]


class Plan(NamedTuple):
    """The counters of a request.

    Attributes:
        decided: Counters that decide.
        recorded: Counters that record units and never refuse.
    """

    decided: list[Asked]
    recorded: list[Asked]


class Matcher:
    """The descriptors of a domain, prepared for matching."""

    def __init__(self, domain: DomainPolicy) -> None:
        self.domain = domain
        self._root = _Branch(domain.descriptors)
        self._has_replacements = _has_replacements(domain.descriptors)

    def plan(self, request: Any) -> Plan:
        """Return the counters of a `RateLimitRequest`."""
        usual = request.hits_addend or 1
        matched: list[tuple[DescriptorPolicy, Asked]] = []
        for place, descriptor in enumerate(request.descriptors):
            found = self.find(descriptor.entries)
            if found is not None and found[0].scope is not None:
                node, key = found
                cost = (
                    min(descriptor.hits_addend.value, MAX_UNITS)
                    if descriptor.HasField("hits_addend")
                    else usual
                )
                matched.append((node, Asked(found[0].scope, key, cost, override_of(descriptor), (place,))))
        if self._has_replacements:
            replaced = frozenset[str]().union(*(node.replaces for node, _ in matched))
            matched = [(node, asked) for node, asked in matched if asked.scope not in replaced]
        decided = [asked for node, asked in matched if not node.record]
        recorded = [asked for node, asked in matched if node.record]
        return Plan(_without_repetitions(decided) if len(decided) > 1 else decided, recorded)

    def find(self, entries: Iterable[Any]) -> tuple[DescriptorPolicy, str] | None:
        """Return the node of a descriptor's last entry and the key; `None` if no node matches."""
        branch, node = self._root, None
        parts: list[str] = []
        for entry in entries:
            value = entry.value
            found = branch.find(entry.key, value)
            if found is None:
                return None
            node, branch, is_counted = found
            if is_counted:
                parts.append(value)
        if node is None:
            return None
        return node, parts[0] if len(parts) == 1 else joined(parts)


def _without_repetitions(asked: list[Asked]) -> list[Asked]:
    """Return equal counters as one, with the sum of their costs."""
    found: dict[tuple[str, str, Quota | None], Asked] = {}
    for each in asked:
        place = each.scope, each.key, each.override
        same = found.get(place)
        found[place] = (
            each
            if same is None
            else each._replace(cost=min(same.cost + each.cost, MAX_UNITS), places=same.places + each.places)
        )
    return list(found.values())


class _Found(NamedTuple):
    """A node, the nodes below it, and whether its values are counted separately."""

    node: DescriptorPolicy
    below: _Branch
    is_counted: bool


class _Branch:
    """Nodes beside each other, by key and value."""

    def __init__(self, nodes: Iterable[DescriptorPolicy]) -> None:
        self._exact: dict[tuple[str, str | None], _Found] = {}
        """Nodes of one value; under `None` those of any value."""
        self._wildcards: dict[str, list[tuple[list[str], _Found]]] = {}
        """Nodes of values with `*`, by key, with the parts between the `*`."""
        for node in nodes:
            found = _Found(node, _Branch(node.descriptors), node.is_counted_by_value)
            if node.value is not None and "*" in node.value:
                self._wildcards.setdefault(node.key, []).append((node.value.split("*"), found))
            else:
                self._exact[node.key, node.value] = found

    def find(self, key: str, value: str) -> _Found | None:
        found = self._exact.get((key, value))
        if found is not None:
            return found
        if self._wildcards:
            for parts, fitting in self._wildcards.get(key, ()):
                if _fits(parts, value):
                    return fitting
        return self._exact.get((key, None))


def _fits(parts: list[str], value: str) -> bool:
    """Return whether a value consists of these parts in this order, with any text between them."""
    first, *middle, last = parts
    at, end = len(first), len(value) - len(last)
    if at > end or not value.startswith(first) or not value.endswith(last):
        return False
    for part in middle:
        found = value.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _has_replacements(nodes: Iterable[DescriptorPolicy]) -> bool:
    return any(node.replaces or _has_replacements(node.descriptors) for node in nodes)


def joined(parts: list[str]) -> str:
    """Return the key of no value or of several; different values give different keys."""
    if not parts:
        return SHARED
    return "|".join(part.replace("%", "%25").replace("|", "%7C") for part in parts)


def override_of(descriptor: Any) -> Quota | None:
    """Return the quota of a descriptor's `limit`; `None` without one, or if its unit is unknown."""
    if not descriptor.HasField("limit"):
        return None
    period_us = PERIODS_US.get(descriptor.limit.unit)
    return None if period_us is None else Quota(descriptor.limit.requests_per_unit, period_us)
