"""How hard the conformance suite searches."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples in every run, so that a change that breaks nothing never fails. Asking for a number of examples of
# one's own (HEADGATE_TEST_EXAMPLES) asks for a search, so that takes new ones every time.
SEARCHES = "HEADGATE_TEST_EXAMPLES" in os.environ
settings.register_profile(
    "conformance",
    settings.get_profile("headgate"),
    derandomize=not SEARCHES,
    max_examples=settings.get_profile("headgate").max_examples if SEARCHES else 60,
)


@pytest.fixture(autouse=True, scope="package")
def _search() -> Iterator[None]:
    settings.load_profile("conformance")
    yield
    settings.load_profile("headgate")
