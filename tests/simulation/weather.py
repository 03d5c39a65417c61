"""Faults: which of them a run has, and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests.faults.history import Loss
from tests.simulation.network import Link, Network
from tests.simulation.programs import Program
from tests.simulation.servers import HeadgateServer, policy_of

ON_THE_WAY = ("delay", "cut", "lose_reply", "darken", "hang_up", "wrong_reply", "terminate")
"""Faults of a single connection. They are made more often than those of a whole process or server."""

SETTLING_US = 3_000_000
"""Time after a fault in which everything has to be well again."""

LOST_SECONDS = 0.2
"""Seconds of writes that a failover loses at most."""


class Weather:
    """Makes faults at random times.

    Args:
        network: The connections.
        programs: The processes.
        kinds: The faults, by method name.
        gap: Seconds between two of them, on average.
        most: The largest number of faults.

    Attributes:
        losses: Declared losses of the server.
        pauses: When processes were stopped: the process, start and end in microseconds.
    """

    def __init__(
        self, network: Network, programs: list[Program], kinds: list[str], gap: float, most: int
    ) -> None:
        self.network = network
        self.programs = programs
        self.kinds = kinds
        self.gap = gap
        self._left = most
        self._terminated = 0.0
        self.losses: list[Loss] = []
        self.pauses: list[tuple[int, int, int]] = []
        self.back_us = 0
        self._rng = Random(network.rng.random())
        self._snapshots: list[tuple[int, dict[bytes, Any]]] = []
        self._is_over = not kinds

    def start(self) -> None:
        """Begin."""
        self._later(self._next)
        if "failover" in self.kinds:
            self._snapshot()

    def stop(self) -> None:
        """Stop making faults, and end lasting ones."""
        self._is_over = True
        self.network.server.is_up = True
        self.network.server.is_replica = False
        self.network.server.silent_until = 0.0
        for link in list(self.network.links):
            if link.is_dark:
                link.is_dark = False
                link.break_off()

    def _later(self, event: Callable[[], None]) -> None:
        loop = self.network.loop
        loop.at(loop.time() + self._rng.expovariate(1 / self.gap), event)

    def _next(self) -> None:
        self._left -= 1
        if not self._is_over and self._left:
            weights = [4 if kind in ON_THE_WAY else 1 for kind in self.kinds]
            getattr(self, self._rng.choices(self.kinds, weights)[0])()
            self._later(self._next)

    def _after(self, seconds: float, event: Callable[[], object]) -> None:
        loop = self.network.loop
        loop.at(loop.time() + seconds, event)

    def _link(self) -> Link | None:
        links = [link for link in self.network.links if link.open_fault is None]
        return self._rng.choice(links) if links else None

    def _side(self) -> str:
        return self._rng.choice(("server", "client"))

    # --- On the way

    def delay(self) -> None:
        """Delay a connection, so that others overtake it."""
        if (link := self._link()) is not None:
            seconds = self._rng.choice((0.005, 0.05, 0.4, 1.5)) * self._rng.random()
            self.network.fault("delay", seconds)
            link.delay(self._side(), seconds)

    def cut(self) -> None:
        """End a connection after any byte, in either direction."""
        if (link := self._link()) is not None:
            link.open_fault = self.network.fault("cut", 1e9)
            link.left[self._side()] = self._rng.choice((0, 1, self._rng.randrange(400)))

    def lose_reply(self) -> None:
        """Lose a reply after the server has decided."""
        if (link := self._link()) is not None:
            link.open_fault = self.network.fault("lose_reply", 1e9)
            link.left["client"] = 0

    def darken(self) -> None:
        """Drop everything on a connection silently."""
        if (link := self._link()) is not None:
            link.open_fault = self.network.fault("darken", 1e9)
            link.is_dark = True

    def hang_up(self) -> None:
        """Close a connection from the server."""
        if (link := self._link()) is not None:
            link.open_fault = self.network.fault("hang_up", 1e9)
            link.break_off()

    def terminate(self) -> None:
        """End a database session instead of answering; nothing was done."""
        if (link := self._link()) is not None:
            now = self.network.loop.time()
            if now < self._terminated + 2:  # a call is sent again once
                self.network.fault("terminate", 0.1)
            else:
                self.network.count("terminate")
            self._terminated = now
            link.session.next_reply = self.network.server.goodbye

    # --- Processes

    def block(self) -> None:
        """Stop a process, or block its event loop, for a while."""
        program = self._rng.choice(self.programs)
        seconds = self._rng.choice((0.002, 0.05, 0.3, 3.0)) * self._rng.random()
        loop, server = self.network.loop, self.network.server
        for span in self.network.faults:  # the process notices later that they are over
            if span[1] >= server.now_us() - SETTLING_US:
                span[1] += round(seconds * 1e6)
        self.network.fault("block", seconds)
        program.process.stopped_until = max(program.process.stopped_until, loop.time() + seconds)
        self.pauses.append((program.number, server.now_us(), server.now_us() + round(seconds * 1e6)))

    def skew(self) -> None:
        """Set the wall clock of a process to another time."""
        self.network.count("skew")
        process = self._rng.choice(self.programs).process
        process.skew_us = self._rng.choice((0, 1000, -1000, 3_600_000_000, -86_400_000_000))

    def reload(self) -> None:
        """Put other limits in force in a process."""
        self.network.count("reload")
        others = self._rng.random() < 0.5
        server, program = self.network.server, self._rng.choice(self.programs)
        if isinstance(server, HeadgateServer):
            subjects = list(program.subjects.values())
            self.network.loop.world.context.run(server.reload, policy_of(subjects, others=others))
        else:
            program.process.context.run(partial(program.reload, others=others))

    # --- Servers

    def stop_server(self) -> None:
        """Stop the server for a while; requests wait."""
        seconds = self._rng.choice((0.01, 0.1, 1.5)) * self._rng.random()
        self.network.fault("stop_server", seconds)
        server = self.network.server
        server.silent_until = max(server.silent_until, self.network.loop.time() + seconds)

    def restart(self) -> None:
        """Restart the server: connections end, and it is away for a while."""
        seconds = self._rng.choice((0.001, 0.05, 0.5)) * self._rng.random()
        self.network.fault("restart", seconds + 0.02)
        server = self.network.server
        server.restart()
        server.is_up = False
        for link in list(self.network.links):
            link.session.is_over = True
            link.break_off()
        self._after(seconds, partial(setattr, server, "is_up", True))

    def demote(self) -> None:
        """Make the server a replica for a while: it refuses to write."""
        seconds = self._rng.random() * 0.05
        self.network.fault("demote", seconds)
        server = self.network.server
        server.is_replica = True
        self._after(seconds, partial(setattr, server, "is_replica", False))

    def failover(self) -> None:
        """Put a replica in the server's place, which has not seen the last writes."""
        server = self.network.server
        at, states = self._rng.choice(self._snapshots[-4:])
        server.states = dict(states)
        since = at - 1000 - self.back_us
        self.losses.append(Loss(since, since, server.now_us()))
        self.restart()
        self.network.count("failover")

    def _snapshot(self) -> None:
        server = self.network.server
        self._snapshots.append((server.now_us(), dict(server.states)))
        if not self._is_over:
            self._after(LOST_SECONDS / 4, self._snapshot)

    def wrong_reply(self) -> None:
        """Answer one request with an error or nonsense."""
        if (link := self._link()) is not None and link.session.next_reply is None:
            link.session.fault = self.network.fault("wrong_reply", 1e9)
            link.session.next_reply = self._rng.choice(self.network.server.wrong_replies)

    def step(self) -> None:
        """Set the server's clock forward, or a little back."""
        self.network.count("step")
        by = self._rng.choice((-3000, -300, 500, 20_000, 700_000))
        server = self.network.server
        if by < 0:
            self.back_us -= by
        else:  # what lasts ends later by that clock
            for span in self.network.faults:
                span[1] += by * (span[1] >= server.now_us())
            self.pauses.append((-1, server.now_us(), server.now_us() + by))
        server.skew_us += by
