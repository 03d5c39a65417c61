"""Quotas of single keys: which of them apply to a call, when several do.

The key of an override is text, or names some of the scopes of a call; it applies to every call that has these entries,
whatever else the call's key has. So two overrides may meet in one call (`{user = "42"}` and `{realm = "north"}`). Then all
of them apply; where two speak of the same rule, the one that names more scopes wins. Two that name equally many, and could
meet in a call, are an error, unless a third one for just that call decides.

All meetings are worked out here, once, so that a call needs no more than a look at a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, combinations

from headgate.quota import Quota

Entries = frozenset[tuple[str, str]]

MOST_MEETINGS = 10_000
"""Beyond these, a file says something else than its author thinks."""


class OverridesError(Exception):
    """Overrides contradict each other.

    Attributes:
        index: The later one of those that do.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def resolved(overrides: Mapping[object, Mapping[str, Quota]]) -> dict[object, Mapping[str, Quota]]:
    """Return the quotas of every key that is overridden, and of every key in which overrides meet.

    The one that applies to a call is that of the most entries among those that the call's key has.

    Args:
        overrides: By key, as `frozen_key` makes it, quotas by the name of the rule; in the order of the file.

    Raises:
        OverridesError: Two of them contradict each other.
    """
    scoped: dict[Entries, tuple[int, Mapping[str, Quota]]] = {
        key: (index, quotas)
        for index, (key, quotas) in enumerate(overrides.items())
        if isinstance(key, frozenset)
    }
    return {**overrides, **{key: _at(key, scoped) for key in _meetings(scoped)}}


def _meetings(scoped: Mapping[Entries, tuple[int, object]]) -> set[Entries]:
    """Return all keys of overrides, and every combination of them that one call can have."""
    by_shape: dict[frozenset[str], set[Entries]] = {}
    for key, (index, _) in scoped.items():
        shape = _shape(key)
        found = [key]
        for other_shape, others in by_shape.items():
            # Equal ones are other values of the same scopes, which no call has both of.
            if other_shape != shape:
                found += [key | other for other in others if _agree(key, other)]
        for entries in found:
            by_shape.setdefault(_shape(entries), set()).add(entries)
        if sum(map(len, by_shape.values())) > MOST_MEETINGS:
            raise OverridesError(
                index, f"the overrides meet in more than {MOST_MEETINGS:,} ways; use tiers instead"
            )
    return set(chain.from_iterable(by_shape.values()))


def _at(key: Entries, scoped: Mapping[Entries, tuple[int, Mapping[str, Quota]]]) -> Mapping[str, Quota]:
    """Return the quotas of calls with these entries."""
    said: dict[str, tuple[int, int, Quota]] = {}  # by rule: entries of who says it, its index, what it says
    decided = scoped[key][1] if key in scoped else {}
    for size in range(1, len(key) + 1):  # the nearer ones later, over those before
        for part in map(frozenset, combinations(sorted(key), size)):
            index, quotas = scoped.get(part, (0, {}))
            for rule, quota in quotas.items():
                other_size, other_index, other = said.get(rule, (0, 0, quota))
                if other_size == size and other != quota and rule not in decided:
                    raise OverridesError(
                        max(index, other_index),
                        f"overrides contradict each other about rule {rule!r} for key {dict(sorted(key))!r}; "
                        f"write one for just that key",
                    )
                said[rule] = size, index, quota
    return {rule: quota for rule, (_, _, quota) in said.items()}


def _shape(key: Entries) -> frozenset[str]:
    return frozenset(scope for scope, _ in key)


def _agree(key: Entries, other: Entries) -> bool:
    """Return whether a call can have the entries of both."""
    there = dict(key)
    return all(there.get(scope, value) == value for scope, value in other)
