"""The simulator finds defects that are put back, each among a fixed number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.defects import Defect, defects, put_back
from tests.simulation.run import run


@pytest.mark.parametrize("defect", defects(), ids=lambda defect: defect.name)
def test_defect_is_found(defect: Defect) -> None:
    with put_back(defect):
        for seed in range(defect.first, defect.seeds):
            if run(seed, defect.store, defect.faults).violations:
                break
        else:
            pytest.fail(f"nothing was found in {defect.seeds} runs")
    assert run(seed, defect.store, defect.faults).violations == []
