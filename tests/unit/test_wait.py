"""`wait`: order of arrival, timeouts, cancellation, and refusal at once if the timeout is too short."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from random import Random
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    Decision,
    Limiter,
    MemoryStore,
    RateLimited,
    SQLiteStore,
    sliding_log,
    token_bucket,
)
from headgate._concurrency import AsyncEvent, Event
from headgate._fair_queue import FairQueue
from headgate.clock import SteadyClock, WallClock
from headgate.testing import FakeClock
from tests.unit.flavours import done
from tests.unit.processes import Interrupted, Interruptions, forking, in_child

pytestmark = forking

Flavour = type[Limiter] | type[AsyncLimiter]
PATIENCE = 10  # seconds after which a test that hangs fails


class BlockingClock(FakeClock):
    """A clock whose sleeps last until the test sets an event."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep_now = 0
        self.may_wake = threading.Event()
        self.may_wake_async = asyncio.Event()

    def sleep(self, seconds: float) -> None:
        self.asleep_now += 1
        assert self.may_wake.wait(PATIENCE)
        super().sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        self.asleep_now += 1
        await self.may_wake_async.wait()
        await super().asleep(seconds)


async def settled(condition: Callable[[], bool]) -> None:
    """Run other tasks until the condition is true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # the tasks that bring it about know of no event
            await asyncio.sleep(0)


def queued(limiter: Limiter | AsyncLimiter, key: str = "ada") -> int:
    """Return the number of waiters for a key, including the first one."""
    return limiter._lines.length((key,))


def has_queue_of(limiter: Limiter, length: int) -> bool:
    return queued(limiter) == length


# --- Waiting ---------------------------------------------------------------------------------------------------------


async def test_wait_returns_after_charging_the_units(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_log("2/minute"), clock=clock)
    start = clock.now_us()
    decisions = [await done(limiter.wait("ada")) for _ in range(4)]
    assert [decision.remaining for decision in decisions] == [1, 0, 1, 0]
    assert clock.now_us() - start == 60_000_000
    assert not await done(limiter.hit("ada"))


async def test_wait_lasts_until_the_requested_units_are_free(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(token_bucket("60/minute"), clock=clock)
    await done(limiter.hit("ada", 60))
    start = clock.now_us()
    assert await done(limiter.wait("ada", 7))
    assert clock.now_us() - start == 7_000_000


# --- Order of arrival ------------------------------------------------------------------------------------------------


async def test_tasks_are_served_in_order_of_arrival(clock: FakeClock) -> None:
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    served: list[int] = []

    async def work(number: int) -> None:
        await limiter.wait("ada")
        served.append(number)

    await asyncio.gather(*(work(number) for number in range(20)))
    assert served == list(range(20))
    assert queued(limiter) == 0


async def test_a_small_cost_does_not_overtake_a_large_one() -> None:
    clock = BlockingClock()
    limiter = AsyncLimiter(sliding_log("5/minute"), clock=clock)
    await limiter.hit("ada", 3)
    large = asyncio.create_task(limiter.wait("ada", 5))
    await settled(lambda: clock.asleep_now == 1)
    small = asyncio.create_task(limiter.wait("ada", 1))
    await settled(lambda: queued(limiter) == 2)
    assert not small.done()
    clock.may_wake_async.set()
    assert (await large).remaining == 0
    assert (await small).remaining == 4


async def test_another_key_does_not_wait_for_this_one() -> None:
    clock = BlockingClock()
    limiter = AsyncLimiter("1/minute", clock=clock)
    await limiter.hit("ada")
    waiting = asyncio.create_task(limiter.wait("ada"))
    await settled(lambda: clock.asleep_now == 1)
    assert await limiter.wait("bob")
    clock.may_wake_async.set()
    assert await waiting


def test_threads_are_served_in_order_of_arrival() -> None:
    clock = BlockingClock()
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
    clock.may_wake.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert served == list(range(8))
    assert queued(limiter) == 0


def until(condition: Callable[[], bool]) -> None:
    """Run other threads until the condition is true."""
    pause = threading.Event()
    for _ in range(PATIENCE * 1000):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("it never came to that")


# --- Timeouts --------------------------------------------------------------------------------------------------------


async def test_wait_longer_than_the_timeout_is_refused_at_once(flavour: Flavour, clock: FakeClock) -> None:
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
async def test_endless_wait_is_refused_at_once(
    flavour: Flavour, clock: FakeClock, timeout: float | None
) -> None:
    limiter = flavour("0/minute", clock=clock)
    start = clock.now_us()
    with pytest.raises(RateLimited, match="never admitted"):
        await done(limiter.wait("ada", timeout=timeout))
    assert clock.now_us() == start


@pytest.mark.parametrize("timeout", [0, -5, -inf])
async def test_zero_or_negative_timeout_admits_only_without_waiting(
    flavour: Flavour, clock: FakeClock, timeout: float
) -> None:
    limiter = flavour("1/minute", clock=clock)
    assert await done(limiter.wait("ada", timeout=timeout))
    with pytest.raises(RateLimited):
        await done(limiter.wait("ada", timeout=timeout))


@pytest.mark.parametrize("timeout", [None, inf, 1e308])
async def test_infinite_timeout_equals_no_timeout(
    flavour: Flavour, clock: FakeClock, timeout: float | None
) -> None:
    limiter = flavour(sliding_log("1/day"), clock=clock)
    await done(limiter.wait("ada", timeout=timeout))
    start = clock.now_us()
    await done(limiter.wait("ada", timeout=timeout))
    assert clock.now_us() - start == 24 * 3_600_000_000


async def test_task_whose_timeout_is_too_short_is_refused_at_once() -> None:
    """Even without the other waiter, it would be admitted an hour after its timeout."""
    clock = BlockingClock()
    limiter = AsyncLimiter("1/day", clock=clock)
    await limiter.hit("ada")
    first = asyncio.create_task(limiter.wait("ada"))
    await settled(lambda: clock.asleep_now == 1)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(RateLimited):
            await limiter.wait("ada", timeout=23 * 3600)
    assert queued(limiter) == 1
    clock.may_wake_async.set()
    assert await first


async def test_task_still_queued_at_its_timeout_is_refused() -> None:
    clock = BlockingClock()
    limiter = AsyncLimiter(sliding_log("5/minute"), clock=clock)
    await limiter.hit("ada", 3)
    large = asyncio.create_task(limiter.wait("ada", 5))
    await settled(lambda: clock.asleep_now == 1)
    with pytest.raises(RateLimited) as caught:
        await limiter.wait("ada", timeout=0.001)
    decision = caught.value.decision
    assert (decision.allowed, decision.remaining, decision.retry_after) == (False, 1, 0.0)
    assert queued(limiter) == 1
    clock.may_wake_async.set()
    assert await large


# --- Cancellation and errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("timeout", [None, 1000])
async def test_cancellation_at_any_time_is_never_swallowed(steps: int, timeout: float | None) -> None:
    """Also if it happens at the same time as the wake-up."""
    clock = BlockingClock()
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
    clock.may_wake_async.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert queued(limiter) == 0
    assert await limiter.wait("ada", timeout=1000)


async def test_waiter_that_fails_leaves_the_queue(flavour: Flavour) -> None:
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


def test_interrupted_thread_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = BlockingClock()
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
    clock.may_wake.set()
    first.join(PATIENCE)


@pytest.mark.usefixtures("frequent_queue_checks")
def test_thread_interrupted_while_leaving_still_leaves_the_queue() -> None:
    clock = BlockingClock()
    limiter = Limiter(token_bucket("1/second", burst=1), clock=clock)
    limiter.hit("ada")
    turns: Any = limiter._lines
    leave, interrupted = turns.leave, threading.Event()

    def interrupt(*arguments: Any) -> None:
        if interrupted.is_set():
            leave(*arguments)
        else:  # like a signal handler that raises before the first line
            interrupted.set()
            raise Interrupted

    turns.leave = interrupt

    def work() -> None:
        with suppress(Interrupted):
            limiter.wait("ada")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        until(partial(has_queue_of, limiter, number + 1))
    clock.may_wake.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert interrupted.is_set()
    assert queued(limiter) == 0


@pytest.mark.usefixtures("frequent_queue_checks")
def test_a_signal_handler_that_raises_in_one_thread_does_not_stop_another(
    interruptions: Interruptions, hasty_threads: None
) -> None:
    limiter = Limiter("1000000000/minute")
    stop, served = threading.Event(), [0]

    def work() -> None:
        while not stop.is_set():
            limiter.wait("ada")
            served[0] += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for _ in interruptions(lambda: limiter.wait("ada")):
        pass
    before = served[0]
    until(lambda: served[0] > before)
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert limiter.wait("ada", timeout=0)
    assert limiter._lines._queues == {}


@pytest.mark.parametrize("event", [Event, AsyncEvent])
async def test_leave_during_another_call_neither_blocks_nor_corrupts_the_queue(event: Any) -> None:
    """The garbage collector may close a waiting coroutine in any thread and during any call."""
    turns = FairQueue()
    tickets = [event() for _ in range(4)]
    for ticket in tickets:
        turns.join("ada", ticket)
    tickets[1].is_over = True
    really_set = tickets[1].set

    def leave_during_set() -> bool:
        turns.leave("ada", tickets[1])
        return bool(really_set())

    tickets[1].set = leave_during_set
    turns.leave("ada", tickets[0])
    assert list(turns._queues["ada"][1]) == tickets[2:]
    assert await done(tickets[2].wait(PATIENCE))


# --- Many waiters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Event, AsyncEvent])
async def test_leave_compares_a_ticket_with_few_others(event: Any) -> None:
    """A search in the whole queue needed 50 million comparisons for 10,000 cancellations."""
    comparisons = 0

    class Ticket(event):  # type: ignore[misc]
        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return self is other

        __hash__ = event.__hash__

    turns, tickets = FairQueue(), [Ticket() for _ in range(10_000)]
    for ticket in tickets:
        turns.join("ada", ticket)
    # In a plain dict, finding the first entry skips all entries removed before it; these steps are not counted here.
    assert isinstance(turns._queues["ada"][1], OrderedDict)
    for ticket in Random(1).sample(tickets, len(tickets)):
        turns.leave("ada", ticket)
    assert comparisons < len(tickets)
    assert turns._queues == {}


# --- Event loops and forks -------------------------------------------------------------------------------------------


def test_tasks_of_several_event_loops_share_one_queue(clock: FakeClock) -> None:
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


def test_event_loop_that_ended_with_waiters_leaves_no_queue() -> None:
    clock = BlockingClock()
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


@pytest.fixture
def loops() -> Iterator[Callable[[], asyncio.AbstractEventLoop]]:
    """A function that creates event loops; they are closed at the end of the test."""
    made: list[asyncio.AbstractEventLoop] = []

    def make() -> asyncio.AbstractEventLoop:
        made.append(asyncio.new_event_loop())
        return made[-1]

    yield make
    for loop in made:
        loop.close()


Loops = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture
def frequent_queue_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waiters check often whether the first waiter is dead."""
    monkeypatch.setattr("headgate._fair_queue.LOOK_EVERY", 0.001)


