"""What all suites share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
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


@pytest.fixture(scope="session", autouse=True)
def _few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make HTTP clients, also of child processes, load one certificate authority: loading all of them takes 40 ms of CPU."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    authority = tmp_path_factory.mktemp("authorities") / "authority.pem"
    authority.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority))
        yield
