"""What the tests of the core share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.testing import FakeClock
from tests.unit.processes import Interrupted, Interruptions, interrupts


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> type[Limiter] | type[AsyncLimiter]:
    """Both kinds of limiter; `tests.unit.flavours` helps to call either from a coroutine."""
    kind: type[Limiter] | type[AsyncLimiter] = request.param
    return kind


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.fixture
def interruptions() -> Iterator[Interruptions]:
    """A function that calls another until a signal interrupts it; again and again, and says so each time."""
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
