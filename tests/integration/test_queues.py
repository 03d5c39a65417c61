"""Waiting calls of several processes on a shared store: order, dead processes, wake-ups, failures.

Two stores with the same address stand for two processes; some tests start real ones.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headgate import Hold, Limiter, StoreUnavailable, concurrent, sliding_window
from headgate._concurrency import Event
from headgate._fair_queue import FairQueue
from headgate.stores import queues as stores_queues
from headgate.stores.postgres import migrate
from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import RedisServer
from tests.integration.queues import (
    HOURS,
    LONGER,
    ONE_PLACE,
    PATIENCE,
    SOON,
    WORLDS,
    World,
    place_of,
    queue_of,
    set_pauses,
    take_and_release,
    until_asleep,
    until_queued,
)
from tests.integration.waiting import until


@pytest.fixture(params=[*WORLDS])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Each kind of shared store; where processes cannot wake each other, they poll often."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'limits.db'}"
        monkeypatch.setattr(stores_queues, "POLL_EVERY", SOON)
    else:
        url = request.getfixturevalue(f"headgate_{request.param}_url")
    world = WORLDS[request.param](url)
    yield world
    world.close()


@pytest.fixture
def never_polls(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Waiters that are not woken sleep for hours."""
    set_pauses(monkeypatch, HOURS)


@pytest.fixture
def name() -> str:
    """A unique name for a limiter."""
    return secrets.token_hex(8)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Line:
    """The queue of a key in a process, as the calls of waiters use it."""

    def __init__(self, world: World, name: str) -> None:
        self.queues = world.store().bind_queues(name, (ONE_PLACE,))
        self.queue = self.queues.of_key(("ada",))
        self._world = world

    def ticket(self) -> tuple[str, Event]:
        """Return a new ticket and its event."""
        event = Event()
        return self.queues.new_ticket(event), event

    def until_listening(self) -> None:
        """Wait until messages reach the process."""
        ticket, _ = self.ticket()
        until(lambda: self._world.listens(ticket[: stores_queues.PROCESS_LENGTH]))

    def enter(self, ticket: str, priority: int = 1) -> bool:
        first: bool = self.queues.enter(self.queue, ticket, priority)
        return first

    def leave(self, ticket: str) -> None:
        """Leave the queue, and return when that is done."""
        self.queues.leave(self.queue, ticket)
        until(lambda: ticket not in self._world.tickets(self.queue))


# --- Order -----------------------------------------------------------------------------------------------------------


def test_places_are_given_in_order_of_arrival(world: World, name: str, pool: ThreadPoolExecutor) -> None:
    processes = [world.limiter(name), world.limiter(name)]
    admitted: list[int] = []
    held = processes[0].hold("ada")
    waiting: list[Future[None]] = []
    for number in range(6):
        limiter = processes[number % 2]
        waiting.append(
            pool.submit(take_and_release, limiter, done=lambda number=number: admitted.append(number))  # type: ignore[misc]
        )
        until_queued(world, queue_of(limiter), number + 1)
    held.release()
    for each in waiting:
        each.result(PATIENCE)
    assert admitted == [0, 1, 2, 3, 4, 5]
    until_queued(world, queue_of(processes[0]), 0)
    until_queued(world, place_of(processes[0]), 0)


async def test_tasks_are_admitted_in_order_of_arrival(world: World, name: str) -> None:
    processes = [world.async_limiter(name), world.async_limiter(name)]
    admitted: list[int] = []

    async def work(number: int) -> None:
        async with processes[number % 2].hold("ada", timeout=LONGER):
            admitted.append(number)

    held = await processes[0].hold("ada")
    tasks = []
    for number in range(6):
        tasks.append(asyncio.create_task(work(number)))
        await asyncio.to_thread(until_queued, world, queue_of(processes[0]), number + 1)
    await held.release()
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert admitted == [0, 1, 2, 3, 4, 5]
    for limiter in processes:
        await limiter.store.aclose()


