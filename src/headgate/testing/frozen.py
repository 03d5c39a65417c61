"""Limits of an application on a stopped clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate.http.testing import FreshLimits, fresh_limits
from headgate.testing.clock import FakeClock


@contextmanager
def frozen_limits() -> Iterator[FreshLimits]:
    """Make every limit of an application count from zero, in memory, on a clock moved only by `.advance(seconds)`."""
    with fresh_limits(clock=FakeClock()) as limits:
        yield limits