def waiting_in(loop: asyncio.AbstractEventLoop, limiter: AsyncLimiter) -> asyncio.Task[Decision]:
    """Return a task that waits in the queue of a key, in a loop that no longer runs."""
    length = queued(limiter)
    task = loop.create_task(limiter.wait("ada"))
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it may be abandoned, and asyncio need not complain
    loop.run_until_complete(settled(lambda: queued(limiter) == length + 1))
    for _ in range(5):
        loop.run_until_complete(asyncio.sleep(0))
    return task


def test_waiter_of_a_closed_loop_is_skipped(loops: Loops) -> None:
    clock = BlockingClock()
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    open_loop, closed_loop = loops(), loops()
    open_loop.run_until_complete(limiter.hit("ada"))
    tasks = [
        waiting_in(open_loop, limiter),
        waiting_in(closed_loop, limiter),
        waiting_in(closed_loop, limiter),
        waiting_in(open_loop, limiter),
    ]
    closed_loop.close()
    clock.may_wake_async.set()
    for task in (tasks[0], tasks[3]):
        assert open_loop.run_until_complete(asyncio.wait_for(task, PATIENCE))
    assert queued(limiter) == 0


@pytest.mark.usefixtures("frequent_queue_checks")
@pytest.mark.parametrize("dead", [1, 3])
def test_waiters_notice_that_a_loop_was_closed_after_its_wake_up(loops: Loops, dead: int) -> None:
    clock = BlockingClock()
    limiter = AsyncLimiter(token_bucket("1/second", burst=1), clock=clock)
    open_loop, closed = loops(), [loops() for _ in range(dead)]
    open_loop.run_until_complete(limiter.hit("ada"))
    first = waiting_in(open_loop, limiter)
    abandoned = [waiting_in(loop, limiter) for loop in closed]
    last = waiting_in(open_loop, limiter)
    clock.may_wake_async.set()
    assert open_loop.run_until_complete(asyncio.wait_for(first, PATIENCE))
    assert queued(limiter) == dead + 1, "the turn was given to a loop that is open but does not run"
    for loop in closed:
        loop.close()
    assert open_loop.run_until_complete(asyncio.wait_for(last, PATIENCE))
    assert queued(limiter) == 0
    assert not any(task.done() for task in abandoned)


