"""A short run of the faults on every store; `make faults` has more of it."""

from __future__ import annotations

import pytest

from tests.faults.places import PLACES
from tests.faults.rounds import Round

CALLS = 1000
LONGEST = 6.0
"""Seconds after which workers end even if they have not made all calls."""


@pytest.mark.parametrize("store", PLACES)
def test_every_call_can_be_explained(store: str) -> None:
    with PLACES[store](1) as place:
        outcome = Round(place, seed=17, calls=CALLS, seconds=LONGEST, workers=2).run()
    assert outcome.failures == []
    assert outcome.violations == []
    assert any(call.outcome in ("admitted", "refused") for call in outcome.history.calls)
