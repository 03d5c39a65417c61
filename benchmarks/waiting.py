"""Waiting calls on Redis: their order over sixteen processes, wake-up times, and store calls per waiting call.

    python -m benchmarks.waiting [--quick]
    python -m benchmarks.waiting kills [waits]

The second command kills processes while they wait, by default until 100,000 calls were admitted, and checks that all other
calls are admitted in order.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, cast

import headgate.stores.queues
from benchmarks.harness import Scale, Section, Target, announce, main, number, table
from headgate import AsyncLimiter, concurrent
from headgate.hooks import Hook
from headgate.stores.queues import AsyncQueues
from headgate.stores.redis import RedisStore
from headgate.testing.servers import RedisServer

PROCESSES = 16
KEYS = 8
TASKS = 2
"""Number of waiting tasks per process and key."""

LEASE = 2
LIFETIME = 2
"""Seconds until the place and the ticket of a killed process expire, in the run with kills."""

_RECORD = struct.Struct("<Iddddd")
_fork = multiprocessing.get_context("fork")


class Wait(NamedTuple):
    """One admitted call; times in seconds of the monotonic clock, which all processes share.

    Attributes:
        key: The number of its key.
        began: The time before it entered the queue.
        entered: The time after it entered the queue.
        admitted: The time after it took its place.
        releasing: The time before it released its place.
        released: The time after it released its place.
    """

    key: int
    began: float
    entered: float
    admitted: float
    releasing: float
    released: float


class RecordingStore(RedisStore):
    """A store that records when each task entered its queue, and counts calls of queues."""

    def __init__(self, url: str) -> None:
        super().__init__(url, deadline=30)
        self.entered: dict[Any, tuple[float, float]] = {}
        self.calls = 0

    def bind_queues_async(self, limiter: str, rules: tuple[Any, ...], **options: Any) -> AsyncQueues:
        queues: Any = super().bind_queues_async(limiter, rules, **options)
        enter = queues.enter

        async def recorded(queue: bytes, ticket: str, priority: int) -> bool:
            began = time.monotonic()
            is_first: bool = await enter(queue, ticket, priority)
            self.entered.setdefault(asyncio.current_task(), (began, time.monotonic()))
            return is_first

        queues.enter = recorded
        return cast(AsyncQueues, queues)

    def _queue_request(self, queue: bytes, ticket: str, priority: int, lasting_us: int) -> Any:
        self.calls += 1
        return super()._queue_request(queue, ticket, priority, lasting_us)


def run(scale: Scale) -> Iterator[Section]:
    """Measure the order of sixteen processes, then the store calls of one process."""
    with RedisServer() as server:
        yield _order(scale, server.url)
        yield _calls(scale, server.url)


def _order(scale: Scale, url: str) -> Section:
    announce(f"waiting: {PROCESSES} processes")
    with tempfile.TemporaryDirectory() as folder:
        waits = 10 * scale.calls // (PROCESSES * KEYS * TASKS) + 1
        workers = [_start(url, Path(folder) / str(place), waits) for place in range(PROCESSES)]
        for worker in workers:
            worker.join()
        found = _read(Path(folder))
    gaps = sorted(_gaps(found))
    rows = [
        ["waits", number(len(found))],
        ["inversions", number(inversions(found))],
        ["from a release to the next admission: median, ms", f"{1000 * median(gaps):.1f}"],
        ["99 of 100 within, ms", f"{1000 * quantiles(gaps, n=100)[-1]:.1f}"],
        ["longest, ms", f"{1000 * gaps[-1]:.1f}"],
    ]
    return Section(
        "order",
        [table(f"{PROCESSES} processes with {TASKS} tasks on each of {KEYS} places", ["", "number"], rows)],
        {"gaps": gaps},
        [
            Target("inversions", 0, inversions(found), at_most=True),
            Target(
                "from a release to the next admission, median in ms", 50, 1000 * median(gaps), at_most=True
            ),
        ],
    )


def _calls(scale: Scale, url: str) -> Section:
    sizes, found = (4, 64, 1024), dict[int, float]()
    for size in sizes:
        announce(f"waiting: store calls of {size} waiting calls")
        found[size] = asyncio.run(_calls_per_wait(url, size))
    rows = [[number(size), f"{calls:.1f}"] for size, calls in found.items()]
    growth = found[sizes[-1]] / found[sizes[0]]
    return Section(
        "calls",
        [table("Store calls per waiting call", ["waiting at once", "calls"], rows)],
        {str(size): calls for size, calls in found.items()},
        [Target(f"calls per wait, {sizes[-1]} ÷ {sizes[0]} waiting", 2, growth, at_most=True)],
    )


class _Decisions(Hook):
    def __init__(self) -> None:
        self.count = 0

    def decided(self, call: Any, decision: Any, seconds: float) -> None:
        self.count += 1


async def _calls_per_wait(url: str, size: int) -> float:
    store, decisions = RecordingStore(url), _Decisions()
    limiter = AsyncLimiter(
        concurrent(1, lease="1 minute"), name=f"calls {size}", store=store, hooks=[decisions]
    )

    async def wait() -> None:
        async with limiter.hold("key", timeout=inf):
            pass

    await asyncio.gather(*(wait() for _ in range(size)))
    await store.aclose()
    return (store.calls + decisions.count + size) / size  # every hold is also released


def _start(url: str, path: Path, waits: int) -> BaseProcess:
    worker = _fork.Process(target=lambda: asyncio.run(_work(url, path, waits)), daemon=True)
    worker.start()
    return worker


async def _work(url: str, path: Path, waits: int) -> None:
    """Take and release places, and write a record of each to a file, which outlives this process."""
    store = RecordingStore(url)
    limiter = AsyncLimiter(concurrent(1, lease=LEASE), name="order", store=store)
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    async def wait(key: int) -> None:
        for _ in range(waits):
            store.entered.pop(asyncio.current_task(), None)
            hold = await limiter.hold(str(key), timeout=inf)
            admitted = time.monotonic()
            await asyncio.sleep(0)
            releasing = time.monotonic()
            await hold.release()
            times = (*store.entered[asyncio.current_task()], admitted, releasing, time.monotonic())
            os.write(file, _RECORD.pack(key, *times))

    await asyncio.gather(*(wait(key) for key in range(KEYS) for _ in range(TASKS)))
    await store.aclose()


def _read(folder: Path) -> list[Wait]:
    data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return sorted((Wait(*fields) for fields in _RECORD.iter_unpack(data)), key=lambda wait: wait.admitted)


def inversions(waits: Sequence[Wait]) -> int:
    """Return the number of calls that were admitted before an earlier call of the same key.

    A call is earlier if it had entered the queue before the other call began to enter.
    """
    count = 0
    earliest: dict[int, float] = defaultdict(lambda: inf)  # the first entry of calls that were admitted later
    for wait in reversed(waits):
        count += earliest[wait.key] < wait.began
        earliest[wait.key] = min(earliest[wait.key], wait.entered)
    return count


def _gaps(waits: Sequence[Wait]) -> Iterator[float]:
    """Yield the seconds from the release of a place to the next admission, if that call was already waiting."""
    by_key: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        by_key[wait.key].append(wait)
    for found in by_key.values():
        for before, after in pairwise(found):
            if after.entered < before.releasing:
                yield after.admitted - before.releasing


def kills(waits: int) -> int:
    """Kill waiting processes until `waits` calls were admitted; return the exit code."""
    setattr(headgate.stores.queues, "LEAST_LIFETIME", LIFETIME)  # noqa: B010
    setattr(headgate.stores.queues, "RENEW_EVERY", LIFETIME / 4)  # noqa: B010
    rng, faults, started = random.Random(1), 0, PROCESSES
    with RedisServer() as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers = [_start(server.url, folder / str(place), sys.maxsize) for place in range(PROCESSES)]
        while (made := sum(path.stat().st_size for path in folder.iterdir()) // _RECORD.size) < waits:
            time.sleep(rng.uniform(0.5, 2))
            place = rng.randrange(PROCESSES)
            pid = workers[place].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            workers[place].join()
            workers[place] = _start(server.url, folder / str(started), sys.maxsize)
            faults, started = faults + 1, started + 1
            if faults % 20 == 0:
                announce(f"{made:,} waits, {faults} kills")
        for worker in workers:
            worker.kill()
            worker.join()
        found = _read(folder)
    gaps, late = sorted(_gaps(found)), LIFETIME + LEASE
    slow = [gap for gap in gaps if gap > 0.25]
    print(
        f"{len(found):,} waits, {faults} kills, {inversions(found)} inversions; from a release to the next admission: "
        f"median {1000 * median(gaps):.1f} ms, longest {gaps[-1]:.2f} s, {len(slow)} longer than 0.25 s"
    )
    return int(inversions(found) > 0 or gaps[-1] > 2 * late or len(slow) > 2 * KEYS * TASKS * faults)


if __name__ == "__main__":
    if sys.argv[1:2] == ["kills"]:
        sys.exit(kills(int((sys.argv[2:] or ["100000"])[0])))
    main("waiting", __doc__, run)
