"""Tests of reducing histories."""

from __future__ import annotations

from tests.faults.checker import check
from tests.faults.history import History
from tests.faults.shrinking import shrink
from tests.faults.test_checker import Script


def busy() -> Script:
    """Return a history whose calls are irrelevant for violations after 80,000."""
    script = Script()
    for i in range(40):
        script.call("hit", 2000 * i, 2000 * i + 5, "admitted", 2)
        hold = script.call("hold", 2000 * i + 10, 2000 * i + 15, "admitted", 1)
        script.call("settle", 2000 * i + 20, 2000 * i + 25, "done", cost=0, hold=hold)
    return script


def shrunk(history: History) -> History:
    first, *_ = check(history)
    return shrink(history, first)


def test_excess_admissions_are_reduced_to_one_above_the_limit() -> None:
    script = busy()
    for i in range(4):
        script.call("hit", 80_000 + 10 * i, 80_005 + 10 * i, "admitted", max(0, 2 - i), worker=1)
    small = shrunk(script.history())
    assert [call.start for call in small.calls] == [80_000, 80_010, 80_020, 80_030]
    assert {found.kind for found in check(small)} == {"too many"}


def test_refusal_with_room_keeps_all_calls_that_may_have_been_counted() -> None:
    script = busy()
    hold = script.call("hold", 80_000, 80_005, "admitted", 0, cost=3)
    script.call("settle", 80_010, 80_015, "done", cost=0, hold=hold)
    script.call("hit", 80_100, 80_105, "admitted", 2)
    script.call("hit", 80_200, 80_205, "refused", 2, 895)
    small = shrunk(script.history())
    assert [call.operation for call in small.calls if call.start >= 80_000] == [
        "hold",
        "settle",
        "hit",
        "hit",
    ]
    assert len(small.calls) <= 7
    assert [found.kind for found in check(small)] == ["refused with room"]
