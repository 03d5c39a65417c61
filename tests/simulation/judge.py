"""Checks in addition to the history checker: a fault must explain each failed call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.faults.checker import check
from tests.faults.history import History
from tests.simulation.faults import SETTLING_US
from tests.simulation.program import DEADLINE

EXCUSES = {"demote": ("StoreMisconfigured",), "block": ("StoreOverloaded",)}
"""Errors that a fault explains; a fault that is not listed explains any error. A replica and a blocked event loop must not
be reported as an unreachable server."""

CLOSE_US = 40_000
"""The longest time to connect and to get a reply without a fault."""

STEP_US = 100_000
"""The maximum time by which the servers' clock is set back."""

Failure = tuple[int, int, str, str]
"""A call that failed: its start and end, the error, and the reason."""


def judge(history: History, faults: list[list[Any]], errors: list[Failure]) -> Iterator[str]:
    """Yield all violations."""
    may_free_others = has_refunded_lost_hold(history)
    for found in check(history):
        if not (may_free_others and found.kind in ("forgotten units", "too many")):
            yield str(found)
    explanations = faults + list(ends_at_deadline(history, errors))
    for start, end, error, why in errors:
        if not any(explains(fault, start, end, error) for fault in explanations):
            yield f"failed without a fault: {error}: {why}"


def explains(fault: list[Any], start: int, end: int, error: str) -> bool:
    """Return whether a fault may have caused an error."""
    begin, stop, kind = fault
    return begin - STEP_US <= end and start <= stop + SETTLING_US and error in EXCUSES.get(kind, (error,))


def ends_at_deadline(history: History, errors: list[Failure]) -> Iterator[list[Any]]:
    """Yield, as faults, the pauses of processes that ended close to the deadline of a failed call."""
    dues = [start + round(DEADLINE * 1e6) for start, _, error, _ in errors if error == "StoreTimeout"]
    for _, start, end in history.pauses:
        if any(abs(due - end) < CLOSE_US for due in dues):
            yield [start, end, "a stop until a deadline"]


def has_refunded_lost_hold(history: History) -> bool:
    """Return whether a hold was settled, confirmed or renewed that a failover may have lost.

    The receipt of a window identifies the state and the window. If a failover restored the state without the hold, a refund
    of the hold returns units of other calls. Stores declare this loss in `guarantees.may_lose`.
    """
    lost = {
        (call.worker, call.number)
        for loss in history.losses
        for call in history.calls
        if call.operation == "hold" and (call.end or loss.until) >= loss.since and call.start <= loss.until
    }
    return any((call.worker, call.hold) in lost for call in history.calls)
