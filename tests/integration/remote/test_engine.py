"""The engine on real servers of both kinds: few connections, exact counts, total deadlines, nothing lost."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    Limiter,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    fixed_window,
    sliding_window,
)
from headgate.stores.base import Answer
from headgate.stores.request import Request
from tests.faults.proxy import FaultProxy
from tests.integration.deadlines import Deadlines
from tests.integration.waiting import until
from tests.integration.worlds import PATIENT, Store, World
from tests.unit.processes import Interrupted, interrupts


@pytest.fixture(params=["redis", "postgres"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param, request.getfixturevalue(f"headgate_{request.param}_url"))


@pytest.fixture
def store(world: World) -> Iterator[Store]:
    with world.store() as store:
        yield store


# --- Few connections, exact counts -----------------------------------------------------------------------------------


def test_200_threads_get_exactly_the_limit_over_few_connections(world: World, store: Store) -> None:
    limiter = Limiter("100/day", name=world.name, store=store)
    ready = threading.Barrier(200)

    def hit() -> bool:
        ready.wait(PATIENT)
        return bool(limiter.hit("a"))

    with ThreadPoolExecutor(200) as pool:
        jobs = [pool.submit(hit) for _ in range(200)]
        assert sum(job.result(PATIENT) for job in jobs) == 100
    assert world.connections() == 1
    assert (limiter.health.failures, limiter.health.degraded) == (0, 0)


async def test_10000_parallel_tasks_get_exactly_the_limit(world: World) -> None:
    async with world.store() as store:
        limiter = AsyncLimiter("100/day", name=world.name, store=store)
        decisions = await asyncio.gather(*(limiter.hit("a") for _ in range(10_000)))
        assert sum(map(bool, decisions)) == 100
        assert not any(decision.degraded for decision in decisions)


# --- Deadlines -------------------------------------------------------------------------------------------------------


def asking(
    store: Store, world: World, flavour: str, deadline: float | None = None
) -> Callable[[Request], Awaitable[Answer]]:
    """Return a function that hits `5/day`, from a thread or a task, without a failure policy."""
    rules = (fixed_window("5/day"),)
    if flavour == "tasks":
        return store.bind_async(world.name, rules, deadline=deadline).decide
    return partial(asyncio.to_thread, store.bind(world.name, rules, deadline=deadline).decide)


@pytest.mark.parametrize("flavour", ["threads", "tasks"])
async def test_deadline_covers_the_whole_call_with_a_slow_reply(
    world: World, flavour: str, deadlines: Deadlines
) -> None:
    """Each byte arrives within the deadline, but the whole reply does not."""
    with FaultProxy(world.port) as proxy:
        async with world.store(port=proxy.port) as store:
            patient, hurried = asking(store, world, flavour), asking(store, world, flavour, deadline=0.2)
            await patient(Request("hit", "warm"))
            proxy.mode = "trickle"
            deadlines.count = True
            with pytest.raises(StoreTimeout):
                await hurried(Request("hit", "a"))
            deadlines.count = False
            proxy.mode = "forward"
            # The late reply is not used for this call.
            assert (await patient(Request("peek", "warm", 5)))[0].remaining == 4
            assert (await patient(Request("peek", "a", 0)))[0].remaining == 4


def test_deadline_includes_connecting_to_a_silent_server(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with world.store(port=port, deadline=0.2) as store:
            gate = store.bind(world.name, (fixed_window("5/day"),))
            with pytest.raises(StoreUnavailable):
                gate.decide(Request("hit", "a"))


# --- Nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21])
async def test_cancelled_holds_leave_nothing_counted(world: World, steps: int) -> None:
    async with world.store() as store:
        limiter = AsyncLimiter("1000/day", name=world.name, store=store, on_store_error="raise")
        gate = store.bind_async(world.name, limiter.rules)
        await limiter.check("a")
        holds = [asyncio.ensure_future(gate.decide(Request("hold", "a"))) for _ in range(60)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for hold in holds:
            hold.cancel()
        await asyncio.wait(holds)
        kept = sum(not hold.cancelled() for hold in holds)
        await until_remaining(limiter, {"a": 1000 - kept})


async def test_hold_cancelled_when_its_reply_arrives_is_released(world: World) -> None:
    """The reply has arrived, but the caller has not resumed yet: the hold could be lost here."""
    async with world.store() as store:
        limiter = AsyncLimiter("1000/day", name=world.name, store=store, on_store_error="raise")
        gate = store.bind_async(world.name, limiter.rules)
        await limiter.check("a")
        for _ in range(20):
            hold = asyncio.ensure_future(gate.decide(Request("hold", "a")))
            await until_answered(hold)
            hold.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hold
        await until_remaining(limiter, {"a": 1000})


async def test_hold_cancelled_when_its_reply_arrives_is_released_before_close(world: World) -> None:
    """Its caller resumes only after `aclose` was called."""
    rules = (fixed_window("100/day"),)
    async with world.store() as store:
        gate = store.bind_async(world.name, rules)
        await gate.decide(Request("peek", "a"))
        hold = asyncio.ensure_future(gate.decide(Request("hold", "a")))
        await until_answered(hold)
        hold.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hold
    with world.store() as store:
        assert store.bind(world.name, rules).decide(Request("peek", "a", 0))[0].remaining == 100


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 10, 20])
async def test_holds_cancelled_before_close_are_released(world: World, turns: int) -> None:
    rules = (fixed_window("100/day"),)
    async with world.store() as store:
        gate = store.bind_async(world.name, rules)
        await gate.decide(Request("peek", "warm"))
        holds = [asyncio.ensure_future(gate.decide(Request("hold", f"{number}"))) for number in range(40)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for hold in holds:
            hold.cancel()
    await asyncio.wait(holds)
    with world.store() as store:
        gate_of_threads = store.bind(world.name, rules)
        left = [gate_of_threads.decide(Request("peek", f"{n}", 0))[0].remaining for n in range(len(holds))]
    assert left == [100 - (not hold.cancelled()) for hold in holds]


def test_holds_of_tasks_cancelled_by_the_ending_event_loop_are_released(world: World) -> None:
    store = world.store()
    limiter = AsyncLimiter("100/day", name=world.name, store=store)
    held: list[None] = []
    tasks: list[asyncio.Task[None]] = []

    async def hold() -> None:
        async with limiter.hold("a"):
            held.append(None)
            await asyncio.Event().wait()

    async def leave() -> None:
        tasks.extend(asyncio.ensure_future(hold()) for _ in range(20))
        while len(held) < 20:  # noqa: ASYNC110  # as soon as all have their replies
            await asyncio.sleep(0)
        tasks.extend(asyncio.ensure_future(limiter.check("a")) for _ in range(20))  # type: ignore[arg-type]
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert Limiter("100/day", name=world.name, store=store).check("a", 0).remaining == 100
    assert (limiter.health.outages, limiter.health.failures) == (0, 0)
    store.close()


async def until_answered(task: asyncio.Task[Any]) -> None:
    """Return when the future awaited by a task is done, but the task has not resumed yet."""
    async with asyncio.timeout(PATIENT):
        while True:
            await asyncio.sleep(0)
            waiting: asyncio.Future[Any] | None = task._fut_waiter  # type: ignore[attr-defined]
            if waiting is not None and waiting.done():
                return


async def test_cancelled_records_and_releases_are_completed(world: World) -> None:
    async with world.store() as store:
        limiter = AsyncLimiter("1000/day", name=world.name, store=store, on_store_error="raise")
        holds = [await limiter.hold("held") for _ in range(20)]
        telling = [asyncio.ensure_future(limiter.record("used")) for _ in range(20)]  # type: ignore[arg-type]
        telling += [asyncio.ensure_future(hold.release()) for hold in holds]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for task in telling:
            task.cancel()
        await asyncio.wait(telling)
        await until_remaining(limiter, {"used": 980, "held": 1000})


async def until_remaining(limiter: AsyncLimiter, expected: dict[str, int]) -> None:
    """Return when the keys have these remaining units: cancelled calls are completed in the background."""
    async with asyncio.timeout(PATIENT):
        while {key: (await limiter.check(key, 0)).remaining for key in expected} != expected:
            pass


def test_interrupted_threads_neither_lose_connections_nor_mix_up_replies(world: World, store: Store) -> None:
    """A handler raises again and again in the main thread, while other threads count."""
    limiter = Limiter(sliding_window("1000000/day"), name=world.name, store=store, on_store_error="raise")
    gate = store.bind(world.name, limiter.rules)
    stop = threading.Event()

    def work(number: int) -> tuple[int, int]:
        counted = unknown = 0
        while not stop.is_set():
            try:
                decision = gate.decide(Request("hit", f"key {number}"))[0]
            except StoreError:
                unknown += 1
            else:
                counted += 1
                assert decision.remaining is not None
                assert 1_000_000 - counted - unknown <= decision.remaining <= 1_000_000 - counted
        return counted, unknown

    interrupted = number = 0
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(work, number) for number in range(3)]
        try:
            with interrupts() as interrupt_after:
                while interrupted < 300:
                    number += 1
                    try:
                        try:
                            interrupt_after(0.0003 + number % 29 * 0.0001)
                            while True:
                                gate.decide(Request("hit", "main"))
                        finally:
                            interrupt_after(0)
                    except Interrupted:
                        interrupted += 1
                    except StoreError:  # the call shared an interrupted connection
                        continue
        finally:
            stop.set()
        for number, job in enumerate(jobs):
            counted, unknown = job.result(PATIENT)
            remaining = limiter.check(f"key {number}", 0).remaining
            assert remaining is not None
            assert counted <= 1_000_000 - remaining <= counted + unknown
    until(lambda: world.connections() == 1)
    assert not limiter.hit("afterwards").degraded
