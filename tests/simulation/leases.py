"""A simulation of leases: many processes take chunks from one store, over a network that delays and loses messages.

The code under test is the library's gate, on the pure algorithms. Time, network and processes are simulated and determined
by a seed. Clocks of processes drift; processes pause, are killed and restart; keys are reset, and tiers with different
limits alternate. Each admission is immediately checked against the promise of its rule: the units admitted by all processes
must not exceed the limit. Two documented cases have other bounds: after a reset, units granted to other processes before
the reset may be admitted in addition; after a change to a lower limit, the higher limit applies for one more lease.

Hits of a process come in bursts. The hits of a burst that fit into the open chunk are taken from it in one step: they
happen at the same instant, so the effect is the same as for single hits.

`python -m tests.simulation.leases --decisions 100000000` makes a long run; `--scale` prints the figures of docs/scale.md.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from headgate import calendar, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.errors import StoreTimeout
from headgate.keys import key_picker
from headgate.leases._async.gate import AsyncLeasedGate
from headgate.leases.chunks import DRIFT, ChunkBook
from headgate.quota import Quota
from headgate.rules import Rule, leased
from headgate.stores.base import Answer, AsyncGate, Costs, Gate, Key, Receipts
from headgate.stores.request import Request
from headgate.testing.reference import ReferenceStore

SECOND = 1_000_000_000  # nanoseconds
START = 1_800_000_000 * SECOND
PERIOD_US = 60_000_000
TASKS = 8
"""The number of hits of a burst that a process sends to the store concurrently."""
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
        self._excused: list[tuple[int, int]] = []
        self._admitted: deque[tuple[int, int]] = deque()
        self._window = 0
        self._level, self._at = 0, 0

    def admit(self, now: int, cost: int) -> None:
        """Count admissions; raise TooMany if they break the promise of the rule."""
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
            self._excused = [(end, units) for end, units in self._excused if now < end]
            if self.units > self.limit + sum(units for _, units in self._excused):
                raise TooMany(f"{self.units} units of {self.rule} were admitted at {now}")

    def reset(self, now: int, granted: int) -> None:
        """Forget all admissions; `granted` units may be admitted in addition."""
        self._admitted.clear()
        self.units = self._level = 0
        self._excused.append((now + 2 * self.period, granted))


@dataclass(slots=True)
class Process:
    """A process with its clock and its gate."""

    number: int
    gate: AsyncLeasedGate
    book: ChunkBook
    rate: float
    is_alive: bool = True
    paused_until: int = 0
    refused_at: int = -1
    local: int = 0
    """Number of hits decided locally since the last hit decided by the store."""


@dataclass(slots=True)
class Figures:
    """Counts of a run."""

    decisions: int = 0
    leased: int = 0
    refused: int = 0
    calls: int = 0
    """Calls to the store."""
    faults: int = 0
    resets: int = 0


class Simulation:
    """Processes that share the keys of one limiter.

    Args:
        seed: The seed of all choices.
        rules: The rules, without a lease. If they have scopes, those are `user` and `"*"`.
        lease_us: The lease.
        processes: The number of processes.
        load: Demand of all processes, as a share of the limit.
        has_faults: Whether messages are lost, processes are paused and killed, and keys are reset.
        burst: The mean time between two bursts of hits of a process, in seconds.
        book: The class of the chunk books.
        gate: The class of the gates.
    """

    def __init__(
        self,
        seed: int,
        rules: Rule | tuple[Rule, ...],
        lease_us: int,
        processes: int,
        load: float,
        *,
        has_faults: bool = True,
        burst: float = 0.02,
        book: type[ChunkBook] = ChunkBook,
        gate: type[AsyncLeasedGate] = AsyncLeasedGate,
    ) -> None:
        self.random = Random(seed)
        rules = rules if isinstance(rules, tuple) else (rules,)
        quota = rules[0].quota
        edge = quota.period_us * 1000 * (START // (quota.period_us * 1000) + 1)
        self.now = edge - self.random.randrange(60 * SECOND)
        self.rules = leased(rules, lease_us)
        self.keys: list[Key] = ["key"] if rules[0].scope is None else [{"user": "a"}, {"user": "b"}]
        self.tier: str | None = None
        self.lease = lease_us * 1000
        self.judges: dict[tuple[Rule, object], Judge] = {}
        self.figures = Figures()
        self.has_faults = has_faults
        self.burst = burst
        self._pick = key_picker(rules)
        self._types = book, gate
        self._store: Gate = ReferenceStore().bind("simulated", self.rules)
        self._granted: deque[tuple[int, Process, int]] = deque()
        self._high_until = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()
        shares = [self.random.uniform(0.2, 1) ** 3 for _ in range(processes)]  # uneven
        self.per_second = load * quota.limit * 1e6 / min(PERIOD_US, quota.period_us)
        self._demand = 1.0
        for share in shares:
            self.start(self.per_second * share / sum(shares))
        if has_faults:
            self._change_demand()
            if quota.limit != min(rule.quota_for("low").limit for rule in rules):
                self._change_tier()

    def forget_allowance(self) -> None:
        """Seed a bug: the store decides as if no time passed between charging and admitting."""
        self._store = ReferenceStore().bind("simulated", leased(self.rules, 0))

    def run(self, seconds: float, decisions: int) -> Figures:
        """Run for some simulated seconds, or up to a number of decisions."""
        end = self.now + int(seconds * SECOND)
        while self._events and self.now < end and self.figures.decisions < decisions:
            self.now, _, event = heappop(self._events)
            event()
        return self.figures

    def call_store(self, process: Process, request: Request) -> Answer:
        """Decide a request in the store, at the current time."""
        answer = self._store.decide(request.at(self.now // 1000))
        if answer[0].allowed:
            if request.tier is None:
                self._high_until = self.now + self.lease
            if request.operation == "hit":
                self.admit(request.key, request.cost)
            else:
                self._granted.append((self.now, process, request.cost))
                while self._granted[0][0] < self.now - self.lease:
                    self._granted.popleft()
        return answer

    def admit(self, key: Key | None, units: int) -> None:
        """Check admissions of a key, at the current time."""
        tier = None if self.now <= self._high_until else self.tier
        for rule, part in zip(self.rules, self._pick(key), strict=True):
            judge = self.judges.get((rule, part))
            if judge is None:
                judge = self.judges[rule, part] = Judge(rule)
            judge.limit = rule.quota_for(tier).limit
            judge.admit(self.now, units)

    def reset(self, process: Process, key: Key | None) -> None:
        """Reset a key in the store. Only chunks of other processes stay open."""
        self._store.reset(key)
        self.figures.resets += 1
        recent = [
            units
            for at, holder, units in self._granted
            if at > self.now - self.lease and holder is not process
        ]
        for rule, part in zip(self.rules, self._pick(key), strict=True):
            if (judge := self.judges.get((rule, part))) is not None:
                judge.reset(self.now, sum(recent))

    def refund(self, receipts: Receipts, cost: Costs) -> None:
        """Return units to the store, at the current time."""
        self._store.refund(receipts, cost, self.now // 1000)

    def later(self, length: int, event: Callable[[], None]) -> None:
        """Schedule an event."""
        heappush(self._events, (self.now + length, next(self._numbers), event))

    def travel_time(self) -> int:
        """Return the random latency of one message in nanoseconds."""
        slow = self.has_faults and self.random.random() < 0.05
        return int(self.random.expovariate(1) * SECOND * (0.5 if slow else 0.0005)) + 1

    def _change_demand(self) -> None:
        """Change the demand of all processes now and later, so that they sometimes reach the limit."""
        self._demand = self.random.choice((0.02, 0.5, 1, 4))
        self.later(self.random.randrange(1, 40) * SECOND, self._change_demand)

    def _change_tier(self) -> None:
        """Switch all callers to the other tier, now and later."""
        self.tier = "low" if self.tier is None else None
        self.later(self.random.randrange(5, 60) * SECOND, self._change_tier)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, rate: float) -> Process:
        """Start a process with a number of hits per second."""
        make_book, make_gate = self._types
        speed = self.random.randint(-900_000 // DRIFT, 900_000 // DRIFT) if self.has_faults else 0
        offset = self.random.randrange(10**15)
        book = make_book(self.rules, lambda: offset + self.now + (self.now - START) * speed // 1_000_000)
        gate = make_gate(SimulatedGate(self, process := Process(0, None, book, rate)), book)  # type: ignore[arg-type]
        process.number, process.gate = next(self._numbers), gate
        gate._call_later = lambda seconds, method, *args: self._resume_later(  # type: ignore[method-assign]
            process, int(seconds * SECOND), lambda: self._drive(process, method(*args))
        )
        self._act(process)
        return process

    def _act(self, process: Process) -> None:
        """Make a burst of hits, and schedule the next one."""
        if not process.is_alive:
            return
        size = 1 + int(self.random.expovariate(1) * max(1.0, process.rate * self.burst))
        if self.has_faults and self.random.random() < 0.005:
            self._disturb(process)
        else:
            self._hit(process, self.random.choice(self.keys), size)
        gap = size / (process.rate * self._demand) * self.random.expovariate(1)
        self._resume_later(process, int(gap * SECOND), lambda: self._act(process))

    def _hit(self, process: Process, key: Key, size: int) -> None:
        """Make hits: in one step from the open chunk, then `TASKS` at a time through the store."""
        figures = self.figures
        request = Request("hit", key, 1, self.tier)
        identity = process.book.identity_of(request)
        assert identity is not None
        units = size
        while size and units:
            units = min(units, size)
            if process.book.take(identity, units) is None:
                units //= 2
                continue
            figures.decisions += units
            figures.leased += units
            process.local += units
            size -= units
            self.admit(key, units)
        for _ in range(min(size, TASKS)):
            figures.decisions += 1
            process.local = 0
            self._drive(
                process, process.gate.decide(request), lambda answer: self._count(process, key, answer)
            )
        if size > TASKS:
            since = self.now

            def continue_burst() -> None:
                if process.refused_at < since:  # refused callers do not retry at once
                    self._hit(process, key, size - TASKS)

            self._resume_later(process, 2 * SECOND // 1000, continue_burst)

    def _count(self, process: Process, key: Key, answer: Answer) -> None:
        """Count the answer to a hit, and check local admissions; `call_store` has checked those of the store."""
        decision = answer[0]
        if decision.leased:
            self.figures.leased += 1
            self.admit(key, 1)
        elif not decision.allowed:
            self.figures.refused += 1
            process.refused_at = self.now

    def _disturb(self, process: Process) -> None:
        self.figures.faults += 1
        fault = self.random.random()
        if fault < 0.5:
            process.paused_until = self.now + int(self.random.expovariate(1) * SECOND)
        elif fault < 0.98:
            process.is_alive = False
            self.start(process.rate)
        else:
            self._drive(process, process.gate.reset(self.random.choice(self.keys)))

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
        answer = simulation.call_store(self._process, request)
        await self._travel()
        return answer

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._travel()
        self._simulation.figures.calls += 1
        self._simulation.refund(receipts, cost)

    async def reset(self, key: Key | None) -> None:
        await self._travel()
        self._simulation.reset(self._process, key)
        await self._travel()

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
    limit = random.choice(
        (500, 900) if kind == "sliding_log" else (600, 6_000, 60_000, 1_000_000, 30_000_000)
    )
    rules: tuple[Rule, ...] = (KINDS[kind](f"{limit}/minute"),)
    if random.random() < 0.3:
        rules = replace(rules[0], scope="user"), sliding_window(f"{limit * 3 // 2}/minute", scope="*")
    elif random.random() < 0.4 and kind != "token_bucket":
        rules = (replace(rules[0], tiers={"low": Quota(limit // 2, rules[0].quota.period_us)}),)
    lease_us = random.choice((500_000, 1_000_000, 3_000_000))
    simulation = Simulation(
        seed, rules, lease_us, random.choice((1, 2, 4, 16)), random.choice((0.5, 0.9, 1.1, 3.0)), **types
    )
    return simulation.run(600, decisions)


def scale_figures(processes: int) -> tuple[float, float, float]:
    """Simulate processes that make 10,000 hits a second each, unevenly, at 90 % of the limit and without faults.

    Returns store calls per decision, refusals as a share of the decisions, and the seconds after which a process with new
    demand has decided its last 1,000 hits locally.
    """
    period = 20
    rule = sliding_window(f"{processes * 10_000 * period}/{period}s")
    simulation = Simulation(1, rule, SECOND // 1000, processes, 0.9, has_faults=False, burst=0.05)
    simulation.run(1.5 * period, 10**12)
    warm = replace(simulation.figures)
    figures = simulation.run(period, 10**12)
    decisions = figures.decisions - warm.decisions
    calls, refused = figures.calls - warm.calls, figures.refused - warm.refused
    since, new = simulation.now, simulation.start(10_000)
    while new.local < 1_000:
        simulation.run(0.001, 10**12)
    return calls / decisions, refused / decisions, (simulation.now - since) / SECOND


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate leases with faults.")
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--runs", type=int, default=0, help="the number of runs; 0: as many as the decisions need"
    )
    parser.add_argument("--scale", action="store_true", help="print figures for 1 to 1,000 processes")
    options = parser.parse_args()
    if options.scale:
        for processes in (1, 16, 100, 1000):
            calls, refused, wait = scale_figures(processes)
            print(
                f"{processes}: {calls:.6f} store calls, {refused:.4%} refused, {wait:.3f} s until local",
                flush=True,
            )
        return
    totals, start, runs = Figures(), time.process_time(), 0
    for seed in count(options.seed):
        if totals.decisions >= options.decisions or (options.runs and runs == options.runs):
            break
        try:
            found = simulate(seed, 20_000_000)
        except TooMany as error:
            raise SystemExit(f"seed {seed}: {error}") from error
        runs += 1
        for name in ("decisions", "leased", "refused", "calls", "faults", "resets"):
            setattr(totals, name, getattr(totals, name) + getattr(found, name))
        print(f"seed {seed}: {totals}", flush=True)
    print(f"{runs} runs, {time.process_time() - start:.0f} s of CPU time, no promise broken: {totals}")


if __name__ == "__main__":
    main()
