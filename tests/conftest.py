"""What all suites share."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

from tests.searching import EXAMPLES, USUAL

# No deadline: how long an example takes on a busy machine proves nothing. No example database: a run must not depend on
# the runs before it. The same examples each time: what a change breaks shows with that change and not with a later one.
# Who asks for more of them (HEADGATE_TEST_EXAMPLES) searches, and gets new ones.
settings.register_profile(
    "headgate",
    deadline=None,
    database=None,
    derandomize=EXAMPLES <= USUAL,
    max_examples=EXAMPLES,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("headgate")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collection: else it is looked through again and again."""
    gc.collect()
    gc.freeze()
