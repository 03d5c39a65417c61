"""What the tests of the core share."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.testing import FakeClock
from tests.unit.processes import Interrupted, Interruptions, untraced


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

    def interrupt(*_: object) -> None:
        raise Interrupted

    def interrupted(function: Callable[[], object]) -> Iterator[None]:
        for _ in range(400):
            try:
                try:
                    # Once more after a second: CPython 3.11 may not notice a signal until the next one comes.
                    signal.setitimer(signal.ITIMER_REAL, 0.000_05, 1)
                    while True:
                        function()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                yield

    # What other tests have left would be collected meanwhile; an exception in its callbacks is reported as one of this test.
    gc.collect()
    # A tracer, such as that of coverage, opens gaps for signals where the interpreter alone has none.
    tracer = sys.gettrace()
    sys.settrace(None)
    before = signal.signal(signal.SIGALRM, interrupt)
    with untraced():
        yield interrupted
    signal.signal(signal.SIGALRM, before)
    sys.settrace(tracer)
