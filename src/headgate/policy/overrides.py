"""Overrides: quotas of single keys, and the resolution of overlapping overrides.

The key of an override is text, or a mapping with some of the scopes of a call; it applies to every call with these entries.
So two overrides may match the same call (`{user = "42"}` and `{realm = "north"}`). Then both apply; if they have quotas for
the same rule, the one with more scopes wins. Two overrides with equally many scopes that can match the same call are an
error, unless a third one has the union of their keys.

All combinations are computed here once, so that a call needs only a table lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, combinations

from headgate.quota import Quota

Entries = frozenset[tuple[str, str]]

MOST_COMBINATIONS = 10_000
"""Limit of combinations of overlapping overrides."""


class OverridesError(Exception):
    """Contradictory overrides.

    Attributes:
        index: Index of the later override.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def resolved(overrides: Mapping[object, Mapping[str, Quota]]) -> dict[object, Mapping[str, Quota]]:
    """Return the quotas of every overridden key, and of every combination of overlapping keys.

    The entry that applies to a call is the matching one with the most scopes.

    Args:
        overrides: Quotas by name of the rule, by key in the form of `frozen_key`; in the order of the file.

    Raises:
        OverridesError: Two overrides contradict each other.
    """
    scoped: dict[Entries, tuple[int, Mapping[str, Quota]]] = {
        key: (index, quotas)
        for index, (key, quotas) in enumerate(overrides.items())
        if isinstance(key, frozenset)
    }
    return {**overrides, **{key: _at(key, scoped) for key in _combinations(scoped)}}


def _combinations(scoped: Mapping[Entries, tuple[int, object]]) -> set[Entries]:
    """Return all keys of overrides, and every combination that can match one call."""
    by_shape: dict[frozenset[str], set[Entries]] = {}
    for key, (index, _) in scoped.items():
        shape = _shape(key)
        found = [key]
        for other_shape, others in by_shape.items():
            # Keys with the same scopes have different values, so no call matches both.
            if other_shape != shape:
                found += [key | other for other in others if _agree(key, other)]
        for entries in found:
            by_shape.setdefault(_shape(entries), set()).add(entries)
        if sum(map(len, by_shape.values())) > MOST_COMBINATIONS:
            raise OverridesError(
                index, f"the overrides overlap in more than {MOST_COMBINATIONS:,} ways; use tiers instead"
            )
    return set(chain.from_iterable(by_shape.values()))


def _at(key: Entries, scoped: Mapping[Entries, tuple[int, Mapping[str, Quota]]]) -> Mapping[str, Quota]:
    """Return the quotas of calls with these entries."""
    chosen: dict[
        str, tuple[int, int, Quota]
    ] = {}  # by rule: number of scopes and index of the override, and its quota
    decided = scoped[key][1] if key in scoped else {}
    for size in range(1, len(key) + 1):  # more scopes later: they replace earlier ones
        for part in map(frozenset, combinations(sorted(key), size)):
            index, quotas = scoped.get(part, (0, {}))
            for rule, quota in quotas.items():
                other_size, other_index, other = chosen.get(rule, (0, 0, quota))
                if other_size == size and other != quota and rule not in decided:
                    raise OverridesError(
                        max(index, other_index),
                        f"overrides contradict each other about rule {rule!r} for key {dict(sorted(key))!r}; "
                        f"add an override for exactly that key",
                    )
                chosen[rule] = size, index, quota
    return {rule: quota for rule, (_, _, quota) in chosen.items()}


def _shape(key: Entries) -> frozenset[str]:
    return frozenset(scope for scope, _ in key)


def _agree(key: Entries, other: Entries) -> bool:
    """Return whether a call can match both."""
    there = dict(key)
    return all(there.get(scope, value) == value for scope, value in other)
