"""One simulation: everything in it follows from its seed."""

from __future__ import annotations

import asyncio
import logging
import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import httpx

import headgate.stores.postgres.peer as postgres_peer
from headgate import AsyncLimiter
from headgate.client import ServerStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.faults.checker import check
from tests.faults.history import History, Pause
from tests.simulation.judge import (
    check_errors,
    check_places,
    ends_at_a_deadline,
    has_refunded_what_was_lost,
    is_short_enough,
)
from tests.simulation.loop import SimulatedLoop, Stuck, virtual_time
from tests.simulation.network import Network, SimulatedBackend, SimulatedPGconn, SimulatedPoller
from tests.simulation.programs import DAY_US, DEADLINE, Plan, Program, Recorder, random_subject
from tests.simulation.servers import HeadgateServer, PostgresServer, RedisServer, policy_of
from tests.simulation.weather import SETTLING_US, Weather

STORES = ("redis", "redis", "redis", "postgres", "postgres", "server")
FAULTS = (
    *("delay", "cut", "lose_reply", "darken", "hang_up", "terminate"),
    *("block", "skew", "reload"),
    *("stop_server", "restart", "demote", "failover", "wrong_reply", "step"),
)
NOT_OF = {"redis": ("terminate",), "postgres": (), "server": ("terminate", "demote", "failover", "step")}
"""Faults that a store cannot have."""
HARMLESS = ("skew", "reload", "step", "terminate")
"""Faults that no call may fail for."""


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        violations: Descriptions of all violations.
        faults: The number of faults by kind.
        calls: The number of calls.
        trace: A checksum of the history; equal for equal seeds.
    """

    seed: int
    store: str
    violations: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    trace: int = 0
    history: Any = None

    def __str__(self) -> str:
        found = "\n  ".join(self.violations[:5]) or "nothing was violated"
        return f"seed {self.seed} on {self.store}:\n  {found}"


def run(seed: int, store: str | None = None, faults: tuple[str, ...] | None = None) -> Outcome:
    """Run one simulation and judge it; its store and its faults are random unless they are given."""
    rng = random.Random(seed)
    kind = rng.choice(STORES)
    kind = store or kind
    outcome = Outcome(seed, kind)
    loop = SimulatedLoop(rng)
    with ExitStack() as stack:
        stack.enter_context(virtual_time(loop))
        stack.enter_context(patch.object(random, "SystemRandom", lambda: random.Random(rng.random())))
        stack.enter_context(_quiet())
        world = World(loop, kind, outcome, faults)
        stack.enter_context(patch.object(postgres_peer, "Poller", SimulatedPoller))
        stack.enter_context(
            patch.object(
                postgres_peer.PostgresPeer,
                "connect_async",
                lambda _, seconds, receiver: world.connect_postgres(receiver),
            )
        )
        try:
            loop.run_until_complete(loop.create_task(world.play(), context=loop.world.context))
        except Stuck as error:
            outcome.violations.append(str(error))
        except Exception as error:  # noqa: BLE001  # the seed is printed with it
            outcome.violations.append(f"the simulated server failed: {error!r}")
        finally:
            world.judge()
            _close(loop)
    return outcome


class World:
    """The server, the network, the processes and the faults of one run."""

    def __init__(
        self, loop: SimulatedLoop, kind: str, outcome: Outcome, faults: tuple[str, ...] | None
    ) -> None:
        rng = loop.rng
        self.loop = loop
        self.kind = kind
        self.outcome = outcome
        self.subjects = [random_subject(rng, f"limiter-{i}") for i in range(rng.choice((1, 1, 2, 3)))]
        self.server = self._server()
        if rng.random() < 0.3:  # midnight is near
            self.server.skew_us = -loop.now_us() % DAY_US - rng.randrange(3_000_000)
        self.network = Network(loop, self.server)
        self.recorder = Recorder(self.server.now_us)
        is_calm = rng.random() < 0.35
        kinds = [fault for fault in FAULTS if fault not in NOT_OF[kind]]
        chosen = [] if is_calm else rng.sample(kinds, rng.randrange(1, len(kinds)))
        if is_calm and rng.random() < 0.5:
            chosen = [name for name in HARMLESS if name in kinds]
        chosen = chosen if faults is None else list(faults)
        self.plan = Plan(
            actors=rng.choice((1, 2, 4, 12, 40)),
            calls=rng.choice((3, 10, 30)),
            cancels=rng.choice((0, 0.1, 0.4)),
            thinks=rng.choice((0, 0.001, 0.01, 0.2)),
            policy=rng.choice(("raise", "raise", "raise", "open", "closed")),
            bursts=rng.choice((0, 0, 20, 80)),
            exits=rng.random() < 0.15,
            is_certain=False,
        )
        self.plan = replace(self.plan, is_certain=self.plan.policy == "raise" and kind != "server")
        processes = [loop.new_process(f"process-{i}") for i in range(rng.choice((1, 2, 3)))]
        self.programs = [self._program(process, i, self.plan) for i, process in enumerate(processes)]
        self.weather = Weather(
            self.network, self.programs, chosen, rng.choice((0.0005, 0.003, 0.02)), rng.choice((4, 40, 300))
        )
        self.held: dict[tuple[str, int, str], tuple[int, bool]] = {}

    def _program(self, process: Any, number: int, plan: Plan) -> Program:
        return process.context.run(
            Program, self.loop, process, number, self._store(), self.subjects, plan, self.recorder
        )

    def _server(self) -> Any:
        if self.kind == "redis":
            return RedisServer(self.loop)
        if self.kind == "postgres":
            return PostgresServer(self.loop)
        server = HeadgateServer(self.loop, policy_of(self.subjects, others=False))
        self.loop.world.context.run(server.open)
        return server

    def _store(self) -> Any:
        if self.kind == "redis":
            return RedisStore("redis://10.0.0.1", deadline=DEADLINE)
        if self.kind == "server":
            transport = httpx.AsyncHTTPTransport(verify=False, trust_env=False)
            transport._pool._network_backend = SimulatedBackend(self.network)
            return ServerStore("http://127.0.0.1", deadline=DEADLINE, transport=transport)
        return PostgresStore("postgresql://10.0.0.1/x", deadline=DEADLINE)

    async def connect_postgres(self, receiver: Any) -> Any:
        """Connect to the simulated database; it has the statements already."""
        wire = postgres_peer.PostgresWire(SimulatedPGconn(await self.network.open()), True)
        return postgres_peer.AsyncPostgresWire(wire, receiver)

    async def play(self) -> None:
        """Run the programs, then audit the counts."""
        self.weather.start()
        running = [
            self.loop.create_task(program.run(), context=program.process.context) for program in self.programs
        ]
        await asyncio.wait(running)
        self.weather.stop()
        await asyncio.sleep(SETTLING_US / 1e6)
        plan = replace(self.plan, cancels=0, policy="raise")
        auditor = self._program(self.loop.new_process("auditor"), len(self.programs), plan)
        await self.loop.create_task(self._audit(auditor), context=auditor.process.context)
        for program in (*self.programs, auditor):
            await self.loop.create_task(program.store.aclose(), context=program.process.context)

    async def _audit(self, auditor: Program) -> None:
        """Ask for everything that is counted in the end."""
        keys = sorted({(call.limiter, call.key) for call in self.recorder.calls.values()})
        for limiter, key in keys:
            subject = auditor.subjects[limiter]
            made = await auditor._call(
                "check", subject, key, 1, lambda s=subject, k=key: auditor.limiters[s.name].check(s.key(k))
            )
            if made is None:
                self.outcome.violations.append("the store could not be asked in the end")
                continue
            roomy = AsyncLimiter(*subject.roomy, name=limiter, store=auditor.store, on_store_error="raise")
            for i, (_, limit, remaining, *_) in enumerate((await roomy.check(subject.key(key), 0)).fields):
                self.held[limiter, i, key] = limit - remaining, remaining > 0

    def judge(self) -> None:
        """Collect the violations."""
        outcome, weather = self.outcome, self.weather
        settling = round(DEADLINE * 1e6)
        faults = [(start - 1000, end + settling) for start, end, _ in self.network.faults]
        # By a clock that was set forward, a cancelled call may be carried out late.
        faults += [(start, end) for worker, start, end in weather.pauses if worker < 0]
        history = History(
            {subject.name: subject.specs for subject in self.subjects},
            list(self.recorder.calls.values()),
            losses=weather.losses,
            pauses=[Pause(*pause) for pause in weather.pauses],
            faults=faults,
            slack_us=100 + weather.back_us,
            longest_us=round(DEADLINE * 1e6) + 60_000,
            released_within_us=150_000,
            notes={"seed": outcome.seed},
        )
        outcome.history = history
        outcome.calls = len(history.calls)
        outcome.faults = {**self.network.injected}
        cancelled = sum(call.outcome == "cancelled" for call in history.calls)
        outcome.faults["cancel"] = cancelled
        outcome.trace = zlib.crc32(repr(history.calls).encode())
        outcome.violations += self.recorder.surprises + self.loop.failures
        if self.network.unread:
            outcome.violations.append(
                f"{self.network.unread} replies had arrived and were lost with their connections"
            )
        for found in check(history):
            if found.kind in ("forgotten units", "too many") and has_refunded_what_was_lost(history):
                continue
            # To settle at more than was held takes two calls with a deadline each; to wait takes several, and time between.
            calls = {"settle": 2, "hits": 4}.get(found.call.operation, 1)
            if found.kind != "outlived its deadline" or not is_short_enough(history, found.call, calls):
                outcome.violations.append(str(found))
        errors = self.recorder.errors
        stops = ends_at_a_deadline(weather.pauses, errors, round(DEADLINE * 1e6))
        outcome.violations += check_errors(self.network.faults + stops, errors, SETTLING_US)
        outcome.violations += check_places(history, self.held)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("headgate")
    level, logger.disabled = logger.level, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.disabled = False
            logger.setLevel(level)


def _close(loop: SimulatedLoop) -> None:
    """Drop everything that is left of a loop."""
    for process in loop.processes:
        process.ready.clear()
        process.timers.clear()
    loop.close()
