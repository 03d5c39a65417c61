"""Checks beyond the history checker: calls that fail without a reason, and places without a hold."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.faults.history import SHARED, History, HistoryCall
from tests.simulation.programs import LONG_LEASE_US

EXCUSES = {"demote": ("StoreMisconfigured",), "block": ("StoreOverloaded",)}
"""Errors that a fault explains; any error, if it is not listed. A replica answers, so it is not away; nor is a server that a
blocked event loop does not read from."""


CLOSE_US = 40_000
"""Time that it may take to connect and to get an answer."""

STEP_US = 100_000
"""By how much the server's clock may have been set back, at most."""


def check_errors(
    faults: list[list[Any]], errors: list[tuple[int, int, str, str]], settling_us: int
) -> list[str]:
    """Return the calls that failed although no fault that explains it came near them."""

    def explains(fault: list[Any], start: int, end: int, error: str) -> bool:
        begin, stop, kind = fault
        return begin - STEP_US <= end and start <= stop + settling_us and error in EXCUSES.get(kind, (error,))

    return [
        f"failed without a fault: {error}: {why}"
        for start, end, error, why in errors
        if not any(explains(fault, start, end, error) for fault in faults)
    ]


def ends_at_a_deadline(
    pauses: list[tuple[int, int, int]], errors: list[tuple[int, int, str, str]], deadline_us: int
) -> list[list[Any]]:
    """Return, as faults, the stops of processes that ended close to the deadline of a call that failed."""
    dues = [start + deadline_us for start, _, error, _ in errors if error == "StoreTimeout"]
    return [
        [start, end, "a stop until a deadline"]
        for _, start, end in pauses
        if any(abs(due - end) < CLOSE_US for due in dues)
    ]


def has_refunded_what_was_lost(history: History) -> bool:
    """Return whether a hold was ended that a failover may have lost.

    A receipt of a window names the state and the window. If the state was restored without the hold, ending it gives back
    units of others. No store promises otherwise: `guarantees.may_lose` names the loss.
    """
    lost = {
        (call.worker, call.number)
        for loss in history.losses
        for call in history.calls
        if call.operation == "hold" and (call.end or loss.until) >= loss.since and call.start <= loss.until
    }
    return any((call.worker, call.hold) in lost for call in history.calls)


def is_short_enough(history: History, call: HistoryCall, calls: int) -> bool:
    """Return whether a call took at most `calls` deadlines, not counting the time in which its process was stopped."""
    assert call.end is not None
    stopped = sum(
        max(0, min(pause.end, call.end) - max(pause.start, call.start))
        for pause in history.pauses
        if pause.worker in (call.worker, -1)
    )
    return call.end - call.start - stopped <= calls * history.longest_us


def check_places(history: History, held: dict[tuple[str, int, str], tuple[int, bool]]) -> list[str]:
    """Compare the places held in the end with the places of open holds.

    Args:
        history: The calls.
        held: The places held by limiter, rule and key, and whether these are all: a full rule does not show how many more.

    Only leases that outlast the run are compared, and only if the store has lost nothing. A call with an unknown outcome may
    have taken or freed its places. A cancelled call without a fault near it is carried out or was never sent. A
    hold that has certainly ended owns nothing, however often it was renewed.
    """
    if history.losses:
        return []
    calls: dict[tuple[str, int, str], list[HistoryCall]] = defaultdict(list)
    for call in history.calls:
        for i, rule in enumerate(history.limiters[call.limiter]):
            if rule.kind == "concurrent" and rule.period_us == LONG_LEASE_US:
                calls[call.limiter, i, SHARED if rule.shared else call.key].append(call)
    found = []
    for (limiter, i, key), some in calls.items():
        least, most = _owned(history, some)
        for (name, n, k), (units, is_exact) in held.items():
            is_meant = (name, n) == (limiter, i) and key in (SHARED, k)
            if is_meant and (units > most or (is_exact and units < least)):
                about = f"places: {limiter}/{key}, rule {i}: {units} held in the end"
                found.append(f"{about}, where open holds own {least} to {most}")
    return found


def _owned(history: History, calls: list[HistoryCall]) -> tuple[int, int]:
    """Return the least and the most places that the open holds among some calls own."""
    later: dict[tuple[int, int | None], list[HistoryCall]] = defaultdict(list)
    for call in calls:
        later[call.worker, call.hold].append(call)
    least = most = 0
    for hold in calls:
        if hold.operation != "hold" or hold.outcome in ("refused", "nothing"):
            continue
        if hold.outcome == "cancelled" and not _is_disturbed(history, hold):
            continue
        ends = [
            c
            for c in later[hold.worker, hold.number]
            if c.operation in ("settle", "confirm") and c.outcome not in ("refused", "nothing")
        ]
        if not any(_is_certain(history, call) for call in ends):
            most += hold.cost
        if hold.outcome == "admitted" and not ends:
            least += hold.cost
    return least, most


def _is_certain(history: History, call: HistoryCall) -> bool:
    if call.outcome == "cancelled":  # it is sent all the same
        return call.operation == "settle" and not _is_disturbed(history, call)
    return call.outcome in ("done", "admitted")


def _is_disturbed(history: History, call: HistoryCall) -> bool:
    end = call.end if call.end is not None else call.start
    if call.outcome == "cancelled":  # it may be carried out later
        end += history.released_within_us or 0
    return any(begin <= end and call.start <= stop for begin, stop in history.faults)
