"""One round: workers call a store under faults, and then the checker explains every call."""

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
from tests.faults.places import Place, last, now_us
from tests.faults.recording import read_file
from tests.faults.traffic import subjects
from tests.faults.worker import Orders

ROOT = Path(__file__).resolve().parent.parent.parent

BUSY_US = 20_000_000
"""The most that a busy machine adds to a deadline."""

RELEASED_WITHIN_US = 700_000
"""A cancelled hold must be given back so soon, in the absence of faults."""

PATIENCE = 300.0
"""Seconds after which a worker counts as hanging."""

STEP_US = 1000
"""If the machine's clock was set by more than this during a round, times say nothing."""

POLICIES = (*("raise",) * 5, "closed", "open", "local")


@dataclass
class Outcome:
    """What came of a round.

    Attributes:
        history: All calls.
        violations: What cannot be explained.
        faults: How often each fault was done.
        failures: What workers said that ended with an error.
        errors: How often workers saw each error of a store.
        is_judged: Whether times could be relied on.
    """

    history: History
    violations: list[Violation]
    faults: Counter[str]
    failures: list[str]
    errors: Counter[str]
    is_judged: bool = True


@dataclass
class RunningWorker:
    """A worker's process, and where it writes."""

    number: int
    process: subprocess.Popen[bytes]
    path: Path

    def said(self, stream: str) -> str:
        """Return the end of its output."""
        return self.path.with_suffix(stream).read_text()[-3000:]


@dataclass
class Round:
    """A round on a place.

    Attributes:
        place: The store.
        seed: Of all random choices.
        calls: How many each worker makes.
        seconds: How long it may take at most.
        workers: How many processes.
        calm: Whether nothing is done to it.
        burst: How many hits are made at once at most.
        gap: Seconds between two faults at most.
        deadline: Of calls to a remote store, in seconds; a busy machine needs a long one.
    """

    place: Place
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
        """Hammer, break, and check."""
        self._random = random.Random(self.seed)
        self.place.losses.clear()
        offset = time.time_ns() - time.monotonic_ns()
        with tempfile.TemporaryDirectory(prefix="headgate-faults-") as folder:
            self._folder = Path(folder)
            self._all: list[RunningWorker] = []
            self._over = self._folder / "over"
            for _ in range(self.workers):
                self._start_worker()
            try:
                # A busy machine takes long to start processes; the time is that of their work.
                while self._running() and not all(worker.path.exists() for worker in self._all):
                    time.sleep(0.05)
                self._due = time.monotonic() + self.seconds
                while self._running() and time.monotonic() < self._due:
                    last(self._random, 0.1, self.gap)
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
        if self.place.shared:
            return check(history)
        by_worker: dict[int, list[HistoryCall]] = defaultdict(list)
        for call in history.calls:
            by_worker[call.worker].append(call)
        return [found for calls in by_worker.values() for found in check(history.with_calls(calls))]

    def _running(self) -> list[RunningWorker]:
        return [worker for worker in self._all if worker.process.poll() is None]

    def _start_worker(self) -> None:
        place, rng, number = self.place, self._random, len(self._all)
        path = self._folder / str(number)
        # Bursts are for tasks, which make them at once.
        burst = min(self.burst, place.most_at_once)
        is_tasks = number % 4 != 2 if burst > 1 else number % 2 == 1
        orders = Orders(
            url=rng.choice(place.urls) if number else place.urls[0],
            history=str(path),
            seed=rng.randrange(2**31),
            scale=place.scale,
            tasks=is_tasks,
            actors=rng.choice((3, 8)) if is_tasks else rng.choice((2, 4)),
            calls=self.calls,
            over=str(self._over),
            burst=burst,
            deadline=self.deadline,
            options=place.options,
            policy=rng.choice(POLICIES),
            skew_us=rng.choice((0, 10**6, -(10**6), 10**10)) if place.skewed else 0,
            quotas=place.quotas,
            interrupts=number % 4 == 2,
            full_disk=place.full_disk and not self.calm and number % 3 == 0,
        )
        command = [sys.executable, "-m", "tests.faults.worker", json.dumps(asdict(orders))]
        with path.with_suffix(".out").open("w") as out, path.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)
        self._all.append(RunningWorker(number, process, path))

    def _do_a_fault(self) -> None:
        rng, began = self._random, now_us()
        choice = rng.choice(["kill a worker", "stop a worker", *self.place.faults])
        workers = self._running()
        if choice == "kill a worker":
            # A worker without calls has no state to lose, and processes take long to start.
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
            self.place.faults[choice](rng)
        self._faults[choice] += 1
        self._disturbed.append((began, now_us()))

    def _stop(self, worker: RunningWorker) -> None:
        began = now_us()
        os.kill(worker.process.pid, signal.SIGSTOP)
        last(self._random, 0.05, 1.2)
        os.kill(worker.process.pid, signal.SIGCONT)
        self._pauses.append(Pause(worker.number, began, now_us()))

    def _await_workers(self) -> list[str]:
        """Wait for the ends of all workers, and return which of them hang."""
        hanging = []
        for worker in self._all:
            try:
                worker.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                worker.process.send_signal(signal.SIGUSR1)
                time.sleep(1)  # in which it writes where it hangs; it cannot say when it has
                hanging.append(f"worker {worker.number} hangs: {worker.said('.err')}")
        return hanging

    def _collect(self, failures: list[str]) -> Counter[str]:
        """Add what workers said that ended with an error, and return what errors of the store they met."""
        errors: Counter[str] = Counter()
        for worker in self._all:
            if worker.process.returncode == 0:
                errors.update(json.loads(worker.said(".out")))
            elif worker.number not in self._killed:
                failures.append(f"worker {worker.number}: {worker.said('.err')}")
        return errors

    def _history(self) -> History:
        place = self.place
        limiters = {name: subject.specs() for name, subject in subjects(place.scale).items()}
        calls: list[HistoryCall] = []
        for worker in self._all:
            if worker.path.exists():
                calls += read_file(worker.path, worker.number)
        notes: dict[str, Any] = {"store": place.name, "seed": self.seed, "faults": dict(self._faults)}
        return History(
            limiters,
            calls,
            losses=list(place.losses),
            pauses=self._pauses,
            killed=self._killed,
            faults=self._disturbed,
            slack_us=place.slack_us,
            longest_us=max(place.deadline_us, round(1e6 * (self.deadline or 0))) + BUSY_US,
            released_within_us=RELEASED_WITHIN_US,
            notes=notes,
        )
