"""Several processes that share a port, and the one that looks after them.

Workers are fresh processes rather than forks: what the parent has opened or imported is not theirs. They inherit the
listening socket, and the kernel hands each connection to one of them. A worker that ends by itself is replaced, and its
figures stay (`headgate_server.statistics`). Workers that end again and again, or cannot even start, end it all.

The parent passes SIGHUP on to every worker. Workers stop on SIGTERM, and when their standard input ends: that is how they
notice a parent that was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headgate import HeadgateError
from headgate.policy import Policy
from headgate_server.hosting import METRICS_FOLDER
from headgate_server.statistics import SharedFolder

logger = logging.getLogger("headgate.server")

READY = b"ready\n"
WORKER = ("-P", "-m", "headgate_server.worker")
"""Arguments of Python; -P keeps modules in the current folder from being imported."""

YOUNG_SECONDS = 5.0
"""A worker that ends sooner than this after its start ends for a reason that will not go away."""

MOST_YOUNG_DEATHS = 3
STOP_SECONDS = 20.0
"""How long workers may take to stop before they are killed."""


class WorkersFailed(HeadgateError):
    """The workers cannot be kept running; their own messages say why."""


def run_workers(config: Path, listener: socket.socket, number: int, started: Callable[[], None]) -> None:
    """Serve with several processes until SIGINT or SIGTERM.

    Args:
        config: The policy file.
        listener: Where to listen; it is closed at the end.
        number: How many.
        started: Called once all of them answer.

    Raises:
        WorkersFailed: One could not start, or they ended again and again.
    """
    # Figures may name keys, so the folder is for this user only; that is how mkdtemp makes it.
    with tempfile.TemporaryDirectory(prefix="headgate-", ignore_cleanup_errors=True) as folder:
        asyncio.run(Supervisor(config, listener, Path(folder)).run(number, started))


def private_limiters(policy: Policy) -> list[str]:
    """Return the names of the limiters that every process would count for itself."""
    return [name for name, limiter in policy.limiters.items() if _is_private(limiter.store)]


def _is_private(url: str) -> bool:
    return url.lower().startswith("memory:") or url.rstrip("/").endswith(":memory:")


class Supervisor:
    """Starts, replaces and stops workers."""

    def __init__(self, config: Path, listener: socket.socket, folder: Path) -> None:
        self._config = config
        self._listener = listener
        self._folder = folder
        self._processes: dict[str, Process] = {}
        self._ready: set[str] = set()
        self._is_stopping = False
        metrics = folder / "metrics"
        metrics.mkdir()
        self._environment = {**os.environ, METRICS_FOLDER: str(metrics)}
        self._metrics = metrics

    async def run(self, number: int, started: Callable[[], None]) -> None:
        """Keep so many workers running until a signal stops it."""
        stop = asyncio.Event()
        ready = [asyncio.Event() for _ in range(number)]
        with _signals(stop.set, self._hang_up):
            keeping = [asyncio.ensure_future(self._keep(slot, ready[slot])) for slot in range(number)]
            asking = asyncio.ensure_future(stop.wait())
            all_ready = asyncio.ensure_future(_all_set(ready))
            try:
                await _first(asking, all_ready, *keeping)
                if all_ready.done():
                    started()
                    await _first(asking, *keeping)
            finally:
                asking.cancel()
                all_ready.cancel()
                await self._stop()
                outcomes = await asyncio.gather(*keeping, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _keep(self, slot: int, ready: asyncio.Event) -> None:
        """Run one worker after another, until all are to stop."""
        loop = asyncio.get_running_loop()
        generation = young_deaths = 0
        while not self._is_stopping:
            name = f"{slot}-{generation}"
            generation += 1
            began = loop.time()
            code = await self._run_one(name, ready)
            if self._is_stopping:
                return
            if not ready.is_set():
                raise WorkersFailed(
                    f"a worker could not start (it ended with {_ending(code)}), so nothing was started"
                )
            young_deaths = young_deaths + 1 if loop.time() - began < YOUNG_SECONDS else 0
            if young_deaths == MOST_YOUNG_DEATHS:
                raise WorkersFailed(
                    f"workers end as soon as they start (the last one with {_ending(code)}), so everything was stopped"
                )
            logger.error("worker %s ended with %s; another one takes its place", name, _ending(code))

    async def _run_one(self, name: str, ready: asyncio.Event) -> int:
        """Run a worker to its end, and return its exit code."""
        arguments = [str(self._config), str(self._listener.fileno()), str(self._folder), name]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *WORKER,
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # Ctrl-C goes to the parent, which stops the workers
        )
        assert process.stdout is not None
        self._processes[name] = process
        try:
            if self._is_stopping:
                process.terminate()
            if await process.stdout.readline() == READY:
                self._ready.add(name)
                ready.set()
            return await process.wait()
        finally:
            self._processes.pop(name, None)
            self._ready.discard(name)
            # What it has counted stays; what it said about the present goes.
            SharedFolder.retire(self._folder, name)
            for gauge in self._metrics.glob(f"gauge_live*_{process.pid}.db"):
                gauge.unlink(missing_ok=True)

    def _hang_up(self) -> None:
        for name in self._ready:  # the others are about to read the file anyway, and would not survive it
            _signal(self._processes[name], signal.SIGHUP)

    async def _stop(self) -> None:
        self._is_stopping = True
        self._listener.close()  # so that no client waits at a port that is no longer served
        stopping = list(self._processes.values())
        for process in stopping:
            _signal(process, signal.SIGTERM)
        waiting = [asyncio.ensure_future(process.wait()) for process in stopping]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=STOP_SECONDS)
            if late:
                logger.error("%d workers did not stop within %g s and are killed", len(late), STOP_SECONDS)
        for process in stopping:
            _signal(process, signal.SIGKILL)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _all_set(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        process.send_signal(number)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@contextmanager
def _signals(stop: Callable[[], None], hang_up: Callable[[], None]) -> Iterator[None]:
    """Handle signals within a block."""
    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGHUP: hang_up}
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