def test_order_is_that_of_the_fair_queue(world: World, name: str) -> None:
    """Random traces of two processes; tickets enter, stay, leave, or expire because their process died."""
    lines = [Line(world, name), Line(world, name)]
    queue = lines[0].queue
    for seed in range(6):
        random, reference = Random(seed), FairQueue()
        present: dict[str, tuple[Line, Event, int]] = {}
        keep: list[Event] = []  # an event is the ticket's hold on life
        for _ in range(60):
            step = random.choice(["enter", "enter", "stay", "leave", "die"])
            ticket = random.choice([*present]) if present else ""
            if step == "enter" or not present:
                line, priority = random.choice(lines), random.choice([1, 1, 4, 10])
                ticket, event = line.ticket()
                keep.append(event)
                present[ticket] = line, event, priority
                assert line.enter(ticket, priority) == reference.join("ada", event, priority)
            elif step == "stay":
                line, event, priority = present[ticket]
                line = random.choice(lines)
                assert line.enter(ticket, priority) == reference.join("ada", event, priority)
            elif step == "leave":
                line, event, _ = present.pop(ticket)
                event.is_over = True
                line.leave(ticket)
                reference.leave("ada", event)
            else:
                _, event, _ = present.pop(ticket)
                event.is_over = True
                world.expire(queue, ticket)
        while present:
            first = [
                ticket
                for ticket, (line, event, priority) in present.items()
                if line.enter(ticket, priority) | reference.join("ada", event, priority)
            ]
            assert len(first) == 1
            line, event, priority = present.pop(first[0])
            assert line.enter(first[0], priority)
            event.is_over = True
            line.leave(first[0])
            reference.leave("ada", event)
        last, _ = lines[0].ticket()  # removes expired tickets that are still there
        assert lines[0].enter(last)
        lines[0].leave(last)
        assert world.tickets(queue) == []


def test_priorities_share_admissions_in_their_proportion(world: World, name: str) -> None:
    lines = [Line(world, name), Line(world, name)]
    present: dict[str, tuple[Line, int]] = {}
    keep = []
    for number in range(20):
        ticket, event = lines[number % 2].ticket()
        keep.append(event)
        present[ticket] = lines[number % 2], 1 if number % 4 < 2 else 4
        lines[number % 2].enter(ticket, present[ticket][1])
    served = []
    while present:
        (first,) = [ticket for ticket, (line, priority) in present.items() if line.enter(ticket, priority)]
        line, priority = present.pop(first)
        served.append(priority)
        line.leave(first)
    assert served[0] == 1  # it came first
    assert served[1:11].count(4) == 8


def test_ticket_leaves_from_the_middle(world: World, name: str) -> None:
    line, other = Line(world, name), Line(world, name)
    (first, a), (second, b), (third, c) = line.ticket(), other.ticket(), line.ticket()
    assert [line.enter(first), other.enter(second), line.enter(third)] == [True, False, False]
    line.until_listening()
    other.leave(second)
    assert not line.enter(third)
    line.leave(first)
    assert line.enter(third)
    assert c.wait(PATIENCE)
    assert not b.wait(0)
    assert not a.wait(0)


@pytest.mark.parametrize(
    "key",
    ["a{b}c", "}{", "\0", "'; DROP TABLE headgate_tickets; --", "\ud800", "x" * 10_000, b"\xff\0{", "*", ""],
)
def test_any_key_has_its_own_queues(world: World, name: str, key: str | bytes) -> None:
    limiter = world.limiter(name)
    raw = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    similar = [raw if isinstance(key, str) else raw.decode("latin-1"), "plain"]
    for place in (queue_of, place_of):
        queue = place(limiter, key)
        ticket = limiter._queues.new_ticket(event := Event())
        assert limiter._queues.enter(queue, ticket, 1)
        assert world.tickets(queue) == [ticket]
        assert not [
            world.tickets(place(limiter, other)) for other in similar if world.tickets(place(limiter, other))
        ]
        limiter._queues.leave(queue, ticket)
        until_queued(world, queue, 0)
        assert not event.wait(0)
    take_and_release(limiter, key)


def test_same_text_in_other_scopes_is_another_key(world: World, name: str, pool: ThreadPoolExecutor) -> None:
    shared = [sliding_window("100/minute", scope=scope) for scope in ("user", "realm")]
    limiter = world.limiter(name, *shared, concurrent(1, lease="1h", scope="team"))
    key = {"user": "a", "realm": "b", "team": "a"}
    held = limiter.hold(key)
    waiting = pool.submit(limiter.hold, key, timeout=LONGER)
    until_queued(world, limiter._queues.of_key(("a", "b", "a")), 1)
    assert limiter.hold({**key, "team": "b"}, timeout=0)
    held.release()
    waiting.result(PATIENCE)


# --- Wake-ups --------------------------------------------------------------------------------------------------------


def settle(hold: Hold) -> object:
    return hold.settle(1)


def confirm(hold: Hold) -> object:
    return hold.confirm()


