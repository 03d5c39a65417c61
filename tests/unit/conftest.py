"""Fixtures shared by the tests of the core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.testing import FakeClock
from tests.unit.processes import Interrupted, Interruptions, interrupts


@pytest.fixture
def clock() -> FakeClock:
    """A fake clock; it moves only when a test advances it."""
    return FakeClock()


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> type[Limiter] | type[AsyncLimiter]:
    """Both kinds of limiter; `tests.unit.flavours` helps to call either from a coroutine."""
    kind: type[Limiter] | type[AsyncLimiter] = request.param
    return kind


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Switch threads as often as the interpreter can, to make races visible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.fixture
def interruptions() -> Iterator[Interruptions]:
    """A generator function: calls a function until a signal interrupts it, yields, and repeats this."""
    with interrupts() as interrupt_after:

        def interrupted(function: Callable[[], object]) -> Iterator[None]:
            for _ in range(400):
                try:
                    try:
                        interrupt_after(0.000_05)
                        while True:
                            function()
                    finally:
                        interrupt_after(0)
                except Interrupted:
                    yield

        yield interrupted
