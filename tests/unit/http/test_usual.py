"""The usual limit in one piece answers like the general way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import AsyncLimiter, MemoryStore, fixed_window, sliding_window, token_bucket
from headgate.hooks import Hook
from headgate.http import Fields, by_header
from headgate.http.exchange import Exchange
from headgate.http.headers import all_fields
from headgate.http.limit import RequestLimit
from headgate.http.usual import asking_at_once
from headgate.quota import MAX_UNITS
from headgate.testing import FakeClock
from tests.unit.clocks import steady

KINDS = (fixed_window, sliding_window, token_bucket)
SCOPE: dict[str, Any] = {"type": "http", "client": ("192.0.2.1", 1), "headers": []}


async def nowhere(message: Any) -> None:
    raise AssertionError("nothing is sent")


@given(
    kind=st.sampled_from(KINDS),
    limit=st.integers(1, 5),
    steps=st.lists(st.integers(0, 70_000_000), max_size=12),
    reset=st.sampled_from(["epoch", "seconds"]),
)
async def test_both_ways_give_the_same_decisions_and_fields(
    kind: Any, limit: int, steps: list[int], reset: Any
) -> None:
    clock = FakeClock()
    fields = Fields(x_ratelimit=reset)
    quick, general = (
        RequestLimit(AsyncLimiter(kind(f"{limit}/minute"), clock=each), fields=fields)
        for each in (steady(clock), clock)
    )
    quick.clock_ns = general.clock_ns
    at_once = asking_at_once(quick, quick.limiter, quick.writer)
    assert at_once is not None
    for step in steps:
        clock.advance_us(step)
        exchange = Exchange(nowhere)
        expected = await exchange.ask(general, SCOPE)
        decision, written, now = at_once(SCOPE)
        assert (decision, now) == (expected, clock.now_us())
        assert written == all_fields(exchange.asked)


def test_it_counts_in_the_limiters_own_store() -> None:
    limiter = AsyncLimiter("2/minute", name="x", store=MemoryStore())
    limit = RequestLimit(limiter, key=by_header("x-key"))
    assert limit.at_once is not None
    assert limit.at_once({**SCOPE, "headers": [(b"x-key", b"a")]})[0].remaining == 1
    assert limit.at_once(SCOPE)[0].remaining == 1
    assert limiter.store.bind("x", limiter.rules).peek("a", 1, None, None).remaining == 0  # type: ignore[attr-defined]
    assert limiter.store.bind("x", limiter.rules).peek(b"192.0.2.1", 1, None, None).remaining == 0  # type: ignore[attr-defined]


class Special(MemoryStore):
    """A store that may do anything."""


async def nobody(scope: Any) -> None: ...


@pytest.mark.parametrize(
    ("limiter", "arguments"),
    [
        (AsyncLimiter("5/minute", hooks=[Hook()]), {}),
        (AsyncLimiter("5/minute", "9/hour"), {}),
        (AsyncLimiter(), {}),
        (AsyncLimiter("5/minute", name="x", store=Special()), {}),
        (AsyncLimiter("5/minute", name="x", store=MemoryStore(), clock=FakeClock()), {}),
        (AsyncLimiter(f"{MAX_UNITS}/minute"), {}),
        (AsyncLimiter("5/minute"), {"cost": lambda scope: 1}),
        (AsyncLimiter("5/minute"), {"tier": "pro"}),
        (AsyncLimiter("5/minute"), {"count": {200}}),
        (AsyncLimiter("5/minute"), {"key": nobody}),
        (AsyncLimiter("5/minute"), {"fields": Fields(ratelimit=7)}),
        (AsyncLimiter("5/minute"), {"fields": Fields(x_ratelimit=None)}),
    ],
)
def test_anything_out_of_the_ordinary_goes_the_general_way(limiter: AsyncLimiter, arguments: Any) -> None:
    assert RequestLimit(limiter, **arguments).at_once is None
