"""Hypothesis settings of the conformance suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# By default every run uses the same examples, so that unrelated changes never fail. With HEADGATE_TEST_EXAMPLES
# above the default, every run searches new examples.
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
