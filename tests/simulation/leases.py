"""A simulation of leases: many processes take chunks from one store, over a network that delays and loses messages.

The code under test is the gate of the library, on the pure algorithms. Time, network and processes are simulated, and follow
from a seed. Clocks of processes drift; processes pause, are killed and start again. Each admission is checked at once
against the promise of its rule: what was admitted must fit into the limit, whichever process admitted it.

`python -m tests.simulation.leases --decisions 100000000` makes a long run.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from headgate import calendar, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.errors import StoreTimeout
from headgate.leases._async.gate import AsyncLeasedGate
from headgate.leases.chunks import DRIFT, ChunkBook
from headgate.rules import Rule, leased
from headgate.stores.base import Answer, AsyncGate, Costs, Gate, Key, Receipts
from headgate.stores.request import Request
from headgate.testing.reference import ReferenceStore

SECOND = 1_000_000_000  # nanoseconds
START = 1_800_000_000 * SECOND
PERIOD_US = 60_000_000
KINDS: dict[str, Callable[[str], Rule]] = {
    "sliding_window": sliding_window,
    "sliding_log": sliding_log,
    "fixed_window": fixed_window,
    "token_bucket": token_bucket,
    "calendar": lambda quota: calendar(quota.replace("minute", "day"), timezone="UTC"),
}


class TooMany(AssertionError):
    """More units were admitted than the limit."""


class Pause:
    """Suspends a simulated coroutine for some nanoseconds."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


class Judge:
    """Checks admissions of one key, in the order of their times, against the limit of a rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.limit = rule.quota.limit
        self.period = rule.quota.period_us * 1000
        self.units = 0
        self.total = 0
        self._admitted: deque[tuple[int, int]] = deque()
        self._window = 0
        self._level, self._at = 0, 0

    def admit(self, now: int, cost: int) -> None:
        """Count an admission; raise TooMany if it breaks the promise of the rule."""
        self.total += cost
        if self.rule.kind in ("fixed_window", "calendar"):
            if now // self.period != self._window:
                self._window, self.units = now // self.period, 0
            self.units += cost
        elif self.rule.kind == "token_bucket":  # the level, in units times the period
            self._level = max(0, self._level - (now - self._at) * self.limit) + cost * self.period
            self._at, self.units = now, -(self._level // -self.period)
        else:
            while self._admitted and self._admitted[0][0] <= now - self.period:
                self.units -= self._admitted.popleft()[1]
            self._admitted.append((now, cost))
            self.units += cost
        if self.units > self.limit:
            raise TooMany(f"{self.units} units of {self.rule} were admitted at {now}")


@dataclass(slots=True)
class Process:
    """A process with its clock and its gate."""

    number: int
    gate: AsyncLeasedGate
    book: ChunkBook
    rate: float
    is_alive: bool = True
    paused_until: int = 0
    speed: int = 0
    """Difference of its clock to the store's, in parts per million."""


@dataclass(slots=True)
class Figures:
    """Counts of a run."""

    decisions: int = 0
    leased: int = 0
    refused: int = 0
    early: int = 0
    """Refusals while less than 95 % of the limit was admitted."""
    calls: int = 0
    """Calls to the store."""
    faults: int = 0