@pytest.mark.usefixtures("never_polls")
@pytest.mark.parametrize("end", [Hold.release, settle, confirm])
def test_end_of_a_hold_wakes_the_first_waiter(
    world: World, name: str, pool: ThreadPoolExecutor, end: Callable[[Hold], object]
) -> None:
    limiter = world.limiter(name)
    other = world.limiter(name, store=world.process_that_tells(limiter.store))
    held = other.hold("ada")
    waiting = pool.submit(take_and_release, limiter)
    until_asleep(world, limiter)
    end(held)
    waiting.result(PATIENCE)


@pytest.mark.usefixtures("never_polls")
def test_reset_wakes_the_first_waiter(world: World, name: str, pool: ThreadPoolExecutor) -> None:
    limiter = world.limiter(name)
    other = world.limiter(name, store=world.process_that_tells(limiter.store))
    other.hold("ada")
    waiting = pool.submit(take_and_release, limiter)
    until_asleep(world, limiter)
    other.reset("ada")
    waiting.result(PATIENCE)


@pytest.mark.usefixtures("never_polls")
def test_each_waiter_wakes_the_next_one(world: World, name: str, pool: ThreadPoolExecutor) -> None:
    limiter = world.limiter(name)
    other = world.limiter(name, store=world.process_that_tells(limiter.store))
    held = other.hold("ada")
    waiting = []
    for number in range(6):
        waiting.append(pool.submit(take_and_release, (limiter, other)[number % 2]))
        until_queued(world, queue_of(limiter), number + 1)
    for each in {ticket[: stores_queues.PROCESS_LENGTH] for ticket in world.tickets(queue_of(limiter))}:
        until(partial(world.listens, each))
    held.release()
    for each in waiting:
        each.result(PATIENCE)


@pytest.mark.usefixtures("never_polls")
async def test_cancelled_waiter_wakes_the_next_one(world: World, name: str) -> None:
    limiter = world.async_limiter(name)
    other = world.async_limiter(name, store=world.process_that_tells(limiter.store))
    held = await other.hold("ada")
    cancelled = asyncio.create_task(limiter.wait("ada"))
    await asyncio.to_thread(until_asleep, world, limiter)
    waiting = asyncio.create_task(other.wait("ada"))
    await asyncio.to_thread(until_queued, world, queue_of(limiter), 2)
    for ticket in world.tickets(queue_of(limiter)):
        await asyncio.to_thread(until, partial(world.listens, ticket[: stores_queues.PROCESS_LENGTH]))
    cancelled.cancel()
    await asyncio.wait((cancelled,), timeout=PATIENCE)
    await asyncio.to_thread(until_queued, world, queue_of(limiter), 1)
    await held.release()
    assert await asyncio.wait_for(waiting, PATIENCE)
    for each in (limiter, other):
        await each.store.aclose()


@pytest.mark.usefixtures("never_polls")
def test_new_first_ticket_is_told_when_the_first_one_has_expired(world: World, name: str) -> None:
    line = Line(world, name)
    (dead, _), (second, event), (third, _) = line.ticket(), line.ticket(), line.ticket()
    assert [line.enter(dead), line.enter(second), line.enter(third)] == [True, False, False]
    line.until_listening()
    world.expire(line.queue, dead)
    elsewhere, _event = line.ticket()
    line.queues.enter(line.queues.of_key(("grace",)), elsewhere, 1)  # removes only tickets of dead queues
    assert not line.enter(third)
    assert event.wait(PATIENCE)
    assert line.enter(second)
    assert sorted(world.tickets(line.queue)) == sorted([second, third])


class Deaf:
    """A subscription to which no message arrives."""

    def __init__(self, process: str) -> None:
        self._is_closed = threading.Event()

    def receive(self, seconds: float) -> tuple[str, ...]:
        self._is_closed.wait(seconds)
        return ()

    def close(self) -> None:
        self._is_closed.set()


