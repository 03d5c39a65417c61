"""One simulation, completely determined by its seed."""

from __future__ import annotations

import logging
import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from typing import Any
from unittest.mock import patch

import redis.connection

import headgate.stores.postgres.peer as postgres_peer
from headgate import AsyncLimiter, Limiter
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.stores.remote.listener import WakeListener
from tests.faults.history import History, HistoryCall
from tests.faults.recording import read_calls
from tests.faults.traffic import DAY_US, policy_text, random_subject
from tests.simulation.faults import FAULTS, HARMLESS, NOT_OF, SETTLING_US, FaultInjector
from tests.simulation.http import HeadgateServer, server_store
from tests.simulation.judge import judge
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Network, SimulatedPoller
from tests.simulation.postgres import PORT, PostgresServer, SimulatedPGconn
from tests.simulation.program import DEADLINE, Plan, Program, SimulatedActor
from tests.simulation.redis import HOST, Cluster, RedisServer, SentinelGroup
from tests.simulation.threads import Scheduler
from tests.simulation.timeline import Stuck, virtual_time

STORES = (
    *("redis", "redis", "postgres", "postgres", "server"),
    *("cluster", "sentinel", "threads", "threads"),
)
package_version = cache(metadata.version)

MOST_PROCESSES = 8
"""The maximum number of processes of one run, including replacements of killed processes."""


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
    history: History | None = None

    def __str__(self) -> str:
        found = "\n  ".join(self.violations[:5]) or "no violation"
        return f"seed {self.seed} on {self.store}:\n  {found}"


def run(seed: int, store: str | None = None, faults: tuple[str, ...] | None = None, **plan: Any) -> Outcome:
    """Run and check one simulation; its store, its faults and the fields of its plan are random by default."""
    rng = random.Random(seed)
    kind = rng.choice(STORES)
    kind = store or kind
    outcome = Outcome(seed, kind)
    timeline: Any = SimulatedLoop(rng)
    if kind == "threads":
        timeline.close()
        timeline = Scheduler(rng, rng.choice((0.0, 0.0, 0.01)), rng.choice((0.0, 0.05)))
    with ExitStack() as stack:
        stack.enter_context(virtual_time(timeline))
        stack.enter_context(patch.object(random, "SystemRandom", lambda: random.Random(rng.random())))
        stack.enter_context(_quiet())
        if kind == "threads":
            stack.enter_context(timeline.patches())
        world = World(timeline, kind, faults, plan)
        stack.enter_context(world.patches())
        try:
            timeline.run(world.play)
        except Stuck as error:
            world.violations.append(str(error))
        except Exception as error:  # noqa: BLE001  # reported together with the seed
            world.violations.append(f"the simulated server failed: {error!r}")
        finally:
            world.judge(outcome)
            timeline.drop()
    return outcome


