"""What all suites share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline: how long an example takes on a busy machine proves nothing. No example database: a run must not depend on
# the runs before it. HEADGATE_TEST_EXAMPLES=10000 searches deeper than the budget of `make test` allows.
settings.register_profile(
    "headgate",
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("HEADGATE_TEST_EXAMPLES", "100")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("headgate")