def test_wake_up_of_a_loop_that_is_just_closing_fails(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    async def make_ticket() -> AsyncEvent:
        return AsyncEvent()

    loop = loops()
    ticket = loop.run_until_complete(make_ticket())
    loop.close()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "is_closed", lambda: False)  # as it was a moment ago
        assert not ticket.set()


def test_child_process_does_not_queue_behind_threads_of_its_parent() -> None:
    clock = BlockingClock()
    limiter = Limiter("1/minute", clock=clock)
    limiter.hit("ada")
    thread = threading.Thread(target=limiter.wait, args=("ada",))
    thread.start()
    until(lambda: clock.asleep_now == 1)

    def work() -> bool:
        clock.advance(61)
        return limiter.wait("ada").allowed

    assert in_child(work)
    clock.may_wake.set()
    thread.join(PATIENCE)


# --- Clocks ----------------------------------------------------------------------------------------------------------


async def test_wait_uses_the_clock_of_a_given_store(flavour: Flavour, clock: FakeClock) -> None:
    """Otherwise a test with a fake clock in its store would sleep in real time, without end."""
    limiter = flavour(sliding_log("1/day"), name="x", store=MemoryStore(clock=clock))
    start = clock.now_us()
    await done(limiter.wait("ada"))
    await done(limiter.wait("ada"))
    assert clock.now_us() - start == 24 * 3_600_000_000


def test_wait_does_not_use_the_wall_clock(flavour: Flavour) -> None:
    with SQLiteStore(":memory:") as store:
        assert isinstance(store.clock, WallClock)
        assert isinstance(flavour("1/day", name="x", store=store)._clock, SteadyClock)
    with SQLiteStore(":memory:", clock=(fake := FakeClock())) as store:
        assert flavour("1/day", name="x", store=store)._clock is fake
