"""Reduce a history that shows a violation to the relevant calls.

A call is removed only if its removal cannot create a violation. If the store counted too few units (such as "too many"), the
violation remains one with fewer calls, so any call may be removed; a hold is removed together with the calls that ended it.
If the store counted too many units (such as "refused with room"), only calls that cannot have been counted may be removed.
"""

from __future__ import annotations

from collections import defaultdict

from tests.faults.checker import Violation, check, expiry_of
from tests.faults.history import NEVER, History, HistoryCall

NEEDS_ALL = ("refused with room", "unexplained units", "waiting too long", "never admitted")
"""Violations that need all calls that may have been counted."""

Group = list[HistoryCall]


def shrink(history: History, violation: Violation) -> History:
    """Return a small history that shows the same violation."""
    rule = history.limiters[violation.limiter][violation.rule]
    groups = [
        group
        for group in groups_of(history.calls)
        if group[0].limiter == violation.limiter and (rule.shared or group[0].key == violation.key)
    ]
    last = violation.call.end or NEVER
    life = expiry_of(rule)(0) + rule.period_us
    near = [
        group for group in groups if group[0].start <= last and _ends(group) + life >= violation.call.start
    ]
    if shows(history, near, violation):
        groups = near
    if violation.kind not in NEEDS_ALL:
        groups = minimise(history, groups, violation)
    return history.with_calls(call for group in groups for call in group)


def groups_of(calls: list[HistoryCall]) -> list[Group]:
    """Return the calls in order of time, each hold in a group with its later calls."""
    groups: dict[tuple[int, int], Group] = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.start):
        groups[call.worker, call.number if call.hold is None else call.hold].append(call)
    return list(groups.values())


def shows(history: History, groups: list[Group], violation: Violation) -> bool:
    """Return whether the calls of some groups show a violation."""
    calls = [call for group in groups for call in group]
    if violation.call not in calls:
        return False
    return any(
        (found.kind, found.rule, found.call) == (violation.kind, violation.rule, violation.call)
        for found in check(history.with_calls(calls))
    )


def minimise(history: History, groups: list[Group], violation: Violation) -> list[Group]:
    """Remove as many groups as possible: first halves, then smaller and smaller parts."""
    size = len(groups) // 2
    while size:
        start = 0
        while start < len(groups):
            rest = groups[:start] + groups[start + size :]
            if shows(history, rest, violation):
                groups = rest
            else:
                start += size
        size //= 2
    return groups


def _ends(group: Group) -> int:
    """Return the end of a group's last call; `NEVER` if one of its calls may still be carried out."""
    is_open = any(call.end is None or call.outcome in ("unknown", "cancelled") for call in group)
    return NEVER if is_open else max(call.end or NEVER for call in group)
