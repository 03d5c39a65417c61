"""How hard the conformance suite searches."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples in every run, so that a change that breaks nothing never fails. Asking for more than usual
# (HEADGATE_TEST_EXAMPLES) asks for a search, so that takes new ones every time.
USUAL = 60
EXAMPLES = int(os.environ.get("HEADGATE_TEST_EXAMPLES", USUAL))
settings.register_profile(
    "conformance",
    settings.get_profile("headgate"),
    derandomize=EXAMPLES <= USUAL,
    max_examples=EXAMPLES,
)


@pytest.fixture(autouse=True, scope="package")
def _search() -> Iterator[None]:
    settings.load_profile("conformance")
    yield
    settings.load_profile("headgate")
