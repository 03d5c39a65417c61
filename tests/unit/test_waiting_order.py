"""The order of waiting calls with priorities, in a queue of this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import AsyncLimiter, ConfigError, Limiter, concurrent, token_bucket
from headgate._concurrency import Event
from headgate._fair_queue import FairQueue
from headgate.algorithms.waiting import HIGHEST_PRIORITY
from headgate.testing import FakeClock
from tests.unit.flavours import done

Flavour = type[Limiter] | type[AsyncLimiter]

PRIORITIES = st.integers(1, HIGHEST_PRIORITY)


class Line:
    """One queue whose waiters are numbered in order of arrival."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.events: list[Event] = []
        self.priorities: list[int] = []

    def join(self, priority: int) -> None:
        event = Event()
        self.events.append(event)
        self.priorities.append(priority)
        self.queue.join("key", event, priority)

    def first(self) -> int:
        """Return the waiter that is first: the only one whose repeated `join` says so."""
        found = [
            number
            for number, event in enumerate(self.events)
            if not event.is_over and self.queue.join("key", event, self.priorities[number])
        ]
        [first] = found
        return first

    def leave(self, number: int) -> None:
        self.events[number].is_over = True
        self.queue.leave("key", self.events[number])

    def serve(self, count: int) -> list[int]:
        """Let the first waiter leave, several times; return the numbers."""
        served = []
        for _ in range(count):
            served.append(self.first())
            self.leave(served[-1])
        return served


def line_of(priorities: Sequence[int]) -> Line:
    line = Line()
    for priority in priorities:
        line.join(priority)
    return line


def test_equal_priorities_are_served_in_order_of_arrival() -> None:
    assert line_of([3] * 8).serve(8) == list(range(8))


def test_priorities_are_served_in_proportion_to_their_numbers() -> None:
    line = line_of([4] * 200 + [1] * 200)
    served = Counter(line.priorities[number] for number in line.serve(100))
    assert served[4] in (79, 80, 81)


def test_the_lowest_priority_is_served_although_higher_ones_keep_coming() -> None:
    line = line_of([1, *[10] * 10])
    for _ in range(12):
        if line.first() == 0:
            return
        line.serve(1)
        line.join(10)
    pytest.fail("not served in 12 turns")


def test_a_higher_priority_does_not_displace_the_first() -> None:
    line = line_of([1, 1])
    line.join(10)
    assert line.serve(3) == [0, 2, 1]


def test_cancelled_waiters_do_not_delay_later_ones_with_their_priority() -> None:
    """If each cancelled waiter advanced its priority's turn, the others would have all the capacity for a while."""
    line = line_of([4] * 4 + [1] * 1000)
    for number in range(4, 1004):
        line.leave(number)
    for priority in [4] * 50 + [1] * 50:
        line.join(priority)
    served = [line.priorities[number] for number in line.serve(20)]
    assert served.count(1) >= 3


STEPS = st.one_of(
    PRIORITIES.map(lambda priority: ("join", priority)), st.sampled_from([("serve", 1), ("leave", 1)])
)


@given(st.lists(STEPS, max_size=40))
def test_the_first_stays_first_and_equals_keep_their_order(steps: list[tuple[str, int]]) -> None:
    line, served = Line(), list[int]()
    for step, number in steps:
        waiting = [place for place, event in enumerate(line.events) if not event.is_over]
        first = line.first() if waiting else None
        if step == "join":
            line.join(number)
            assert first is None or line.first() == first
        elif step == "serve" and waiting:
            served += line.serve(1)
        elif waiting:
            line.leave(waiting[len(waiting) // 2])
    for priority in range(1, HIGHEST_PRIORITY + 1):
        order = [number for number in served if line.priorities[number] == priority]
        assert order == sorted(order)


async def test_waiting_calls_of_a_limiter_share_by_priority(clock: FakeClock) -> None:
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    served: list[int] = []

    async def work(priority: int) -> None:
        await limiter.wait("ada", priority=priority)
        served.append(priority)

    await asyncio.gather(*(work(priority) for priority in [1] * 20 + [4] * 20))
    assert served[1:21].count(4) == 16


async def test_waiting_holds_share_by_priority() -> None:
    limiter = AsyncLimiter(concurrent(1, lease="60s"))
    served: list[int] = []

    async def work(priority: int) -> None:
        async with limiter.hold("gpt", timeout=60, priority=priority):
            served.append(priority)

    taken = await limiter.hold("gpt")
    tasks = [asyncio.create_task(work(priority)) for priority in [1] * 20 + [4] * 20]
    for _ in range(5):  # every task enters the queue in its first steps
        await asyncio.sleep(0)
    await taken.release()
    await asyncio.gather(*tasks)
    assert served[1:21].count(4) == 16


@pytest.mark.parametrize("priority", [0, 11, -1, 1.0, True, "high", None])
async def test_invalid_priority_is_refused_with_the_range(flavour: Flavour, priority: Any) -> None:
    limiter = flavour("5/minute")
    for call in (limiter.wait, limiter.hold):
        with pytest.raises(ConfigError, match="priority= is a whole number from 1 to 10"):
            await done(call("ada", priority=priority))
