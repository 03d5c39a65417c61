"""`tour`: features of limiters in the terminal, with real decisions."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from headgate import Decision, Limiter, fixed_window, sliding_window, token_bucket
from headgate.clock import Clock, SteadyClock
from headgate.stores import MemoryStore, SQLiteStore
from headgate.testing import FakeClock
from headgate_server.cli.terminal import Style

Say = Callable[[str], None]


def tour(*, fast: bool = False, say: Say = print) -> None:
    """Demonstrate limiters; `fast` uses a fake clock instead of waiting."""
    clock: Clock = FakeClock() if fast else SteadyClock()
    show = _Show(say, clock)
    for number, scene in enumerate(_SCENES, start=1):
        title, _, explanation = (scene.__doc__ or "").partition("\n\n")
        show.say(show.bold(f"{number}. {title}"))
        for line in explanation.split("\n"):
            show.say(show.dim(line.strip())) if line.strip() else None
        scene(show)
        show.say("")
    show.say("Next, in Python:  " + show.bold("from headgate import Limiter"))


def _steady_stream(show: _Show) -> None:
    """A sliding window: 20 per second, called twice as often

    Each column is a tenth of a second with four requests; its height is the number of admitted ones.
    """
    limiter = Limiter("20/s", clock=show.clock)
    admitted: list[float] = []
    for _ in range(30):
        admitted.append(sum(bool(limiter.hit("alice")) for _ in range(4)))
        show.clock.sleep(0.1)
    show.say(f"   {show.green(show.history(admitted))}  {sum(admitted)} of 120 admitted")
    refused = limiter.check("alice", 20)
    show.decision(f"check of 20 at once: {refused}", refused)


def _edge_burst(show: _Show) -> None:
    """The edge of a window: why fixed windows admit twice the limit

    Ten at the end of one second, ten at the start of the next. The sliding window admits only ten.
    """
    clock = FakeClock(1_700_000_000.95)
    for rule in (fixed_window("10/s"), sliding_window("10/s")):
        limiter = Limiter(rule, clock=FakeClock(clock.now))
        admitted = sum(bool(limiter.hit("bob", now=clock.now)) for _ in range(10))
        admitted += sum(bool(limiter.hit("bob", now=clock.now + 0.1)) for _ in range(10))
        show.say(
            f"   {rule.kind:<15} {show.bar(admitted, 20)}  {admitted} admitted within a tenth of a second"
        )


def _all_or_nothing(show: _Show) -> None:
    """Several limits, all or nothing: 5 per user, 8 for all users, one decision

    A request that the shared limit refuses is not charged to the user either.
    """
    limiter = Limiter(
        sliding_window("5/minute", scope="user"), sliding_window("8/minute", scope="*", name="everybody")
    )
    for user in ("ann", "ann", "ann", "ben", "ben", "ben", "cem", "cem", "cem"):
        decision = limiter.hit({"user": user})
        show.decision(f"{user}: {decision}", decision)
    mine = limiter.check({"user": "cem"}, 0).results[0]
    show.say(f"   cem still has {mine.remaining} of {mine.limit}: the refusal cost nothing")


def _hold_and_settle(show: _Show) -> None:
    """Hold, then settle: the true cost is known only afterwards

    1,000 tokens a minute. Hold 800, use 300, and the rest is given back.
    """
    limiter = Limiter(token_bucket("1000/minute"), clock=FakeClock())
    with limiter.hold("model", 800) as hold:
        show.say(f"   held 800: {limiter.check('model', 0).remaining} left for others")
        hold.settle(300)
    show.say(f"   settled at 300: {limiter.check('model', 0).remaining} left")
    try:
        with limiter.hold("model", 700):
            raise RuntimeError("the model is down")
    except RuntimeError as error:
        show.say(f"   held 700, then “{error}”: {limiter.check('model', 0).remaining} left, nothing was lost")


def _waiting(show: _Show) -> None:
    """Waiting in line: a token bucket of 10 per second, five at once, for 15 workers

    No polling: each worker sleeps exactly as long as the limiter says.
    """
    limiter = Limiter(token_bucket("10/s", burst=5), clock=show.clock)
    start = show.clock.now_us()
    moments: list[int] = []

    def work() -> None:
        limiter.wait("queue")
        moments.append(show.clock.now_us() - start)

    workers = [threading.Thread(target=work) for _ in range(15)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    slots = [sum(slot * 100_000 <= m < (slot + 1) * 100_000 for m in moments) for slot in range(11)]
    show.say("   admitted per tenth of a second: " + show.green(" ".join(str(n) for n in slots)))


def _shared_file(show: _Show) -> None:
    """One budget, several processes: an SQLite file, and the count is there after a restart"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.db"
        for run in ("first", "second"):
            with SQLiteStore(path) as store:
                limiter = Limiter("3/hour", name="login", store=store)
                for _ in range(2):
                    decision = limiter.hit("dora")
                    show.decision(f"{run} run: {decision}", decision)


def _speed(show: _Show) -> None:
    """Speed"""
    limiter = Limiter(token_bucket("1000000000/s"), store=MemoryStore(), name="speed")
    count = 100_000
    clock = SteadyClock()
    start = clock.now_us()
    for _ in range(count):
        limiter.hit("eve")
    passed = max(1, clock.now_us() - start)
    show.say(
        f"   {count:,} decisions in {passed / 1_000_000:.2f} s, one thread of Python (`make bench` compares)"
    )


_SCENES = (_steady_stream, _edge_burst, _all_or_nothing, _hold_and_settle, _waiting, _shared_file, _speed)


class _Show(Style):
    """Output of the tour."""

    def __init__(self, say: Say, clock: Clock) -> None:
        super().__init__(sys.stdout)
        self.say = say
        self.clock = clock
        self.coloured = self.coloured and say is print

    def decision(self, text: str, decision: Decision) -> None:
        mark = self.green("✓") if decision else self.red("✗")
        self.say(f"   {mark} {text}")
