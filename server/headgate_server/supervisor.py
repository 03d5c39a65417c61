"""Several processes that share a port, and their supervisor: for the server and for the services.

Workers are new processes, not forks, so nothing that the parent has opened or imported is shared. They inherit the listening
socket, and the kernel gives each connection to one of them. A worker that ends is replaced. If workers cannot start, or
end repeatedly, everything stops.

The parent forwards SIGHUP to every worker. Workers stop on SIGTERM, and when their connection to the parent ends because
the parent was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headgate import ConfigError, HeadgateError
from headgate_server.hosting import METRICS_FOLDER
from headgate_server.worker import READY

__all__ = ["MAX_WORKERS", "WorkersFailed", "check_worker_number", "run_workers"]

logger = logging.getLogger("headgate.server")

WORKER = ("-P", "-m", "headgate_server.worker")
"""Arguments of Python; -P keeps modules in the current folder from being imported."""

MAX_WORKERS = 256
"""The largest number of workers."""

EARLY_SECONDS = 5.0
"""Seconds; a worker that ends sooner after its start will probably always do so."""

MAX_EARLY_ENDS = 3
STOP_SECONDS = 20.0
"""Seconds for workers to stop before they are killed."""


class WorkersFailed(HeadgateError):
    """The workers cannot be kept running; their own messages give the reason."""


def check_worker_number(workers: object) -> None:
    """Check the number of workers.

    Raises:
        ConfigError: It is not valid.
    """
    if type(workers) is not int or not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"workers is a whole number from 1 to {MAX_WORKERS}, not {workers!r}")


def run_workers(
    function: str,
    arguments: Sequence[str],
    listener: socket.socket,
    number: int,
    started: Callable[[], None],
    ended: Callable[[Path, str], None] = lambda folder, name: None,
) -> None:
    """Serve with several processes until SIGINT or SIGTERM.

    Args:
        function: The function that serves in each worker, as `package.module:function`. It is called with the `Worker`.
        arguments: More arguments of the function.
        listener: The listening socket; it is closed at the end.
        number: The number of workers.
        started: Called once all workers answer.
        ended: Called with the shared folder and the name of a terminated worker.

    Raises:
        WorkersFailed: A worker could not start, or workers ended repeatedly.
    """
    # Figures may contain keys; mkdtemp creates a folder for this user only.
    with tempfile.TemporaryDirectory(prefix="headgate-", ignore_cleanup_errors=True) as folder:
        supervisor = Supervisor((function, *arguments), listener, Path(folder), ended)
        asyncio.run(supervisor.run(number, started))


class Supervisor:
    """Starts, replaces and stops workers."""

    def __init__(
        self,
        call: Sequence[str],
        listener: socket.socket,
        folder: Path,
        ended: Callable[[Path, str], None],
    ) -> None:
        self._call = call
        self._listener = listener
        self._folder = folder
        self._ended = ended
        self._processes: dict[str, Process] = {}
        self._ready: set[str] = set()
        self._is_stopping = False
        metrics = folder / "metrics"
        metrics.mkdir()
        self._environment = {**os.environ, METRICS_FOLDER: str(metrics)}
        self._metrics = metrics

    async def run(self, number: int, started: Callable[[], None]) -> None:
        """Keep `number` workers running until a signal to stop."""
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
        """Run one worker after another, until all stop."""
        loop = asyncio.get_running_loop()
        generation = early_ends = 0
        while not self._is_stopping:
            name = f"{slot}-{generation}"
            generation += 1
            began = loop.time()
            code = await self._run_one(name, ready)
            if self._is_stopping:
                return
            if not ready.is_set():
                raise WorkersFailed(f"a worker could not start (it ended with {_ending(code)})")
            early_ends = early_ends + 1 if loop.time() - began < EARLY_SECONDS else 0
            if early_ends == MAX_EARLY_ENDS:
                raise WorkersFailed(f"workers end as soon as they start (the last one with {_ending(code)})")
            logger.error("worker %s ended with %s and is replaced", name, _ending(code))

    async def _run_one(self, name: str, ready: asyncio.Event) -> int:
        """Run a worker until it ends, and return its exit code."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        process = await self._start(name, theirs)
        self._processes[name] = process
        try:
            if self._is_stopping:
                process.terminate()
            if await reader.readline() == READY:
                self._ready.add(name)
                ready.set()
            return await process.wait()
        finally:
            writer.close()
            self._processes.pop(name, None)
            self._ready.discard(name)
            # Its counts remain, but its gauges are removed.
            self._ended(self._folder, name)
            for gauge in self._metrics.glob(f"gauge_live*_{process.pid}.db"):
                gauge.unlink(missing_ok=True)

    async def _start(self, name: str, parent: socket.socket) -> Process:
        function, *arguments = self._call
        descriptors = [self._listener.fileno(), parent.fileno()]
        with parent:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, *WORKER),
                *(function, *map(str, descriptors), str(self._folder), name, *arguments),
                stdin=DEVNULL,
                env=self._environment,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C goes to the parent, which stops the workers
            )

    def _hang_up(self) -> None:
        for name in self._ready:  # the others are about to read the file anyway
            _signal(self._processes[name], signal.SIGHUP)

    async def _stop(self) -> None:
        self._is_stopping = True
        self._listener.close()  # so that clients are refused instead of waiting
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
    with suppress(ProcessLookupError):  # it has ended
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
