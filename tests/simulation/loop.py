"""An event loop with a virtual clock, for several simulated processes at once.

Every process has its own queue of callbacks and its own timers, and runs one *turn* at a time, like a real event loop: first
the connections with new data, in random order, then the timers that are due, then all ready callbacks, first in, first
out. Which process runs next is random. Nothing sleeps: if no process can run, the clock moves to the next event. All
randomness comes from one generator, so a seed replays exactly.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from random import Random
from typing import Any

from tests.simulation.timeline import HOST, Process, Stuck, Timeline

MOST_TURNS = 500_000
"""A run with more turns counts as stuck."""


class LoopProcess(Process):
    """A process with an event loop.

    Attributes:
        ready: Callbacks that are ready to run.
        timers: Callbacks by time.
        arrived: Callbacks of connections with new data.
        tasks: Tasks in progress when the process was killed, kept so that they are not garbage-collected.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.arrived: dict[Any, Callable[[], None]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    def wakes_at(self, now: float) -> float:
        """Return the time at which the process can run next."""
        if self.is_dead:
            return float("inf")
        while self.timers and self.timers[0][2].cancelled():
            heapq.heappop(self.timers)
        at = now if self.ready or self.arrived else self.timers[0][0] if self.timers else float("inf")
        return max(at, self.stopped_until)


class SimulatedLoop(Timeline, asyncio.BaseEventLoop):
    """The event loop of all processes.

    Attributes:
        connect: Opens a connection for `create_connection`; set by the network.
    """

    def __init__(self, rng: Random) -> None:
        asyncio.BaseEventLoop.__init__(self)
        self.processes: list[LoopProcess] = []
        self.connect: Callable[..., Any] | None = None
        self._turns = 0
        self._running: LoopProcess | None = None
        Timeline.__init__(self, rng)
        self.set_exception_handler(self._on_failure)

    def new_process(self) -> LoopProcess:
        """Add a process."""
        process = LoopProcess(self)
        self.processes.append(process)
        return process

    def current(self) -> Process:
        """Return the running process, also for background tasks without its context."""
        return HOST.get(self._running or self.world)

    def start(self, process: Process, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task in a process."""
        self.create_task(work(), context=process.context).add_done_callback(self._on_end)

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task outside of the simulated processes to its end."""
        self.run_until_complete(self.create_task(work(), context=self.world.context))

    async def sleep(self, seconds: float) -> None:
        """Suspend a task."""
        await asyncio.sleep(seconds)

    def wait(self, is_ready: Callable[[], bool], seconds: float) -> bool:
        """Block the caller like a thread, while all event loops continue."""
        due = self._now + seconds
        self.at(due, lambda: None)
        while not is_ready() and self._now < due:
            self._run_once()
        return is_ready()

    def kill(self, process: LoopProcess) -> None:
        """Kill a process; its callbacks never run again."""
        process.is_dead = True
        process.tasks = asyncio.all_tasks(self)

    def drop(self) -> None:
        """Discard pending callbacks and timers, and close the loop."""
        for process in self.processes:
            process.ready.clear()
            process.timers.clear()
        self.close()

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._process_of(context).ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._process_of(context).timers, (when, next(self._numbers), handle))
        return handle

    def _process_of(self, context: Context | None) -> Any:
        return self.current() if context is None else context.get(HOST, self.current())

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, events: Any) -> None:
        pass

    async def create_connection(
        self, factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        assert self.connect is not None
        return await self.connect(factory, port)

    def run_in_executor(self, executor: Any, work: Any, *args: Any) -> Any:
        """Run a function as if in another thread: all processes continue while it blocks."""
        future, process = self.create_future(), self.current()

        def run() -> None:
            try:
                result, error = process.context.copy().run(work, *args), None
            except Exception as cause:  # noqa: BLE001  # raised where the future is awaited
                result, error = None, cause
            if not future.done() and not process.is_dead:
                finish = (
                    partial(future.set_result, result)
                    if error is None
                    else partial(future.set_exception, error)
                )
                process.context.run(finish)

        self.after(self.rng.random() * 1e-4, run)
        return future

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        fd.reader = callback

    def remove_reader(self, fd: Any) -> None:
        fd.reader = None

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:
        raise AssertionError("a simulated connection accepts everything at once")

    def remove_writer(self, fd: Any) -> None:
        pass

    def _on_failure(self, _: object, about: dict[str, Any]) -> None:
        self.failures.append(f"{about.get('message')}: {about.get('exception')!r}")

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(f"a task ended with {error!r}")

    def _run_once(self) -> None:
        """Run due events, then one turn of one process; advance the clock if no process can run."""
        self._running = None
        following = self._run_events()
        wakes = [(process.wakes_at(self._now), process) for process in self.processes]
        able = [process for at, process in wakes if at <= self._now]
        if able:
            self._turn(able[0] if len(able) == 1 else self.rng.choice(able))
            return
        following = min(following, *(at for at, _ in wakes))
        if following == float("inf"):
            raise Stuck("no process can run, and no event is pending")
        self._now = max(self._now, following)

    def _turn(self, process: LoopProcess) -> None:
        self._turns += 1
        if self._turns > MOST_TURNS:
            raise Stuck(f"the run did not end within {MOST_TURNS} turns")
        self._running = process
        if process.arrived:
            arrived, process.arrived = list(process.arrived.values()), {}
            self.rng.shuffle(arrived)
            # As in a real loop, reading comes before due timers, and both come after ready callbacks.
            process.ready.extend(asyncio.Handle(read, (), self, process.context) for read in arrived)
        while process.timers and process.timers[0][0] <= self._now:
            timer = heapq.heappop(process.timers)[2]
            if not timer.cancelled():
                process.ready.append(timer)
        for _ in range(len(process.ready)):
            handle = process.ready.popleft()
            if not handle.cancelled():
                handle._run()
                self._now += 2e-6
            if process.stopped_until > self._now or process.is_dead:
                break  # blocked or killed in the middle of a turn
        self._now += self.rng.random() * 3e-5
