"""One round: workers call a store under faults, then the checker verifies every call."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.checker import Violation, check
from tests.faults.history import History, HistoryCall, Pause
from tests.faults.recording import read_file
from tests.faults.stores import StoreUnderTest, now_us, sleep_randomly
from tests.faults.traffic import subjects
from tests.faults.worker import WorkerConfig

ROOT = Path(__file__).resolve().parent.parent.parent

BUSY_US = 20_000_000
"""Maximum delay of a call beyond its deadline on a busy machine."""

RELEASED_WITHIN_US = 700_000
"""Time within which a cancelled hold must be released, in the absence of faults."""

WORKER_TIMEOUT = 300.0
"""Seconds after which a worker counts as hanging."""

STEP_US = 1000
"""A round is not checked if the machine's clock was changed by more than this during the round."""

POLICIES = (*("raise",) * 5, "closed", "open", "local")


@dataclass
class Outcome:
    """The result of a round.

    Attributes:
        history: The history of all calls.
        violations: Violations found by the checker.
        faults: Number of times each fault was injected.
        failures: Messages about workers that hung or ended with an error.
        errors: Store errors seen by workers, by type.
        is_judged: Whether the history was checked; false if the machine's clock was changed.
    """

    history: History
    violations: list[Violation]
    faults: Counter[str]
    failures: list[str]
    errors: Counter[str]
    is_judged: bool = True


@dataclass
class RunningWorker:
    """A worker's process, and the path of its files."""

    number: int
    process: subprocess.Popen[bytes]
    path: Path

    def read_tail(self, stream: str) -> str:
        """Return the last 3000 characters of an output file, `.out` or `.err`."""
        return self.path.with_suffix(stream).read_text()[-3000:]


