"""From the descriptors of a request to the rules that decide them. Pure.

The entries of a descriptor are matched one by one against the tree of a domain: first a node with exactly this value, then
the first one whose prefix fits, then one for any value. The node of the last entry decides. Its key consists of the matched
values that are counted separately.
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
    """A counter that descriptors of a request ask.

    Attributes:
        scope: The scope of its rules.
        key: The key in this scope.
        cost: The units; 0 for a check without charging.
        override: The quota of the call; `None` without one.
        places: The places of its descriptors in the request; several if they are equal.
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

    def plan(self, request: Any) -> Plan:
        """Return the counters of a `RateLimitRequest`."""
        matched = [
            (place, descriptor, *found)
            for place, descriptor in enumerate(request.descriptors)
            if (found := self.find(descriptor.entries)) is not None and found[0].scope is not None
        ]
        replaced = frozenset[str]().union(*(node.replaces for _, _, node, _ in matched))
        decided: dict[tuple[str, str, Quota | None], Asked] = {}
        recorded: list[Asked] = []
        for place, descriptor, node, key in matched:
            scope = node.scope
            if scope is None or scope in replaced:
                continue
            asked = Asked(scope, key, cost_of(request, descriptor), override_of(descriptor), (place,))
            if node.record:
                recorded.append(asked)
                continue
            same = decided.get((scope, key, asked.override))
            if same is not None:
                asked = asked._replace(
                    cost=min(same.cost + asked.cost, MAX_UNITS), places=(*same.places, place)
                )
            decided[scope, key, asked.override] = asked
        return Plan(list(decided.values()), recorded)

    def find(self, entries: Iterable[Any]) -> tuple[DescriptorPolicy, str] | None:
        """Return the node of a descriptor's last entry and the key; `None` if no node matches."""
        branch, node, parts = self._root, None, []
        for entry in entries:
            found = branch.find(entry.key, entry.value)
            if found is None:
                return None
            node, branch = found
            if node.is_counted_by_value:
                parts.append(entry.value)
        return None if node is None else (node, joined(parts))


class _Branch:
    """Nodes beside each other, by key and value."""

    def __init__(self, nodes: Iterable[DescriptorPolicy]) -> None:
        self._exact: dict[tuple[str, str | None], tuple[DescriptorPolicy, _Branch]] = {}
        """Nodes of one value; under `None` those of any value."""
        self._prefixes: dict[str, list[tuple[str, tuple[DescriptorPolicy, _Branch]]]] = {}
        for node in nodes:
            found = node, _Branch(node.descriptors)
            if node.value is not None and node.value.endswith("*"):
                self._prefixes.setdefault(node.key, []).append((node.value[:-1], found))
            else:
                self._exact[node.key, node.value] = found

    def find(self, key: str, value: str) -> tuple[DescriptorPolicy, _Branch] | None:
        found = self._exact.get((key, value))
        if found is not None:
            return found
        for prefix, fitting in self._prefixes.get(key, ()):
            if value.startswith(prefix):
                return fitting
        return self._exact.get((key, None))


def joined(parts: list[str]) -> str:
    """Return a key of several values; different values give different keys."""
    if not parts:
        return SHARED
    if len(parts) == 1:
        return parts[0]
    return "|".join(part.replace("%", "%25").replace("|", "%7C") for part in parts)


def cost_of(request: Any, descriptor: Any) -> int:
    """Return the units of a descriptor: its own number, even 0, or that of the request, where 0 means 1."""
    hits = descriptor.hits_addend.value if descriptor.HasField("hits_addend") else request.hits_addend or 1
    return min(hits, MAX_UNITS)


def override_of(descriptor: Any) -> Quota | None:
    """Return the quota of a descriptor's `limit`; `None` without one, or if its unit is unknown."""
    if not descriptor.HasField("limit"):
        return None
    period_us = PERIODS_US.get(descriptor.limit.unit)
    return None if period_us is None else Quota(descriptor.limit.requests_per_unit, period_us)
