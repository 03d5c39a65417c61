"""The checker on histories written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.checker import check
from tests.faults.history import (
    History,
    HistoryCall,
    Loss,
    Pause,
    RuleSpec,
    VerdictSeen,
    load,
    save,
)

LOG = RuleSpec("sliding_log", 1000, (3,))
BUCKET = RuleSpec("token_bucket", 1000, (10,), (5,))
PLACES = RuleSpec("concurrent", 1000, (2,))


class Script:
    """Builds a history call by call."""

    def __init__(self, rule: RuleSpec = LOG) -> None:
        self.rule = rule
        self.calls: list[HistoryCall] = []

    def call(
        self,
        operation: str,
        start: int,
        end: int | None,
        outcome: str,
        remaining: int | None = None,
        retry_us: int | None = None,
        *,
        cost: int = 1,
        worker: int = 0,
        hold: int | None = None,
        limit: int | None = None,
        times: int = 1,
    ) -> int:
        """Add a call, and return its number."""
        own = limit or (self.rule.bursts or self.rule.limits)[0]
        seen = VerdictSeen(outcome == "admitted", own, remaining or 0, retry_us)
        verdicts = () if remaining is None else (seen,)
        number = 8 * len(self.calls)  # so that every waiting time is checked
        self.calls.append(
            HistoryCall(worker, number, operation, "x", "k", cost, start, end, outcome, verdicts, hold, times)
        )
        return number

    def kinds(self, **about: Any) -> list[str]:
        """Return the kinds of violations in the history."""
        return [found.kind for found in check(self.history(**about))]

    def history(self, **about: Any) -> History:
        return History({"x": (self.rule,)}, self.calls, **about)


def filled(script: Script, workers: int = 1) -> Script:
    """Use up a limit of three."""
    for i in range(3):
        script.call("hit", 10 * i, 10 * i + 5, "admitted", 2 - i, worker=i % workers)
    return script


def test_correct_history_is_not_reported() -> None:
    script = filled(Script(), workers=3)
    script.call("hit", 40, 45, "refused", 0, 960)
    script.call("check", 50, 55, "refused", 0, 950)
    script.call("hit", 1006, 1010, "admitted", 0)
    assert script.kinds() == []


def test_one_too_many_is_reported() -> None:
    script = filled(Script())
    script.call("hit", 40, 45, "admitted", 0)
    assert "too many" in script.kinds()


def test_one_too_many_among_calls_at_the_same_time_is_reported() -> None:
    """Each call may have come before the others, but all count at the same time."""
    script = Script()
    for worker in range(4):
        script.call("hit", 10, 20, "admitted", 0, worker=worker)
    assert set(script.kinds()) == {"too many"}


def test_calls_at_the_same_time_may_come_in_any_order() -> None:
    script = Script()
    for worker, remaining in enumerate((0, 2, 1)):
        script.call("hit", 10, 20, "admitted", remaining, worker=worker)
    script.call("hit", 15, 25, "refused", 0, 991, worker=3)
    assert script.kinds() == []


def test_a_call_that_may_have_come_after_the_end_of_a_period_is_not_reported() -> None:
    script = filled(Script())
    script.call("hit", 995, 1003, "admitted", 0)  # the first hit expires between 1000 and 1005
    assert script.kinds() == []


def test_a_forgotten_unit_is_reported_by_what_is_left() -> None:
    script = Script()
    script.call("hit", 0, 5, "admitted", 2)
    script.call("hit", 10, 15, "admitted", 2)
    assert script.kinds() == ["forgotten units"]


def test_a_refusal_that_charged_is_reported() -> None:
    script = Script()
    script.call("hit", 0, 5, "admitted", 0, cost=3)
    script.call("hit", 10, 15, "refused", 0, 990, cost=2)
    script.call("hit", 1006, 1010, "admitted", 0)
    assert script.kinds() == ["unexplained units"]


def test_a_refusal_with_room_is_reported() -> None:
    script = Script()
    script.call("hit", 0, 5, "admitted", 2)
    script.call("hit", 10, 15, "refused", 2, 990)
    assert script.kinds() == ["refused with room"]


@pytest.mark.parametrize(
    ("wait", "kinds"),
    [
        (960, []),
        (955, []),
        (950, ["waiting too short"]),
        (966, ["waiting too long"]),
        (None, ["never admitted"]),
    ],
)
def test_waiting_times(wait: int | None, kinds: list[str]) -> None:
    """The unit expires between 1000 and 1005, and the refusal was between 40 and 45."""
    script = filled(Script())
    script.call("hit", 40, 45, "refused", 0, wait)
    assert script.kinds() == kinds


@pytest.mark.parametrize("end", [None, 8])
def test_a_call_of_unknown_outcome_may_have_charged_or_not(end: int | None) -> None:
    script = Script()
    script.call("hit", 0, end, "unknown", cost=3, worker=1)
    script.call("hit", 20, 25, "admitted", 2)
    script.call("hit", 30, 35, "refused", 0, 995)  # the call of unknown outcome was carried out late
    assert script.kinds(killed={1}) == []


def test_a_call_without_an_end_hangs_unless_its_worker_was_killed() -> None:
    script = Script()
    script.call("hit", 0, None, "unknown")
    assert script.kinds() == ["hung"]


def test_a_call_that_outlives_its_deadline_is_reported_unless_its_worker_was_stopped() -> None:
    script = Script()
    script.call("hit", 0, 900, "admitted", 2)
    assert script.kinds(longest_us=500) == ["outlived its deadline"]
    assert script.kinds(longest_us=500, pauses=[Pause(0, 100, 600)]) == []


def test_units_returned_by_a_hold_are_free_and_kept_units_are_not() -> None:
    script = Script()
    hold = script.call("hold", 0, 5, "admitted", 0, cost=3)
    script.call("check", 10, 15, "refused", 0, 990)
    script.call("settle", 20, 25, "done", cost=1, hold=hold)
    script.call("hit", 30, 35, "admitted", 1)
    script.call("hit", 40, 45, "admitted", 0)
    script.call("hit", 50, 55, "refused", 0, 950)
    assert script.kinds() == []


def test_a_hold_that_was_released_and_still_counts_is_reported() -> None:
    script = Script()
    hold = script.call("hold", 0, 5, "admitted", 0, cost=3)
    script.call("settle", 20, 25, "done", cost=0, hold=hold)
    script.call("check", 30, 35, "refused", 0, 970)
    assert script.kinds() == ["refused with room"]


def test_a_hold_with_an_unknown_release_may_count_or_not() -> None:
    for remaining in (2, 1):
        script = Script()
        hold = script.call("hold", 0, 5, "admitted", 2)
        script.call("settle", 20, 25, "unknown", cost=0, hold=hold)
        script.call("hit", 30, 35, "admitted", remaining)
        assert script.kinds() == []


def test_settling_above_what_was_held_counts_more() -> None:
    script = Script()
    hold = script.call("hold", 0, 5, "admitted", 2)
    script.call("settle", 20, 25, "done", cost=4, hold=hold)
    script.call("hit", 30, 35, "refused", 0, 995)
    assert script.kinds() == []
    script.call("hit", 40, 45, "admitted", 0)
    assert "too many" in script.kinds()


def test_a_confirmed_hold_counts_from_its_confirmation() -> None:
    script = Script()
    hold = script.call("hold", 0, 5, "admitted", 0, cost=3)
    script.call("confirm", 500, 505, "admitted", 0, cost=3, hold=hold)
    script.call("hit", 1100, 1105, "refused", 0, 400)
    assert script.kinds() == []
    script.call("hit", 1200, 1205, "admitted", 2)
    assert "too many" in script.kinds()


def test_a_refused_confirmation_leaves_the_hold_open() -> None:
    script = Script()
    hold = script.call("hold", 0, 5, "admitted", 2)
    script.call("hit", 10, 15, "admitted", 0, cost=2)
    script.call("confirm", 20, 25, "refused", 0, 990, cost=2, hold=hold)
    script.call("settle", 30, 35, "done", cost=0, hold=hold)
    script.call("hit", 40, 45, "admitted", 0)
    assert script.kinds() == []


def test_a_cancelled_hold_must_be_released_in_the_absence_of_faults() -> None:
    script = Script()
    script.call("hold", 0, 5, "cancelled", cost=3)
    script.call("hit", 50, 55, "refused", 0, 950)  # the release may take until 105
    script.call("hit", 200, 205, "refused", 0, 800)
    assert script.kinds(released_within_us=100) == ["refused with room"]
    assert script.kinds(released_within_us=100, faults=[(90, 120)]) == []
    assert script.kinds() == []


def test_places_are_free_when_their_hold_ends_or_their_lease() -> None:
    script = Script(PLACES)
    first = script.call("hold", 0, 5, "admitted", 1)
    script.call("hold", 10, 15, "admitted", 0, worker=1)
    script.call("hold", 20, 25, "refused", 0, 980, worker=2)
    script.call("settle", 30, 35, "done", cost=1, hold=first)
    script.call("hold", 40, 45, "admitted", 0, worker=2)
    script.call("hold", 1020, 1025, "admitted", 0, worker=3)
    assert script.kinds() == []
    script.call("hold", 1030, 1035, "admitted", 0, worker=3)
    assert "too many" in script.kinds()


def test_a_renewed_lease_lasts() -> None:
    script = Script(PLACES)
    hold = script.call("hold", 0, 5, "admitted", 0, cost=2)
    script.call("renew", 900, 905, "admitted", 0, cost=2, hold=hold)
    script.call("hold", 1100, 1105, "refused", 0, 800, worker=1)
    assert script.kinds() == []
    script.call("hold", 1200, 1205, "admitted", 1, worker=1)
    assert "too many" in script.kinds()


@pytest.mark.parametrize("outcome", ["admitted", "unknown", "cancelled"])
def test_a_place_is_free_when_its_hold_ends_after_any_outcome_of_a_renewal(outcome: str) -> None:
    script = Script(PLACES)
    hold = script.call("hold", 0, 5, "admitted", 0, cost=2)
    script.call("renew", 100, 105, outcome, 0, cost=2, hold=hold)
    script.call("settle", 110, 115, "done", cost=0, hold=hold)
    script.call("check", 120, 125, "admitted", 1)
    assert script.kinds() == []
    script.call("check", 130, 135, "refused", 0, 970)
    assert script.kinds() == ["refused with room"]


def test_a_lost_renewal_may_have_been_carried_out() -> None:
    script = Script(PLACES)
    hold = script.call("hold", 0, 5, "admitted", 0, cost=2)
    script.call("renew", 900, 905, "unknown", 0, cost=2, hold=hold)
    script.call("hold", 1100, 1105, "refused", 0, 800, worker=1)
    assert script.kinds() == []
    script.call("hold", 1200, 1205, "admitted", 1, worker=1)
    assert script.kinds() == []


def test_a_lease_is_renewed_while_it_lasts_and_not_later() -> None:
    script = Script(PLACES)
    hold = script.call("hold", 0, 5, "admitted", 0, cost=2)
    script.call("renew", 900, 905, "refused", 0, cost=2, hold=hold)
    assert script.kinds() == ["lost place"]
    script = Script(PLACES)
    hold = script.call("hold", 0, 5, "admitted", 0, cost=2)
    script.call("renew", 1005, 1010, "refused", 2, cost=2, hold=hold)
    assert script.kinds() == []
    script.call("renew", 1020, 1025, "admitted", 0, cost=2, hold=hold)
    assert "renewed too late" in script.kinds()


def test_a_renewal_may_be_refused_by_another_rule_whose_lease_has_ended() -> None:
    rules = (PLACES, RuleSpec("concurrent", 500, (2,)))
    taken = (VerdictSeen(True, 2, 1, None),) * 2
    refused = (taken[0], VerdictSeen(False, 2, 2, None))
    calls = [
        HistoryCall(0, 0, "hold", "x", "k", 1, 0, 5, "admitted", taken),
        HistoryCall(0, 1, "renew", "x", "k", 1, 600, 605, "refused", refused, 0),
    ]
    assert list(check(History({"x": rules}, calls))) == []


def test_a_declared_loss_excuses_forgotten_units_only_from_then_on() -> None:
    script = filled(Script())
    script.call("hit", 60, 65, "admitted", 2)
    assert script.kinds(losses=[Loss(0, 40, 50)]) == []
    assert "too many" in script.kinds(losses=[Loss(40, 40, 50)])
    assert "too many" in script.kinds(losses=[Loss(0, 70, 80)])


def test_limits_of_several_tiers() -> None:
    script = Script(RuleSpec("sliding_log", 1000, (3, 5)))
    script.call("hit", 0, 5, "admitted", 0, cost=5, limit=5)
    script.call("hit", 10, 15, "refused", 0, 990, limit=3)
    assert script.kinds() == []
    script.call("hit", 20, 25, "refused", 0, 980, limit=7)
    assert script.kinds() == ["unknown limit"]


def test_a_bucket_admits_its_burst_and_what_flows_out() -> None:
    script = Script(BUCKET)
    script.call("hit", 0, 5, "admitted", 0, cost=5)
    script.call("hit", 10, 15, "refused", 0, 90)
    script.call("hit", 200, 205, "admitted", 0, cost=2)
    assert script.kinds() == []
    script.call("hit", 210, 215, "admitted", 0, cost=2)
    assert set(script.kinds()) == {"too many"}


def test_a_bucket_that_refuses_with_room_is_reported() -> None:
    script = Script(BUCKET)
    script.call("hit", 0, 5, "admitted", 0, cost=5)
    script.call("hit", 120, 125, "refused", 0, 90)
    assert script.kinds() == ["refused with room"]


def test_a_bucket_that_keeps_its_callers_waiting_is_reported() -> None:
    script = Script(BUCKET)
    script.call("hit", 0, 5, "admitted", 0, cost=5)
    script.call("hit", 10, 15, "refused", 0, 200)
    assert script.kinds() == ["waiting too long"]


def test_a_history_is_the_same_after_saving(tmp_path: Path) -> None:
    script = filled(Script(), workers=2)
    script.call("hit", 40, None, "unknown", worker=1)
    history = script.history(
        killed={1}, losses=[Loss(1, 2, 3)], pauses=[Pause(0, 1, 2)], faults=[(5, 6)], notes={"seed": 7}
    )
    save(history, tmp_path / "history.jsonl")
    assert load(tmp_path / "history.jsonl") == history


def test_admitted_hits_of_a_burst_count() -> None:
    script = Script()
    script.call("hits", 0, 10, "admitted", 1, cost=2, times=2)
    script.call("hit", 20, 30, "admitted", 0)
    assert script.kinds() == []
    script.call("hit", 40, 50, "admitted", 0)
    assert set(script.kinds()) == {"too many"}


def test_refused_hits_of_a_burst_do_not_count() -> None:
    script = Script()
    script.call("hits", 0, 10, "refused", 3, cost=2, times=2)
    script.call("hit", 20, 30, "refused", 3, 1)
    assert script.kinds() == ["refused with room"]


@pytest.mark.parametrize("rule", [LOG, BUCKET])
def test_reset_that_does_not_reset_is_reported(rule: RuleSpec) -> None:
    limit = (rule.bursts or rule.limits)[0]
    for after_reset, expected in ((limit - 1, []), (0, ["unexplained units"])):
        script = Script(rule)
        script.call("hit", 0, 5, "admitted", 0, cost=limit)
        script.call("reset", 10, 15, "done")
        script.call("hit", 20, 25, "admitted", after_reset)
        assert script.kinds() == expected


def test_reset_without_an_answer_may_or_may_not_have_been_done() -> None:
    for left in (0, 2):
        script = Script()
        script.call("hit", 0, 5, "admitted", 1, cost=2)
        script.call("reset", 10, 15, "unknown")
        script.call("hit", 20, 25, "admitted", left)
        assert script.kinds() == []


def test_units_lost_without_a_reset_are_reported() -> None:
    script = Script()
    script.call("hit", 0, 5, "admitted", 1, cost=2)
    script.call("reset", 30, 35, "done")
    script.call("hit", 20, 25, "admitted", 2)
    assert script.kinds() == ["forgotten units"]


def test_renewal_after_a_reset_may_be_refused() -> None:
    script = Script(PLACES)
    hold = script.call("hold", 0, 5, "admitted", 1)
    script.call("reset", 10, 15, "done")
    script.call("renew", 20, 25, "refused", 2, hold=hold)
    assert script.kinds() == []


def test_cancelled_settlement_must_be_carried_out() -> None:
    for left, expected in ((1, []), (0, ["unexplained units"])):
        script = Script(PLACES)
        hold = script.call("hold", 0, 5, "admitted", 1)
        script.call("settle", 10, 15, "cancelled", cost=0, hold=hold)
        script.call("hold", 200, 205, "admitted", left)
        assert script.kinds(released_within_us=100) == expected