class World:
    """The servers, the network, the processes and the faults of one run."""

    def __init__(
        self, timeline: Any, kind: str, faults: tuple[str, ...] | None, plan: dict[str, Any]
    ) -> None:
        rng = timeline.rng
        self.timeline = timeline
        self.kind = kind
        self.violations: list[str] = []
        self.network = Network(timeline)
        timeline.on_interrupt = lambda: self.network.fault("interrupt", 0.0)
        if rng.random() < 0.3:  # start shortly before midnight
            self.network.clock.step(-timeline.now_us() % DAY_US - rng.randrange(3_000_000))
        self.subjects = {f"limiter-{i}": random_subject(rng) for i in range(rng.choice((1, 1, 2, 3)))}
        self.deployment = self._deploy()
        self.plan = Plan(
            actors=rng.choice((1, 2, 4, 12, 40) if kind != "threads" else (1, 2, 3, 8)),
            calls=rng.choice((3, 10, 30) if kind != "threads" else (3, 10, 20)),
            cancels=rng.choice((0, 0.1, 0.4)),
            max_pause=rng.choice((0, 0.001, 0.01, 0.2)),
            policy=rng.choice(("raise", "raise", "raise", "open", "closed")),
            bursts=rng.choice((0, 0, 20, 80)),
            resets=rng.choice((0, 0, 0.02)),
            exits=rng.random() < 0.15 and kind != "threads",
        )
        self.plan = replace(self.plan, **plan)
        self.programs: list[Program] = []
        self.killed: set[int] = set()
        for _ in range(rng.choice((1, 2, 3)) if kind != "threads" else 1):
            self.new_program(self.plan)
        self.injector = FaultInjector(
            self, self._kinds(rng, faults), rng.choice((0.0005, 0.003, 0.02)), rng.choice((4, 40, 300))
        )

    def _kinds(self, rng: random.Random, given: tuple[str, ...] | None) -> list[str]:
        """Return the faults of the run: none, only harmless ones, or any."""
        kinds = [fault for fault in FAULTS if fault not in NOT_OF[self.kind]]
        choice = rng.random()
        chosen = [] if choice < 0.17 else rng.sample(kinds, rng.randrange(1, len(kinds)))
        if 0.17 <= choice < 0.35:
            chosen = [fault for fault in HARMLESS if fault in kinds]
        return chosen if given is None else list(given)

    def _deploy(self) -> Any:
        """Start the servers."""
        if self.kind == "cluster":
            return Cluster(self.network)
        if self.kind == "sentinel":
            return SentinelGroup(self.network)
        if self.kind == "postgres":
            return PostgresServer(self.network)
        if self.kind == "server":
            return HeadgateServer(self.network, policy_text("memory://", self.subjects))
        return RedisServer(self.network)

    def _store(self) -> Any:
        if self.kind == "postgres":
            return PostgresStore(f"postgresql://{HOST}/x", deadline=DEADLINE)
        if self.kind == "server":
            return server_store(DEADLINE)
        # With the tag "key", all rules of a limiter count by the same key.
        tag = "limiter" if any(subject.has_scopes for subject in self.subjects.values()) else "key"
        urls = {
            "cluster": f"redis+cluster://{HOST}:7000,{HOST}:7001?hash_tag={tag}",
            "sentinel": f"redis+sentinel://{HOST}:26379,{HOST}:26380/primary/0",
        }
        return RedisStore(urls.get(self.kind, f"redis://{HOST}"), deadline=DEADLINE)

    def new_program(self, plan: Plan) -> Program:
        """Add a process."""
        process, number = self.timeline.new_process(), len(self.programs)
        program = process.context.run(
            lambda: Program(
                self.timeline, process, number, self._store(), self.subjects, plan, self.network.now_us
            )
        )
        self.programs.append(program)
        return program

    def kill(self, program: Program) -> None:
        """Kill a process, and start a replacement if fewer than `MOST_PROCESSES` were started."""
        self.timeline.kill(program.process)
        program.is_done = True
        self.killed.add(program.number)
        for link in list(self.network.links):
            if link.process is program.process:
                link.close()
        if len(self.programs) < MOST_PROCESSES:
            self.new_program(self.plan).start()

    def reload(self, program: Program, *, others: bool) -> None:
        """Reload the limits of a process, or of the Headgate server."""
        if self.kind == "server":
            self.deployment.reload(policy_text("memory://", self.subjects, others=others))
        else:
            program.process.context.run(lambda: program.reload(others=others))

    @contextmanager
    def patches(self) -> Iterator[None]:
        """Connect redis-py and the PostgreSQL store to the simulated servers."""
        network = self.network

        async def connect_postgres(_: object, seconds: float, receiver: Any) -> Any:
            pgconn: Any = SimulatedPGconn(await network.open(PORT))
            return postgres_peer.AsyncPostgresWire(postgres_peer.PostgresWire(pgconn, True), receiver)

        def connect_redis(self: Any) -> Any:
            return network.open_socket(self.port, self.socket_connect_timeout)

        with (
            patch.object(WakeListener, "listen", lambda _: None),  # waiting calls have to poll
            patch.object(postgres_peer, "Poller", SimulatedPoller),
            patch.object(postgres_peer.PostgresPeer, "connect_async", connect_postgres),
            patch.object(redis.connection.Connection, "_connect", connect_redis),
            patch.object(metadata, "version", package_version),  # redis-py reads it for every connection
        ):
            yield

    async def play(self) -> None:
        """Run the processes, then read the remaining counts."""
        self.injector.start()
        for program in list(self.programs):
            program.start()
        while not all(program.is_done for program in self.programs):
            await self.timeline.sleep(0.02)
        self.injector.stop()
        self.timeline.interrupts = 0.0
        await self.timeline.sleep(SETTLING_US / 1e6)
        auditor = self.new_program(replace(self.plan, cancels=0, policy="raise", actors=0, exits=False))
        self.timeline.start(auditor.process, lambda: self._audit(auditor))
        while not auditor.is_done:
            await self.timeline.sleep(0.02)

    async def _audit(self, auditor: Program) -> None:
        """Check every key with limits that are never reached, so that the history shows all counts; close all stores."""
        actor = SimulatedActor(auditor, random.Random(0), 0)
        kind = AsyncLimiter if auditor.in_tasks else Limiter
        for name, key in sorted({(call.limiter, call.key) for call in self._calls()}):
            subject = self.subjects[name]
            roomy = kind(*subject.roomy(), name=name, store=auditor.store, on_store_error="raise")
            made = await actor.call("check", name, key, 0, partial(roomy.check, subject.key(key), 0))
            if made is None:
                self.violations.append("the store did not answer after the run")
        for program in self.programs:
            if program.number not in self.killed:
                self.timeline.start(program.process, program.close)
        auditor.is_done = True

    def _calls(self) -> list[HistoryCall]:
        return [call for program in self.programs for call in read_calls(program.events, program.number)]

    def judge(self, outcome: Outcome) -> None:
        """Fill in the result of the run."""
        injector, network = self.injector, self.network
        faults = [(start - 1000, end + round(DEADLINE * 1e6)) for start, end, _ in network.faults]
        # On a clock that was set forward, a cancelled call may be carried out late.
        faults += [(pause.start, pause.end) for pause in injector.pauses if pause.worker < 0]
        history = History(
            {name: subject.specs(subject.roomy()) for name, subject in self.subjects.items()},
            self._calls(),
            losses=injector.losses,
            pauses=injector.pauses,
            killed=self.killed,
            faults=faults,
            slack_us=100 + injector.back_us,
            longest_us=round(DEADLINE * 1e6) + 60_000,
            released_within_us=150_000,
            notes={"seed": outcome.seed},
        )
        outcome.history, outcome.calls = history, len(history.calls)
        outcome.trace = zlib.crc32(repr(history.calls).encode())
        cancelled = sum(call.outcome == "cancelled" for call in history.calls)
        outcome.faults = {**network.injected, "cancel": cancelled}
        outcome.violations += self.violations + self.timeline.failures
        if network.unread:
            outcome.violations.append(
                f"{network.unread} replies arrived and were lost with their connections"
            )
        errors = [error for program in self.programs for error in program.errors]
        outcome.violations += judge(history, network.faults, errors)


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable the log and warnings."""
    logger = logging.getLogger("headgate")
    logger.disabled = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.disabled = False
