"""The kinds of faults, and their injection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests.faults.history import Loss, Pause
from tests.simulation.network import Link

ON_CONNECTIONS = ("delay", "cut", "lose_reply", "lose_data", "hang_up", "wrong_reply", "terminate")
"""Faults of a single connection. They are injected more often than faults of a whole process or server."""
FAULTS = (
    *ON_CONNECTIONS,
    *("block", "kill", "set_clock", "reload"),
    *("stop_server", "restart", "demote", "failover", "move_slots", "step", "drift"),
)
NOT_OF = {
    "redis": ("terminate", "move_slots"),
    "cluster": ("terminate", "demote"),
    "sentinel": ("terminate", "demote", "move_slots"),
    "postgres": ("move_slots",),
    "server": ("terminate", "demote", "failover", "move_slots", "step", "drift"),
    "threads": ("terminate", "move_slots", "kill"),
}
"""Faults that do not apply to a store."""
HARMLESS = ("set_clock", "reload", "step", "drift", "terminate", "kill")
"""Faults that must not make calls fail."""

SETTLING_US = 3_000_000
"""Time after a fault during which calls may still fail."""

SNAPSHOT_SECONDS = 0.05
"""Seconds between two snapshots of the states; a failover restores one of the last four snapshots."""


class FaultInjector:
    """Injects faults at random times.

    Args:
        world: The run.
        kinds: The method names of the faults.
        gap: The average number of seconds between two faults.
        most: The maximum number of faults.

    Attributes:
        losses: Losses of writes by the servers.
        pauses: Times in which processes were stopped.
        back_us: The total time by which the servers' clock was set back.
    """

    def __init__(self, world: Any, kinds: list[str], gap: float, most: int) -> None:
        self.world = world
        self.network = world.network
        self.timeline = world.timeline
        self.kinds = kinds
        self.gap = gap
        self.losses: list[Loss] = []
        self.pauses: list[Pause] = []
        self.back_us = 0
        self._left = most
        self._terminated = 0.0
        self._rng = Random(self.network.rng.random())
        self._snapshots: list[tuple[int, dict[bytes, Any]]] = []
        self._is_over = not kinds

    def start(self) -> None:
        """Start to inject faults."""
        self._schedule()
        if "failover" in self.kinds:
            self._take_snapshot()

    def stop(self) -> None:
        """Stop injecting faults, and end ongoing faults."""
        self._is_over = True
        for server in self.network.servers.values():
            server.is_up, server.silent_until = True, 0.0
        for link in list(self.network.links):
            if link.loses_data:
                link.loses_data = False
                link.break_off()

    def _schedule(self) -> None:
        self.timeline.after(self._rng.expovariate(1 / self.gap), self._next)

    def _next(self) -> None:
        self._left -= 1
        if not self._is_over and self._left:
            weights = [4 if kind in ON_CONNECTIONS else 1 for kind in self.kinds]
            getattr(self, self._rng.choices(self.kinds, weights)[0])()
            self._schedule()

    def _pick_link(self) -> Link | None:
        links = [link for link in self.network.links if link.open_fault is None]
        return self._rng.choice(links) if links else None

    def _pick_side(self) -> str:
        return self._rng.choice(("server", "client"))

    def _pick_seconds(self, *longest: float) -> float:
        return self._rng.choice(longest) * self._rng.random()

    # --- Connections

    def delay(self) -> None:
        """Delay a connection, so that messages on other connections overtake its messages."""
        if (link := self._pick_link()) is not None:
            seconds = self._pick_seconds(0.005, 0.05, 0.4, 1.5)
            self.network.fault("delay", seconds)
            link.delay(self._pick_side(), seconds)

    def _break(self, kind: str, break_link: Callable[[Link], object]) -> None:
        if (link := self._pick_link()) is not None:
            link.open_fault = self.network.fault(kind, 1e9)
            break_link(link)

    def cut(self) -> None:
        """End a connection after any byte, in either direction."""
        side, left = self._pick_side(), self._rng.choice((0, 1, self._rng.randrange(400)))
        self._break("cut", lambda link: link.left.update({side: left}))

    def lose_reply(self) -> None:
        """Lose a reply after the server has decided."""
        self._break("lose_reply", lambda link: link.left.update(client=0))

    def lose_data(self) -> None:
        """Drop everything on a connection silently."""
        self._break("lose_data", lambda link: setattr(link, "loses_data", True))

    def hang_up(self) -> None:
        """Close a connection at the server."""
        self._break("hang_up", Link.break_off)

    def terminate(self) -> None:
        """End a database session instead of executing its next statement."""
        if (link := self._pick_link()) is not None:
            now = self.timeline.time()
            if now < self._terminated + 2:  # a call is repeated only once, so it may fail now
                self.network.fault("terminate", 0.1)
            else:
                self.network.count("terminate")
            self._terminated = now
            link.session.next_reply = link.server.goodbye

    def wrong_reply(self) -> None:
        """Send an error or an invalid reply instead of executing a request."""
        link = self._pick_link()
        if link is not None and link.session.next_reply is None and link.server.wrong_replies:
            link.session.fault = self.network.fault("wrong_reply", 1e9)
            link.session.next_reply = self._rng.choice(link.server.wrong_replies)

    # --- Processes

    def block(self) -> None:
        """Stop a process, or block its event loop, for a while."""
        program = self._rng.choice(self.world.programs)
        seconds = self._pick_seconds(0.002, 0.05, 0.3, 3.0)
        now = self.network.now_us()
        for span in self.network.faults:  # the process notices later that these faults have ended
            if span[1] >= now - SETTLING_US:
                span[1] += round(seconds * 1e6)
        self.network.fault("block", seconds)
        process = program.process
        process.stopped_until = max(process.stopped_until, self.timeline.time() + seconds)
        self.pauses.append(Pause(program.number, now, now + round(seconds * 1e6)))

    def kill(self) -> None:
        """Kill a process, and start another one: its memory is lost, its holds stay open."""
        alive = [program for program in self.world.programs if not program.is_done]
        if alive:
            self.network.count("kill")
            self.world.kill(self._rng.choice(alive))

    def set_clock(self) -> None:
        """Set the wall clock of a process to another time, or let it drift."""
        self.network.count("set_clock")
        clock = self._rng.choice(self.world.programs).process.clock
        clock.step(self._rng.choice((1000, -1000, 3_600_000_000, -86_400_000_000)))
        clock.drift(self._rng.choice((0, 0.001, -0.05)))

    def reload(self) -> None:
        """Reload limits in a process, or on the Headgate server."""
        self.network.count("reload")
        self.world.reload(self._rng.choice(self.world.programs), others=self._rng.random() < 0.5)

    # --- Servers

    def _pick_server(self) -> Any:
        return self._rng.choice(list(self.network.servers.values()))

    def stop_server(self) -> None:
        """Stop a server for a while; requests wait."""
        seconds, server = self._pick_seconds(0.01, 0.1, 1.5), self._pick_server()
        self.network.fault("stop_server", seconds)
        server.silent_until = max(server.silent_until, self.timeline.time() + seconds)

    def restart(self) -> None:
        """Restart a server: connections end, and it is unreachable for a while."""
        self._restart(self._pick_server())

    def _restart(self, server: Any) -> None:
        seconds = self._pick_seconds(0.001, 0.05, 0.5)
        self.network.fault("restart", seconds + 0.02)
        server.restart()
        server.is_up = False
        for link in list(self.network.links):
            if link.server is server:
                link.session.is_over = True
                link.break_off()
        self.timeline.after(seconds, partial(setattr, server, "is_up", True))

    def demote(self) -> None:
        """Make the server a replica for a while: it refuses writes."""
        seconds, server = self._rng.random() * 0.05, self._pick_server()
        self.network.fault("demote", seconds)
        server.is_replica = True
        self.timeline.after(seconds, partial(setattr, server, "is_replica", False))

    def failover(self) -> None:
        """Replace a server with a replica that lacks the last writes."""
        self.network.count("failover")
        at, states = self._rng.choice(self._snapshots[-4:])
        since = at - 1000 - self.back_us
        deployment = self.world.deployment
        if self.world.kind == "sentinel":
            seconds = self._pick_seconds(0.001, 0.05, 0.3)
            self.network.fault("promote", seconds)
            deployment.promote(dict(states))
            self.timeline.after(seconds, partial(self._demote_old_primary, since))
            return
        failed = deployment.fail_over(self._rng, dict(states))
        self.losses.append(Loss(since, since, self.network.now_us()))
        self._restart(failed)

    def _demote_old_primary(self, since: int) -> None:
        self.world.deployment.demote()
        self.losses.append(Loss(since, since, self.network.now_us()))

    def _take_snapshot(self) -> None:
        self._snapshots.append((self.network.now_us(), dict(self.world.deployment.states)))
        if not self._is_over:
            self.timeline.after(SNAPSHOT_SECONDS, self._take_snapshot)

    def move_slots(self) -> None:
        """Move slots of a cluster to another node."""
        self.network.count("move_slots")
        cluster = self.world.deployment
        block = cluster.begin_move(self._rng)
        self.timeline.after(self._pick_seconds(0.001, 0.05, 0.3), partial(cluster.end_move, block))

    def step(self) -> None:
        """Set the clock of the servers forward, or a little back."""
        self.network.count("step")
        by, now = self._rng.choice((-3000, -300, 500, 20_000, 700_000)), self.network.now_us()
        if by < 0:
            self.back_us -= by
        else:  # on this clock, ongoing faults end later
            for span in self.network.faults:
                span[1] += by * (span[1] >= now)
            self.pauses.append(Pause(-1, now, now + by))
        self.network.clock.step(by)

    def drift(self) -> None:
        """Make the clock of the servers run too fast or too slow."""
        self.network.count("drift")
        self.network.clock.drift(self._rng.choice((0, 1e-5, 0.001, 0.01, -0.001, -0.01)))