@dataclass
class Round:
    """A round on one store.

    Attributes:
        store: The store.
        seed: Seed of all random choices.
        calls: Number of calls per worker.
        seconds: Maximum duration of the round.
        workers: Number of worker processes.
        calm: Whether to inject no faults.
        burst: Maximum number of hits in a burst.
        gap: Maximum seconds between two faults.
        deadline: Deadline of calls to a remote store, in seconds; a busy machine needs a long one.
    """

    store: StoreUnderTest
    seed: int
    calls: int = 10_000
    seconds: float = 15.0
    workers: int = 3
    calm: bool = False
    burst: int = 1
    gap: float = 1.0
    deadline: float | None = None
    _pauses: list[Pause] = field(default_factory=list)
    _killed: set[int] = field(default_factory=set)
    _disturbed: list[tuple[int, int]] = field(default_factory=list)
    _faults: Counter[str] = field(default_factory=Counter)

    def run(self) -> Outcome:
        """Run workers under faults, then check their history."""
        self._random = random.Random(self.seed)
        self.store.losses.clear()
        offset = time.time_ns() - time.monotonic_ns()
        with tempfile.TemporaryDirectory(prefix="headgate-faults-") as folder:
            self._folder = Path(folder)
            self._all: list[RunningWorker] = []
            self._over = self._folder / "over"
            for _ in range(self.workers):
                self._start_worker()
            try:
                # Measure the time from when all workers run: a busy machine takes long to start processes.
                while self._running() and not all(worker.path.exists() for worker in self._all):
                    time.sleep(0.05)
                self._due = time.monotonic() + self.seconds
                while self._running() and time.monotonic() < self._due:
                    sleep_randomly(self._random, 0.1, self.gap)
                    if not self.calm:
                        self._do_a_fault()
                self._over.touch()
                failures = self._await_workers()
            finally:
                for worker in self._running():
                    os.kill(worker.process.pid, signal.SIGKILL)
                    worker.process.wait()
            errors = self._collect(failures)
            history = self._history()
        stepped = abs(time.time_ns() - time.monotonic_ns() - offset) // 1000 > STEP_US
        violations = [] if stepped else self._check(history)
        return Outcome(history, violations, self._faults, failures, errors, not stepped)

    def _check(self, history: History) -> list[Violation]:
        if self.store.shared:
            return check(history)
        by_worker: dict[int, list[HistoryCall]] = defaultdict(list)
        for call in history.calls:
            by_worker[call.worker].append(call)
        return [found for calls in by_worker.values() for found in check(history.with_calls(calls))]

    def _running(self) -> list[RunningWorker]:
        return [worker for worker in self._all if worker.process.poll() is None]

    def _start_worker(self) -> None:
        store, rng, number = self.store, self._random, len(self._all)
        path = self._folder / str(number)
        # Only tasks make the hits of a burst concurrently, so with bursts most workers run tasks.
        burst = min(self.burst, store.most_at_once)
        is_tasks = number % 4 != 2 if burst > 1 else number % 2 == 1
        config = WorkerConfig(
            url=rng.choice(store.urls) if number else store.urls[0],
            history=str(path),
            seed=rng.randrange(2**31),
            scale=store.scale,
            tasks=is_tasks,
            actors=rng.choice((3, 8)) if is_tasks else rng.choice((2, 4)),
            calls=self.calls,
            over=str(self._over),
            burst=burst,
            deadline=self.deadline,
            options=store.options,
            policy=rng.choice(POLICIES),
            skew_us=rng.choice((0, 10**6, -(10**6), 10**10)) if store.skewed else 0,
            quotas=store.quotas,
            interrupts=number % 4 == 2,
            full_disk=store.full_disk and not self.calm and number % 3 == 0,
        )
        command = [sys.executable, "-m", "tests.faults.worker", json.dumps(asdict(config))]
        with path.with_suffix(".out").open("w") as out, path.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)
        self._all.append(RunningWorker(number, process, path))

    def _do_a_fault(self) -> None:
        rng, began = self._random, now_us()
        choice = rng.choice(["kill a worker", "stop a worker", *self.store.faults])
        workers = self._running()
        if choice == "kill a worker":
            # Killing a worker before its first call tests nothing, and processes take long to start.
            victims = [worker for worker in workers if worker.path.exists()]
            if not victims or rng.random() < 0.5:
                return
            victim = rng.choice(victims)
            self._killed.add(victim.number)
            victim.process.kill()
            victim.process.wait()
            if self._due - time.monotonic() > 2:
                self._start_worker()
        elif choice == "stop a worker":
            if not workers:
                return
            self._stop(rng.choice(workers))
        else:
            self.store.faults[choice](rng)
        self._faults[choice] += 1
        self._disturbed.append((began, now_us()))

    def _stop(self, worker: RunningWorker) -> None:
        began = now_us()
        os.kill(worker.process.pid, signal.SIGSTOP)
        sleep_randomly(self._random, 0.05, 1.2)
        os.kill(worker.process.pid, signal.SIGCONT)
        self._pauses.append(Pause(worker.number, began, now_us()))

    def _await_workers(self) -> list[str]:
        """Wait until all workers end, and return messages about those still running after the time-out."""
        hanging = []
        for worker in self._all:
            try:
                worker.process.wait(WORKER_TIMEOUT)
            except subprocess.TimeoutExpired:
                worker.process.send_signal(signal.SIGUSR1)
                time.sleep(1)  # the worker prints its stacks, and does not report when it is done
                hanging.append(f"worker {worker.number} hangs: {worker.read_tail('.err')}")
        return hanging

    def _collect(self, failures: list[str]) -> Counter[str]:
        """Append the output of failed workers to `failures`, and return the store errors that workers counted."""
        errors: Counter[str] = Counter()
        for worker in self._all:
            if worker.process.returncode == 0:
                errors.update(json.loads(worker.read_tail(".out")))
            elif worker.number not in self._killed:
                failures.append(f"worker {worker.number}: {worker.read_tail('.err')}")
        return errors

    def _history(self) -> History:
        store = self.store
        limiters = {name: subject.specs() for name, subject in subjects(store.scale).items()}
        calls: list[HistoryCall] = []
        for worker in self._all:
            if worker.path.exists():
                calls += read_file(worker.path, worker.number)
        notes: dict[str, Any] = {"store": store.name, "seed": self.seed, "faults": dict(self._faults)}
        return History(
            limiters,
            calls,
            losses=list(store.losses),
            pauses=self._pauses,
            killed=self._killed,
            faults=self._disturbed,
            slack_us=store.slack_us,
            longest_us=max(store.deadline_us, round(1e6 * (self.deadline or 0))) + BUSY_US,
            released_within_us=RELEASED_WITHIN_US,
            notes=notes,
        )
