"""Settings and fixtures of all suites."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from tests.searching import EXAMPLES, USUAL

# No deadline: durations on a busy machine prove nothing. No example database: a run must not depend on earlier runs.
# Fixed examples: a failure must appear with the change that causes it. HEADGATE_TEST_EXAMPLES raises the number of examples
# and makes them random.
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
    """Exclude imported modules and collected tests from garbage collection, which would scan them repeatedly."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Limit HTTP clients, also in child processes, to one certificate authority: loading all of them takes 40 ms of CPU."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    authority = tmp_path_factory.mktemp("authorities") / "authority.pem"
    authority.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority))
        yield
