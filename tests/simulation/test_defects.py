"""The simulator finds reintroduced defects."""

from __future__ import annotations

import pytest

from tests.simulation.defects import DEFECTS, Defect, run_with

SEEDS = 200
"""Number of seeds to try if the known seed no longer finds a defect, after a change of the code."""


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: Defect) -> None:
    for seed in (defect.seed, *range(SEEDS)):
        if run_with(defect, seed).violations:
            break
    else:
        pytest.fail(f"no violation in {SEEDS} runs; search with `python -m tests.simulation --defects`")
    assert defect.run(seed).violations == []