def test_waiters_to_whom_no_message_arrives_poll(
    world: World, name: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pauses(monkeypatch, SOON)
    limiters = [world.limiter(name), world.limiter(name)]
    for limiter in limiters:
        if world.tells_others:
            monkeypatch.setattr(limiter.store._wake_ups, "_subscribe", Deaf)
    held = limiters[0].hold("ada")
    waiting = [pool.submit(take_and_release, limiters[number % 2]) for number in range(4)]
    until_queued(world, queue_of(limiters[0]), 4)
    held.release()
    for each in waiting:
        each.result(PATIENCE)


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
def test_new_tickets_remove_those_of_dead_queues(world: World, name: str) -> None:
    """Redis expires whole queues; for PostgreSQL see its own test."""
    limiter = world.limiter(name)
    queues = [queue_of(limiter, str(number)) for number in range(20)]
    events = [Event() for _ in range(30)]
    tickets = [limiter._queues.new_ticket(event) for event in events]
    for queue, ticket in zip(queues, tickets, strict=False):
        limiter._queues.enter(queue, ticket, 1)
        world.expire(queue, ticket, 100)
    for ticket in tickets[20:]:
        limiter._queues.enter(queue_of(limiter), ticket, 1)
    assert not [queue for queue in queues if world.tickets(queue)]
    assert len(world.tickets(queue_of(limiter))) == 10


# --- Processes -------------------------------------------------------------------------------------------------------


def wait_in_child(url: str, name: str, pause: float, lifetime: float) -> None:
    """Wait for a place and release it."""
    patches = pytest.MonkeyPatch()
    set_pauses(patches, pause)
    patches.setattr(stores_queues, "LEAST_LIFETIME", lifetime)
    with Limiter(ONE_PLACE, name=name, store=url, on_store_error="raise") as limiter:
        take_and_release(limiter)


@contextmanager
def child(url: str, name: str, pause: float, lifetime: float = PATIENCE) -> Iterator[Any]:
    """A process that waits for a place."""
    process = multiprocessing.get_context("spawn").Process(
        target=wait_in_child, args=(url, name, pause, lifetime), daemon=True
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(PATIENCE)


def test_release_wakes_a_waiter_in_another_process(world: World, name: str) -> None:
    limiter = world.limiter(name)
    held = limiter.hold("ada")
    with child(world.url, name, HOURS if world.tells_others else SOON) as process:
        until_asleep(world, limiter)
        held.release()
        process.join(PATIENCE)
        assert process.exitcode == 0


def test_ticket_of_a_killed_process_expires(
    world: World, name: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pauses(monkeypatch, SOON)
    limiter = world.limiter(name)
    held = limiter.hold("ada")
    with child(world.url, name, SOON, lifetime=1.0) as process:
        until_queued(world, place_of(limiter), 1)
        process.kill()
        process.join(PATIENCE)
    waiting = pool.submit(take_and_release, limiter)
    held.release()
    waiting.result(PATIENCE)
    until_queued(world, queue_of(limiter), 0)


# --- Failures --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[*WORLDS])
def breakable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[World, Callable[[], object]]]:
    """A shared store, and a function that breaks it."""
    if request.param == "sqlite":
        world = WORLDS["sqlite"](f"sqlite:///{tmp_path / 'limits.db'}")
        yield world, world.close
    elif request.param == "redis":
        with RedisServer() as server, closing(WORLDS["redis"](server.url)) as world:
            yield world, server.kill
    else:
        with PostgresServer() as database:
            migrate(database.url)
            with closing(WORLDS["postgres"](database.url)) as world:
                yield world, database.kill


def test_failure_policy_answers_waiters_when_the_store_goes_down(
    breakable: tuple[World, Callable[[], object]],
    name: str,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_pauses(monkeypatch, SOON)
    world, break_it = breakable
    store = world.store()
    admitting, raising = (
        Limiter(ONE_PLACE, name=name, store=store, on_store_error=policy) for policy in ("open", "raise")
    )
    admitting.hold("ada")
    waiting = [pool.submit(limiter.hold, "ada", timeout=LONGER) for limiter in [admitting, raising] * 2]
    until_queued(world, queue_of(admitting), 4)
    break_it()
    for number, each in enumerate(waiting):
        if number % 2:
            with pytest.raises(StoreUnavailable):
                each.result(PATIENCE)
        else:
            assert each.result(PATIENCE).degraded


@pytest.mark.parametrize("breakable", ["redis"], indirect=True)
def test_waiter_does_not_ask_a_store_that_is_down_to_leave(
    breakable: tuple[World, Callable[[], object]],
    name: str,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_pauses(monkeypatch, SOON)
    world, break_it = breakable
    limiter = world.limiter(name)
    limiter.hold("ada")
    waiting = pool.submit(limiter.hold, "ada", timeout=LONGER)
    until_queued(world, place_of(limiter), 1)
    break_it()
    monkeypatch.setattr(limiter._queues, "leave", pytest.fail)
    with pytest.raises(StoreUnavailable):
        waiting.result(PATIENCE)
