"""Waiting for one's turn: first come, first served, giving places back, giving up as soon as it is in vain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    Limiter,
    MemoryStore,
    RateLimited,
    Rule,
    SQLiteStore,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate._concurrency import AsyncEvent
from headgate.clock import SteadyClock, WallClock
from headgate.testing import FakeClock
from tests.unit.flavours import done
from tests.unit.processes import forking, in_child

pytestmark = forking

Flavour = type[Limiter] | type[AsyncLimiter]
PATIENCE = 10  # seconds after which a test that hangs is called a failure


class Gatekeeper(FakeClock):
    """A clock on which sleepers wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep_now = 0
        self.let_go = threading.Event()
        self.let_go_async = asyncio.Event()

    def sleep(self, seconds: float) -> None:
        self.asleep_now += 1
        assert self.let_go.wait(PATIENCE)
        super().sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        self.asleep_now += 1
        await self.let_go_async.wait()
        await super().asleep(seconds)


async def settled(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # the tasks that bring it about know of no event
            await asyncio.sleep(0)


def queued(limiter: Limiter | AsyncLimiter, key: str = "ada") -> int:
    """Return how many wait for a key, the one whose turn it is included."""
    return len(limiter._turns._queues.get((key,), ()))


def has_queue_of(limiter: Limiter, length: int) -> bool:
    return queued(limiter) == length


# --- Waiting ---------------------------------------------------------------------------------------------------------


async def test_waiting_ends_with_the_units_taken(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_log("2/minute"), clock=clock)
    start = clock.now_us()
    decisions = [await done(limiter.wait("ada")) for _ in range(4)]
    assert [decision.remaining for decision in decisions] == [1, 0, 1, 0]
    assert clock.now_us() - start == 60_000_000
    assert not await done(limiter.hit("ada"))


async def test_waiting_is_for_the_units_asked_for(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(token_bucket("60/minute"), clock=clock)
    await done(limiter.hit("ada", 60))
    start = clock.now_us()
    assert await done(limiter.wait("ada", 7))
    assert clock.now_us() - start == 7_000_000


async def test_waiting_goes_by_the_tier(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_log("1/minute", tiers={"pro": "2/minute"}), clock=clock)
    start = clock.now_us()
    await done(limiter.wait("ada"))
    await done(limiter.wait("ada", tier="pro"))
    assert clock.now_us() == start


@pytest.mark.parametrize(
    "make", [fixed_window, sliding_window, sliding_log, token_bucket], ids=lambda m: m.__name__
)
async def test_a_hundred_a_second_pass_about_a_hundred_a_second(
    flavour: Flavour, make: Callable[..., Rule], clock: FakeClock
) -> None:
    limiter = flavour(make("100/s"), clock=clock)
    start = clock.now
    for _ in range(1_000):
        await done(limiter.wait("ada"))
    # The first 100 at once; a strict window lets a unit count for one bucket longer than its second.
    assert 900 / 102 <= clock.now - start <= 9.2


async def test_a_steady_hundred_a_second_comes_every_ten_milliseconds(
    flavour: Flavour, clock: FakeClock
) -> None:
    limiter = flavour(token_bucket("100/s", burst=1), clock=clock)
    times = []
    for _ in range(50):
        await done(limiter.wait("ada"))
        times.append(clock.now_us())
    assert {later - earlier for earlier, later in pairwise(times)} == {10_000}


# --- First come, first served ----------------------------------------------------------------------------------------


async def test_tasks_are_served_in_the_order_in_which_they_came(clock: FakeClock) -> None:
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    served: list[int] = []

    async def work(number: int) -> None:
        await limiter.wait("ada")
        served.append(number)

    await asyncio.gather(*(work(number) for number in range(20)))
    assert served == list(range(20))
    assert queued(limiter) == 0


async def test_a_small_cost_does_not_overtake_a_large_one() -> None:
    clock = Gatekeeper()
    limiter = AsyncLimiter(sliding_log("5/minute"), clock=clock)
    await limiter.hit("ada", 3)
    large = asyncio.create_task(limiter.wait("ada", 5))
    await settled(lambda: clock.asleep_now == 1)
    small = asyncio.create_task(limiter.wait("ada", 1))
    await settled(lambda: queued(limiter) == 2)
    assert not small.done()
    clock.let_go_async.set()
    assert (await large).remaining == 0
    assert (await small).remaining == 4


async def test_another_key_does_not_wait_for_this_one() -> None:
    clock = Gatekeeper()
    limiter = AsyncLimiter("1/minute", clock=clock)
    await limiter.hit("ada")
    waiting = asyncio.create_task(limiter.wait("ada"))
    await settled(lambda: clock.asleep_now == 1)
    assert await limiter.wait("bob")
    clock.let_go_async.set()
    assert await waiting


def test_threads_are_served_in_the_order_in_which_they_came() -> None:
    clock = Gatekeeper()
    limiter = Limiter(token_bucket("1/second", burst=1), clock=clock)
    limiter.hit("ada")
    served: list[int] = []

    def work(number: int) -> None:
        limiter.wait("ada")
        served.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads):
        thread.start()
        until(partial(has_queue_of, limiter, number + 1))
    clock.let_go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert served == list(range(8))
    assert queued(limiter) == 0


def until(condition: Callable[[], bool]) -> None:
    """Let other threads run until the condition holds."""
    pause = threading.Event()
    for _ in range(PATIENCE * 1000):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("it never came to that")


# --- Giving up -------------------------------------------------------------------------------------------------------


async def test_a_wait_that_would_be_too_long_is_refused_at_once(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_log("1/minute"), clock=clock)
    await done(limiter.hit("ada"))
    start = clock.now_us()
    with pytest.raises(RateLimited) as caught:
        await done(limiter.wait("ada", timeout=59.999999))
    assert clock.now_us() == start
    assert caught.value.decision.retry_after == 60.0
    assert queued(limiter) == 0
    assert await done(limiter.wait("ada", timeout=60))
    assert clock.now_us() == start + 60_000_000


@pytest.mark.parametrize("timeout", [None, 0, 5])
async def test_a_wait_that_never_ends_is_refused_at_once(
    flavour: Flavour, clock: FakeClock, timeout: float | None
) -> None:
    limiter = flavour("0/minute", clock=clock)
    start = clock.now_us()
    with pytest.raises(RateLimited, match="never admitted"):
        await done(limiter.wait("ada", timeout=timeout))
    assert clock.now_us() == start


@pytest.mark.parametrize("timeout", [0, -5])
async def test_no_time_to_wait_is_enough_if_there_is_room(
    flavour: Flavour, clock: FakeClock, timeout: float
) -> None:
    limiter = flavour("1/minute", clock=clock)
    assert await done(limiter.wait("ada", timeout=timeout))
    with pytest.raises(RateLimited):
        await done(limiter.wait("ada", timeout=timeout))


async def test_a_task_that_queues_in_vain_is_told_at_once() -> None:
    """Behind others it cannot be admitted sooner than alone, and alone it would be an hour too late."""
    clock = Gatekeeper()
    limiter = AsyncLimiter("1/day", clock=clock)
    await limiter.hit("ada")
    first = asyncio.create_task(limiter.wait("ada"))
    await settled(lambda: clock.asleep_now == 1)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(RateLimited):
            await limiter.wait("ada", timeout=23 * 3600)
    assert queued(limiter) == 1
    clock.let_go_async.set()
    assert await first


def test_a_thread_that_queues_in_vain_is_told_at_once() -> None:
    clock = Gatekeeper()
    limiter = Limiter("1/day", clock=clock)
    limiter.hit("ada")
    first = threading.Thread(target=limiter.wait, args=("ada",))
    first.start()
    until(lambda: clock.asleep_now == 1)
    told = threading.Event()

    def second() -> None:
        with pytest.raises(RateLimited):
            limiter.wait("ada", timeout=23 * 3600)
        told.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert told.wait(PATIENCE)
    clock.let_go.set()
    first.join(PATIENCE)
    assert queued(limiter) == 0


async def test_a_turn_that_comes_too_late_is_a_refusal_for_the_others_sake() -> None:
    clock = Gatekeeper()
    limiter = AsyncLimiter(sliding_log("5/minute"), clock=clock)
    await limiter.hit("ada", 3)
    large = asyncio.create_task(limiter.wait("ada", 5))
    await settled(lambda: clock.asleep_now == 1)
    with pytest.raises(RateLimited) as caught:
        await limiter.wait("ada", timeout=0.001)
    decision = caught.value.decision
    assert (decision.allowed, decision.remaining, decision.retry_after) == (False, 1, 0.0)
    assert queued(limiter) == 1
    clock.let_go_async.set()
    assert await large


def test_a_threads_turn_that_comes_too_late_is_a_refusal_for_the_others_sake() -> None:
    clock = Gatekeeper()
    limiter = Limiter(sliding_log("5/minute"), clock=clock)
    limiter.hit("ada", 3)
    large = threading.Thread(target=limiter.wait, args=("ada", 5))
    large.start()
    until(lambda: clock.asleep_now == 1)
    with pytest.raises(RateLimited) as caught:
        limiter.wait("ada", timeout=0.001)
    assert (caught.value.decision.remaining, caught.value.decision.retry_after) == (1, 0.0)
    clock.let_go.set()
    large.join(PATIENCE)
    assert queued(limiter) == 0


# --- Giving places back ----------------------------------------------------------------------------------------------


async def test_a_cancelled_task_gives_its_place_in_the_queue_back() -> None:
    clock = Gatekeeper()
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    await limiter.hit("ada")
    tasks = [asyncio.create_task(limiter.wait("ada")) for _ in range(3)]
    await settled(lambda: queued(limiter) == 3)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert queued(limiter) == 2
    clock.let_go_async.set()
    async with asyncio.timeout(PATIENCE):
        assert await tasks[0]
        assert await tasks[2]


async def test_a_task_cancelled_while_it_sleeps_passes_the_turn_on() -> None:
    clock = Gatekeeper()
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    await limiter.hit("ada")
    first, second = (asyncio.create_task(limiter.wait("ada")) for _ in range(2))
    await settled(lambda: queued(limiter) == 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    clock.let_go_async.set()
    async with asyncio.timeout(PATIENCE):
        assert await second
    assert queued(limiter) == 0
    assert not await limiter.hit("ada"), "the cancelled one took nothing"


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("timeout", [None, 1000])
async def test_a_cancellation_is_never_swallowed_whenever_it_comes(steps: int, timeout: float | None) -> None:
    """Also not when it meets the turn that has just been passed on."""
    clock = Gatekeeper()
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    await limiter.hit("ada")
    first = asyncio.create_task(limiter.wait("ada"))
    await settled(lambda: clock.asleep_now == 1)
    second = asyncio.create_task(limiter.wait("ada", timeout=timeout))
    await settled(lambda: queued(limiter) == 2)
    first.cancel()
    for _ in range(steps):
        await asyncio.sleep(0)
    assert second.cancel()
    clock.let_go_async.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert queued(limiter) == 0
    assert await limiter.wait("ada", timeout=1000)


async def test_an_error_gives_the_place_back(flavour: Flavour) -> None:
    class Broken(FakeClock):
        def sleep(self, seconds: float) -> None:
            raise OSError("no sleep")

        async def asleep(self, seconds: float) -> None:
            raise OSError("no sleep")

    limiter = flavour("1/minute", clock=Broken())
    await done(limiter.hit("ada"))
    for _ in range(2):
        with pytest.raises(OSError, match="no sleep"):
            await done(limiter.wait("ada"))
    assert queued(limiter) == 0


def test_an_interrupted_thread_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Gatekeeper()
    limiter = Limiter("1/minute", clock=clock)
    limiter.hit("ada")
    first = threading.Thread(target=limiter.wait, args=("ada",))
    first.start()
    until(lambda: clock.asleep_now == 1)

    def interrupted(*args: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("headgate._concurrency.Event.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        limiter.wait("ada")
    assert queued(limiter) == 1
    clock.let_go.set()
    first.join(PATIENCE)


# --- Event loops and forks -------------------------------------------------------------------------------------------


def test_tasks_of_several_event_loops_wait_for_one_another(clock: FakeClock) -> None:
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    served: list[bool] = []

    def run() -> None:
        async def work() -> None:
            decisions = await asyncio.gather(*(limiter.wait("ada") for _ in range(10)))
            served.extend(bool(decision) for decision in decisions)

        asyncio.run(work())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert served == [True] * 40
    assert queued(limiter) == 0


def test_a_loop_that_ended_with_waiters_leaves_no_queue_behind() -> None:
    clock = Gatekeeper()
    limiter = AsyncLimiter("1/minute", clock=clock)

    async def abandon() -> None:
        await limiter.hit("ada")
        for _ in range(3):
            asyncio.ensure_future(limiter.wait("ada"))  # noqa: RUF006  # left to the loop, which cancels it
        await settled(lambda: queued(limiter) == 3)

    asyncio.run(abandon())
    assert queued(limiter) == 0
    clock.advance(61)
    assert asyncio.run(limiter.wait("ada", timeout=0))


def test_a_turn_passed_on_to_a_loop_that_is_closed_is_no_error() -> None:
    async def take_a_ticket() -> AsyncEvent:
        return AsyncEvent()

    asyncio.run(take_a_ticket()).set()


def test_a_child_does_not_queue_behind_the_parents_threads() -> None:
    clock = Gatekeeper()
    limiter = Limiter("1/minute", clock=clock)
    limiter.hit("ada")
    thread = threading.Thread(target=limiter.wait, args=("ada",))
    thread.start()
    until(lambda: clock.asleep_now == 1)

    def work() -> bool:
        clock.advance(61)
        return limiter.wait("ada").allowed

    assert in_child(work)
    clock.let_go.set()
    thread.join(PATIENCE)


# --- Whose clock -----------------------------------------------------------------------------------------------------


async def test_waiting_goes_by_the_clock_of_a_given_store(flavour: Flavour, clock: FakeClock) -> None:
    """Else a test whose store has the clock would wait for real, and for ever."""
    limiter = flavour(sliding_log("1/day"), name="x", store=MemoryStore(clock=clock))
    start = clock.now_us()
    await done(limiter.wait("ada"))
    await done(limiter.wait("ada"))
    assert clock.now_us() - start == 24 * 3_600_000_000


def test_waiting_does_not_go_by_a_wall_clock_that_may_be_set(flavour: Flavour) -> None:
    with SQLiteStore(":memory:") as store:
        assert isinstance(store.clock, WallClock)
        assert isinstance(flavour("1/day", name="x", store=store)._clock, SteadyClock)
    with SQLiteStore(":memory:", clock=(fake := FakeClock())) as store:
        assert flavour("1/day", name="x", store=store)._clock is fake
