"""What the tests of all services share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headgate_server import kept_result
from tests.apps.timeouts import Timeouts


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Undo what starting a service in this process does to the log."""
    loggers = [logging.getLogger(name) for name in ("", "headgate", "uvicorn")]
    levels = [logger.level for logger in loggers]
    handlers = list(logging.getLogger().handlers)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.getLogger().handlers[:] = handlers


@pytest.fixture(autouse=True)
def _fresh_readiness() -> Iterator[None]:
    """Have every `/readyz` ask the stores again; `test_health` checks that services do not."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kept_result, "KEPT_SECONDS", 0.0)
        yield


@pytest.fixture
def timeouts() -> Iterator[Timeouts]:
    """Databases that are given up early only while their server is paused or gone."""
    with pytest.MonkeyPatch.context() as patches:  # a test may undo its own
        yield Timeouts(patches)
