"""Races of threads and processes for the same units."""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from headgate import Hold, Limiter, Rule
from headgate.testing.contract.base import Contract, each_kind

T = TypeVar("T")

SLOTS = 100
THREADS = 8
PROCESSES = 4
TRIES = 40
"""Attempts per racer; together they request far more than the limit."""

_LONGEST_WAIT = 120.0  # seconds; a race that takes longer has hung


class ThreadRaceTests(Contract):
    """Threads race for slots: exactly as many are admitted as there are slots.

    The clock stands still during a race, so that no units become free by time.
    """

    @each_kind
    def test_racing_threads_get_exactly_the_limit(self, kind: str) -> None:
        self.require("exact")
        limiter = self.limiter(self.rule(kind, SLOTS))
        with eager_switching():
            won = in_threads(THREADS, lambda number: wins(limiter, TRIES))
        assert sum(won) == SLOTS
        assert not limiter.check("a")

    def test_threads_racing_with_several_rules_get_exactly_the_limit(self) -> None:
        self.require("exact")
        self.require("all_or_nothing")
        rules = [self.rule(kind, SLOTS, scope="*", name=kind) for kind in self.kinds]
        limiter = self.limiter(*rules, self.rule(self.kinds[0], TRIES, scope="user", name="own"))

        def race(number: int) -> int:
            return sum(limiter.hit({"user": str(number)}).allowed for _ in range(TRIES))

        with eager_switching():
            won = in_threads(THREADS, race)
        assert sum(won) == SLOTS
        left = [limiter.check({"user": str(number)}, 0).results[-1].remaining for number in range(THREADS)]
        assert left == [TRIES - units for units in won]

    @each_kind
    def test_threads_racing_with_holds_never_exceed_the_limit(self, kind: str) -> None:
        self.require("exact")
        rule = self.rule(kind, SLOTS)
        limiter = self.limiter(rule)
        tally = RaceTally()
        with eager_switching():
            in_threads(THREADS, lambda number: hold_and_settle(limiter, tally, random.Random(number)))
        check_tally(limiter, rule, tally)

    def test_a_hold_settled_by_two_threads_is_returned_once(self) -> None:
        self.require("exact")
        for _ in range(20):
            limiter = self.limiter(self.rule(self.kinds[0], SLOTS))
            limiter.record("a", 50)
            hold = limiter.hold("a", 10)
            with eager_switching():
                in_threads(2, lambda number, hold=hold: hold.release())  # type: ignore[misc]
            assert limiter.check("a", 0).remaining == 50


class ProcessRaceTests(Contract):
    """Processes race for slots, if the store is shared between processes."""

    def test_racing_processes_get_exactly_the_limit(self) -> None:
        """Also through a store created before the processes were forked."""
        self.require("shared")
        rules = [self.rule(kind, SLOTS, name=kind) for kind in self.kinds]
        inherited = self.limiter(*rules)

        def race(number: int) -> int:
            if number % 2:
                return wins(inherited, TRIES)
            store = self.open_store()
            try:
                return wins(self.limiter(*rules, name=inherited.name, store=store), TRIES)
            finally:
                store.close()

        assert sum(in_processes(PROCESSES, race)) == SLOTS
        assert [result.remaining for result in inherited.check("a", 0).results] == [0] * len(rules)

    def test_a_hold_does_not_return_units_of_another_process(self) -> None:
        """Forked processes must not create two states with the same origin, or one could be mistaken for the other."""
        self.require("shared")
        limiter = self.limiter(self.rule(self.kinds[0], 10))
        was_reset = multiprocessing.get_context("fork").Event()
        holds: list[Hold] = []

        def hit_later(number: int) -> int:
            assert was_reset.wait(_LONGEST_WAIT)
            return limiter.hit("a", 5).remaining or 0

        def hold_and_reset() -> None:
            holds.append(limiter.hold("a", 5))
            limiter.reset("a")
            was_reset.set()

        assert in_processes(1, hit_later, hold_and_reset) == [5]
        holds[0].release()
        assert limiter.check("a", 0).remaining == 5


def wins(limiter: Limiter, tries: int) -> int:
    """Return the number of admitted hits."""
    return sum(limiter.hit("a").allowed for _ in range(tries))


class RaceTally:
    """The units taken and kept by holds, and the maximum held at once."""

    def __init__(self) -> None:
        self.out = 0
        self.most = 0
        self._lock = threading.Lock()

    def add(self, units: int) -> None:
        """Count units after they were taken, or (negative) before they are returned."""
        with self._lock:
            self.out += units
            self.most = max(self.most, self.out)


def hold_and_settle(limiter: Limiter, tally: RaceTally, chance: random.Random) -> None:
    """Take units repeatedly, and keep none, some or all of them."""
    for _ in range(TRIES):
        cost = chance.randint(1, 5)
        if hold := limiter.hold("a", cost):
            tally.add(cost)
            kept = chance.choice((0, 0, chance.randint(0, cost)))
            tally.add(kept - cost)
            hold.settle(kept)


def check_tally(limiter: Limiter, rule: Rule, tally: RaceTally) -> None:
    """Check that the limit was never exceeded, and that all units that were not kept remain."""
    assert tally.most <= SLOTS
    left = SLOTS - tally.out
    admitted = wins(limiter, SLOTS)
    # A bucket may return fewer units where holds overlap; see "Hold, then settle" in the design.
    assert admitted <= left if rule.kind == "token_bucket" else admitted == left


@contextmanager
def eager_switching() -> Iterator[None]:
    """Make threads switch as often as possible."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def in_threads(count: int, job: Callable[[int], T]) -> list[T]:
    """Run a job with the numbers from 0, each in its own thread, all at once; return the results."""
    barrier = threading.Barrier(count)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            barrier.wait(_LONGEST_WAIT)
            results[number] = job(number)
        except BaseException as error:  # noqa: BLE001  # raised below, where the test can see it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONGEST_WAIT)
    if errors:
        raise errors[0]
    assert len(results) == count, "a racer hangs"
    return [results[number] for number in range(count)]


def in_processes(
    count: int, job: Callable[[int], int], meanwhile: Callable[[], None] = lambda: None
) -> list[int]:
    """Run a job with the numbers from 0, each in a forked process, all at once; return the results."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)

    def run(number: int, answer: Connection) -> None:
        try:
            barrier.wait(_LONGEST_WAIT)
            answer.send(job(number))
        except BaseException:  # noqa: BLE001  # raised again by the receiver
            answer.send(traceback.format_exc())

    processes, answers = [], []
    for number in range(count):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(number, sender), daemon=True)
        with warnings.catch_warnings():
            # Newer Python versions warn about a fork while other threads run, as in a preloading server.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        processes.append(process)
        answers.append(receiver)
    meanwhile()
    results = [_receive(answer) for answer in answers]
    for process in processes:
        process.join(_LONGEST_WAIT)
    return results


def _receive(answer: Connection) -> int:
    with answer:
        assert answer.poll(_LONGEST_WAIT), "a process hangs"
        result = answer.recv()
        assert isinstance(result, int), f"a process failed:\n{result}"
        return result
