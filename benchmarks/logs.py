"""CPU time of a hit on a full sliding log, by its length, in steady state: in each step one entry expires, one is admitted.

Time is faked, a millisecond per step. Our clock is a counter that moves on when it is read. limits reads its clock several
times in a call, so its clock is moved between calls, and by a trifle more, because an entry counts there for its period and
an instant. Its expired entries are dropped by a thread, which is not charged to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from benchmarks.contenders import HEADGATE, PLAIN, FakeTime, Rule, Task, limits
from benchmarks.harness import (
    Progress,
    Scale,
    Section,
    Target,
    each,
    interleave,
    notes,
    number,
    table,
    time_calls,
)
from benchmarks.plain import Here, There, check_compiled, check_plain

LENGTHS = (1_000, 10_000, 100_000)
STEP_NS = 1_000_000
EPOCH = 4_000_000_000.0
"""In the future: between two samples the thread of limits reads the real time, and must not find all entries expired."""
CONTENDERS = (HEADGATE, PLAIN, "limits")
STEPS = 1


class OurLog(Here):
    """Ours, with a clock that moves on a step whenever it is read."""

    def __init__(self, check: Callable[[], None], length: int, steps: int) -> None:
        from headgate import Limiter, sliding_log
        from headgate.clock import SteadyClock

        check()
        clock = SteadyClock(count(10**15, STEP_NS).__next__)
        self.hit = Limiter(sliding_log(f"{length}/{length}ms"), clock=clock).hit
        self.keys = ["user:0"] * steps
        time_calls(self.hit, ["user:0"] * (length + 1))
        decision = self.hit("user:0")
        if not decision or decision.remaining:
            raise RuntimeError(f"neither full nor in steady state: {decision}")

    def sample(self) -> float:
        """Return CPU nanoseconds per step."""
        return time_calls(self.hit, self.keys)


class TheirLog(Here):
    """limits' moving window."""

    def __init__(self, length: int, steps: int) -> None:
        self.clock, self.steps = FakeTime(EPOCH), steps
        self.hit = limits(Task((Rule("sliding_log", length, length // 1000),))).hit
        self.run(length + 1)
        with self.clock.patched():
            if self.hit("user:0"):  # the clock stands still
                raise RuntimeError("not full")

    def sample(self) -> float:
        """Return CPU nanoseconds per step."""
        return self.run(self.steps)

    def run(self, steps: int) -> float:
        """Return CPU nanoseconds per step, for so many steps."""
        hit, clock = self.hit, self.clock
        with clock.patched():
            start = time.thread_time_ns()
            for _ in range(steps):
                clock.seconds += 0.001_000_1
                hit("user:0")
            return (time.thread_time_ns() - start) / steps


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure all lengths, of all contenders, in turn."""
    progress.begin("a full sliding log in steady state")
    steps = scale.calls // 2
    makers: dict[str, Callable[[], Here]] = {}
    for length in LENGTHS:
        makers[_name(HEADGATE, length)] = partial(OurLog, check_compiled, length, steps)
        makers[_name(PLAIN, length)] = partial(
            There, _name(PLAIN, length), OurLog, check_plain, length, steps
        )
        makers[_name("limits", length)] = partial(TheirLog, length, steps // 10)
    logs = each(makers, lambda make: make())
    found = interleave(each(logs, lambda log: partial(log.ask, "sample")), 3 * scale.rounds, progress)
    growth = {
        name: found[_name(name, LENGTHS[-1])].times(found[_name(name, LENGTHS[0])]) for name in CONTENDERS
    }
    rows = [
        [name, *(found[_name(name, length)].cell for length in LENGTHS), number(growth[name], 2)]
        for name in CONTENDERS
    ]
    title = "A full sliding log in steady state: CPU ns per hit, median, by length"
    yield Section(
        "sliding log",
        tables=[
            table(title, ["", *(f"{length:,}" for length in LENGTHS), "last ÷ first"], rows),
            *notes([found]),
        ],
        data=dict(found),
        targets=[
            Target(f"sliding_log of {LENGTHS[-1]:,} ÷ {LENGTHS[0]:,}", 1.5, growth[name], True, name)
            for name in (HEADGATE, PLAIN)
        ],
    )


def _name(contender: str, length: int) -> str:
    return f"{contender}: {length:,}"