class Simulation:
    """Processes that share one key of one limiter.

    Args:
        seed: The seed of all choices.
        rule: The rule, without a lease.
        lease_us: The lease.
        processes: The number of processes.
        load: Demand of all processes, as a share of the limit.
        has_faults: Whether messages are lost, and processes are paused and killed.
        book: The class of the chunk books.
        gate: The class of the gates.
    """

    def __init__(
        self,
        seed: int,
        rule: Rule,
        lease_us: int,
        processes: int,
        load: float,
        *,
        has_faults: bool = True,
        book: type[ChunkBook] = ChunkBook,
        gate: type[AsyncLeasedGate] = AsyncLeasedGate,
    ) -> None:
        self.random = Random(seed)
        edge = rule.quota.period_us * 1000 * (START // (rule.quota.period_us * 1000) + 1)
        self.now = edge - self.random.randrange(60 * SECOND)
        self.rule = leased((rule,), lease_us)[0]
        self.judge = Judge(rule)
        self.figures = Figures()
        self.has_faults = has_faults
        self._types = book, gate
        self._store: Gate = ReferenceStore().bind("simulated", (self.rule,))
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()
        shares = [self.random.uniform(0.2, 1) ** 3 for _ in range(processes)]  # uneven
        per_second = load * rule.quota.limit * 1e6 / min(PERIOD_US, rule.quota.period_us)
        self._tide = 1.0
        for share in shares:
            self._start(per_second * share / sum(shares))
        if has_faults:
            self._turn_tide()

    def forget_allowance(self) -> None:
        """Let the store decide as if no time passed between charging and admitting: a bug to be found."""
        self._store = ReferenceStore().bind("simulated", leased((self.rule,), 0))

    def run(self, seconds: float, decisions: int) -> Figures:
        """Run for some simulated seconds, or up to a number of decisions."""
        end = self.now + int(seconds * SECOND)
        while self._events and self.now < end and self.figures.decisions < decisions:
            self.now, _, event = heappop(self._events)
            event()
        return self.figures

    def call_store(self, request: Request) -> Answer:
        """Decide a request in the store, at the present time."""
        answer = self._store.decide(request.at(self.now // 1000))
        if request.operation == "hit" and answer[0].allowed:
            self.judge.admit(self.now, request.cost)
        return answer

    def refund(self, receipts: Receipts, cost: Costs) -> None:
        """Return units to the store, at the present time."""
        self._store.refund(receipts, cost, self.now // 1000)

    def later(self, length: int, event: Callable[[], None]) -> None:
        """Schedule an event."""
        heappush(self._events, (self.now + length, next(self._numbers), event))

    def travel_time(self) -> int:
        """Return the time of one message; few take long."""
        slow = self.has_faults and self.random.random() < 0.05
        return int(self.random.expovariate(1) * SECOND * (0.5 if slow else 0.0005)) + 1

    def _turn_tide(self) -> None:
        """Change the demand of all processes, so that the limit is reached now and then."""
        self._tide = self.random.choice((0.02, 0.5, 1, 4))
        self.later(self.random.randrange(1, 40) * SECOND, self._turn_tide)

    # --- processes ---------------------------------------------------------------------------------------------------

    def _start(self, rate: float) -> None:
        make_book, make_gate = self._types
        speed = self.random.randint(-900_000 // DRIFT, 900_000 // DRIFT) if self.has_faults else 0
        offset = self.random.randrange(10**15)
        book = make_book((self.rule,), lambda: offset + self.now + (self.now - START) * speed // 1_000_000)
        gate = make_gate(SimulatedGate(self, process := Process(0, None, book, rate)), book)  # type: ignore[arg-type]
        process.number, process.gate = next(self._numbers), gate
        gate._call_later = lambda seconds, method, *args: self._resume_later(  # type: ignore[method-assign]
            process, int(seconds * SECOND), lambda: self._drive(process, method(*args))
        )
        self._act(process)

    def _act(self, process: Process) -> None:
        """Make a burst of hits, and schedule the next one."""
        if not process.is_alive:
            return
        size = 1 + int(self.random.expovariate(1) * max(1.0, process.rate / 50))
        if self.has_faults and self.random.random() < 0.005:
            self._disturb(process)
        else:
            self._hit(process, size)
        gap = size / (process.rate * self._tide) * self.random.expovariate(1)
        self._resume_later(process, int(gap * SECOND), lambda: self._act(process))

    def _hit(self, process: Process, size: int) -> None:
        figures = self.figures
        request = Request("hit", "key", 1)
        for _ in range(size):
            figures.decisions += 1
            self._drive(process, process.gate.decide(request), self._count)

    def _count(self, answer: Answer) -> None:
        """Count the answer to a hit; a hit that the store decided was judged there."""
        decision = answer[0]
        if decision.leased:
            self.figures.leased += 1
            self.judge.admit(self.now, 1)
        elif not decision.allowed:
            self.figures.refused += 1
            self.figures.early += self.judge.units < 0.95 * self.judge.limit

    def _disturb(self, process: Process) -> None:
        self.figures.faults += 1
        if self.random.random() < 0.5:
            process.paused_until = self.now + int(self.random.expovariate(1) * SECOND)
        else:
            process.is_alive = False
            self._start(process.rate)

    def _resume_later(self, process: Process, length: int, work: Callable[[], None]) -> None:
        """Call work after some time, unless the process is killed; later if it is paused."""

        def resume() -> None:
            if not process.is_alive:
                return
            if self.now < process.paused_until:
                self.later(process.paused_until - self.now, resume)
            else:
                work()

        self.later(length, resume)

    def _drive(self, process: Process, work: Any, done: Callable[[Any], None] = lambda _: None) -> None:
        """Run a coroutine of a process up to its next pause, and continue it afterwards."""
        try:
            pause: Pause = work.send(None)
        except StopIteration as end:
            done(end.value)
        except StoreTimeout:
            return
        else:
            self._resume_later(process, pause.length, lambda: self._drive(process, work, done))


class SimulatedGate(AsyncGate):
    """A gate over the simulated network."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        self._simulation = simulation
        self._process = process

    async def decide(self, request: Request) -> Answer:
        simulation = self._simulation
        await self._travel()
        simulation.figures.calls += 1
        answer = simulation.call_store(request)
        await self._travel()
        return answer

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._travel()
        self._simulation.figures.calls += 1
        self._simulation.refund(receipts, cost)

    async def reset(self, key: Key | None) -> None:
        raise NotImplementedError

    async def _travel(self) -> None:
        simulation = self._simulation
        await Pause(simulation.travel_time())
        if simulation.has_faults and simulation.random.random() < 0.005:
            simulation.figures.faults += 1
            await Pause(SECOND)
            raise StoreTimeout("the message was lost")


def simulate(seed: int, decisions: int, **types: Any) -> Figures:
    """Run one random simulation with faults.

    Raises:
        TooMany: A promise was broken.
    """
    random = Random(seed)
    kind = random.choice(list(KINDS))
    limit = random.choice((500, 900) if kind == "sliding_log" else (600, 6_000, 60_000, 1_000_000))
    period, lease_us = ("minute", random.choice((500_000, 1_000_000, 3_000_000)))
    rule = KINDS[kind](f"{limit}/{period}")
    simulation = Simulation(
        seed, rule, lease_us, random.choice((1, 2, 4, 16)), random.choice((0.5, 0.9, 1.1, 3.0)), **types
    )
    return simulation.run(600, decisions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate leases with faults.")
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--runs", type=int, default=0, help="the number of runs; 0: as many as the decisions need"
    )
    options = parser.parse_args()
    totals, start, runs = Figures(), time.process_time(), 0
    for seed in count(options.seed):
        if totals.decisions >= options.decisions or (options.runs and runs == options.runs):
            break
        try:
            found = simulate(seed, 2_000_000)
        except TooMany as error:
            raise SystemExit(f"seed {seed}: {error}") from error
        runs += 1
        for name in ("decisions", "leased", "refused", "calls", "faults"):
            setattr(totals, name, getattr(totals, name) + getattr(found, name))
        print(f"seed {seed}: {totals}", flush=True)
    print(f"{runs} runs, {time.process_time() - start:.0f} s of CPU time, no promise broken: {totals}")


if __name__ == "__main__":
    main()
