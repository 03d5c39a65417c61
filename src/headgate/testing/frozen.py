"""Limits of an application while time stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate.http.testing import FreshLimits, fresh_limits
from headgate.testing.clock import FakeClock


@contextmanager
def frozen_limits() -> Iterator[FreshLimits]:
    """Let every limit of an application count from zero, in memory, by a clock that only `.advance(seconds)` moves."""
    with fresh_limits(clock=FakeClock()) as limits:
        yield limits
