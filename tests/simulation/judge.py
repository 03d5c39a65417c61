"""What the history checker does not see: calls that fail for no reason, and places that no hold owns."""

from __future__ import annotations

from collections import defaultdict

from tests.faults.history import SHARED, History, HistoryCall
from tests.simulation.programs import LONG_LEASE_US


def check_errors(history: History, errors: list[tuple[int, int, str]], settling_us: int) -> list[str]:
    """Return the calls that failed although no fault came near them."""
    return [
        f"failed without a fault: {why}"
        for start, end, why in errors
        if not any(begin <= end and start <= stop + settling_us for begin, stop in history.faults)
    ]


def check_places(history: History, held: dict[tuple[str, int, str], tuple[int, bool]]) -> list[str]:
    """Compare the places that are held in the end with those that open holds own.

    Args:
        history: The calls.
        held: The places held by limiter, rule and key, and whether these are all: a full rule does not show how many more.

    Only leases that outlast the run are compared, and only if the store has lost nothing. A call with an unknown outcome may
    have taken or freed its places. But one that was cancelled without a fault near it is carried out or was never sent, and
    a hold that has certainly ended owns nothing, however often it was renewed.
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
        renewals = [c for c in later[hold.worker, hold.number] if c.operation == "renew"]
        is_vague = any(c.outcome in ("unknown", "cancelled") and _is_disturbed(history, c) for c in renewals)
        has_ended = any(_is_certain(history, call) for call in ends)
        if not has_ended or is_vague:
            most += hold.cost
        if hold.outcome == "admitted" and not ends and not is_vague:
            least += hold.cost
    return least, most


def _is_certain(history: History, call: HistoryCall) -> bool:
    if call.outcome == "cancelled":  # it is sent all the same
        return call.operation == "settle" and not _is_disturbed(history, call)
    return call.outcome in ("done", "admitted")


def _is_disturbed(history: History, call: HistoryCall) -> bool:
    end = call.end if call.end is not None else call.start
    return any(begin <= end and call.start <= stop for begin, stop in history.faults)
