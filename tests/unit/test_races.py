"""Races in the embedded stores; `headgate.testing.StoreContract` tests the races of every store.

The clock does not move in these tests, so nothing expires and every number is exact.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from headgate import (
    AsyncLimiter,
    Limiter,
    MemoryStore,
    Rule,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.clock import SteadyClock
from headgate.testing import FakeClock
from tests.unit.processes import forking

pytestmark = forking

LIMIT = 100
THREADS = 8
TASKS = 256
RULES = {
    make.__name__: make(f"{LIMIT}/hour") for make in (fixed_window, sliding_window, sliding_log, token_bucket)
}

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def in_threads(work: Callable[[int], int]) -> int:
    """Run the work in several threads at the same time, and return the sum of the results."""
    barrier, results = threading.Barrier(THREADS), [0] * THREADS

    def run(number: int) -> None:
        barrier.wait()
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(results)


def assert_left(rule: Rule, left: int | None, expected: int) -> None:
    """Windows refund exactly. A token bucket may refund less (some units may have drained), but never more."""
    assert left is not None
    assert left <= expected
    assert left == expected or rule.kind == "token_bucket"


# --- Threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), (sliding_window("1000/day"),)], ids=["one rule", "several rules"])
@every_rule
def test_no_other_call_runs_between_read_and_write(rule: Rule, others: tuple[Rule, ...]) -> None:
    """In the middle of one hit, another thread tries to hit as well, and must wait."""
    threads: list[threading.Thread] = []

    class InterleavingClock(SteadyClock):
        """A clock that starts another thread in the middle of a call.

        With an explicit time, a new key reads the clock to remove expired keys, before its state is written.
        """

        def now_us(self) -> int:
            if not threads:
                threads.append(threading.Thread(target=limiter.hit, args=("ada",), kwargs={"now": 1.0}))
                threads[0].start()
                threads[0].join(0.02)  # no effect if the lock is held
            return super().now_us()

    limiter = Limiter(rule, *others, clock=InterleavingClock())
    assert limiter.hit("ada", now=1.0)
    for thread in threads:
        thread.join()
    assert threads
    assert limiter.check("ada", 0, now=1.0).remaining == LIMIT - 2


@pytest.mark.usefixtures("hasty_threads")
def test_threads_with_new_keys_share_exactly_the_overflow_quota(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=1, clock=clock)
    limiter = Limiter(f"{LIMIT}/hour", name="x", store=store)
    limiter.hit("first")
    admitted = in_threads(lambda thread: sum(bool(limiter.hit(f"{thread} {n}")) for n in range(30)))
    assert admitted == LIMIT


# --- Tasks -----------------------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.usefixtures("hasty_threads")
def test_tasks_of_several_event_loops_get_exactly_the_limit(rule: Rule, clock: FakeClock) -> None:
    limiter = AsyncLimiter(rule, clock=clock)

    async def work() -> int:
        decisions = await asyncio.gather(*(limiter.hit("ada") for _ in range(TASKS // THREADS)))
        return sum(bool(decision) for decision in decisions)

    assert in_threads(lambda _: asyncio.run(work())) == LIMIT


@every_rule
async def test_tasks_cancelled_during_a_hold_release_it(rule: Rule, clock: FakeClock) -> None:
    limiter = AsyncLimiter(rule, clock=clock)
    never = asyncio.Event()

    async def work() -> None:
        async with limiter.hold("ada"):
            await never.wait()

    tasks = [asyncio.create_task(work()) for _ in range(LIMIT)]
    await asyncio.sleep(0)
    assert not await limiter.hit("ada")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert_left(rule, (await limiter.check("ada", 0)).remaining, LIMIT)


# --- Processes -------------------------------------------------------------------------------------------------------
