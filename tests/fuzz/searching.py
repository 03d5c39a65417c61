"""Search time and time limit of the fuzz targets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
"""How long each target is searched; by default only a few examples are tried."""

EXAMPLES = 1000 if MINUTES else 25
HANGS_AFTER = 120.0
"""Seconds after which an example counts as a hang; a normal example takes a few milliseconds."""


def search(strategy: SearchStrategy[T], try_one: Callable[[T], Any]) -> None:
    """Try examples until the time is over, and print how many. An example must end soon, without any exception."""
    tried = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=not MINUTES,  # a search uses new examples, a test always the same
    )
    @given(strategy)
    def try_many(example: T) -> None:
        nonlocal tried
        tried += 1
        signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER)
        try:
            try_one(example)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, _raise_timeout)
    due = time.monotonic() + 60 * MINUTES
    try:
        try_many()
        while time.monotonic() < due:
            try_many()
    finally:
        signal.signal(signal.SIGALRM, before)
        print(f"{tried:,} examples")


def _raise_timeout(*_: object) -> None:
    raise TimeoutError(f"an example takes longer than {HANGS_AFTER:g} seconds")
