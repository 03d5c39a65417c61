"""Simulated servers, which execute the pure algorithms and encode messages like the real servers.

They reply as soon as a request is complete. Counts survive a restart; a failover restores a snapshot. `next_reply` of a
session replaces one reply with an error or an invalid reply.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from headgate.algorithms import (
    Algorithm,
    Concurrent,
    FixedWindow,
    SlidingWindow,
    State,
    TokenBucket,
    decide_all,
)
from headgate.algorithms.windows import Windows
from headgate.clock import WallClock
from headgate.decision import Verdict
from headgate.errors import CostTooHigh
from headgate.stores.sqlite_queues import SCHEMA, Tickets
from tests.simulation.network import Link, Network


class OtherWindow(Exception):
    """The windows in a request do not include the current time."""

    def __init__(self, now: int) -> None:
        self.now = now


class Uncountable(Exception):
    """A rule cannot count the recorded units; it can count at most `capacity` units."""

    def __init__(self, index: int, capacity: int) -> None:
        self.index, self.capacity = index, capacity


@dataclass(frozen=True, slots=True)
class SentCalendar(Windows):
    """A calendar as sent to a server: the windows from `start` to `edge` and from `edge` to `last`."""

    start: int
    edge: int
    last: int

    def number_at(self, now: int) -> int:
        if not self.start <= now < self.last:
            raise OtherWindow(now)
        return self.edge if now < self.edge else self.last

    def end_of(self, number: int) -> int:
        return number


def algorithm_of(kind: int, a: int, b: int, c: int, d: int) -> Algorithm:
    """Return the algorithm that a request describes."""
    kinds: dict[int, Callable[[], Algorithm]] = {
        1: lambda: FixedWindow("", a, b),
        2: lambda: SlidingWindow("", a, b, c),
        3: lambda: TokenBucket("", a, b, c, d),
        4: lambda: Concurrent("", a, b),
        5: lambda: SentCalendar("", a, b, c, d),
    }
    return kinds[int(kind)]()


class ServerRequest(NamedTuple):
    """A decoded request.

    Attributes:
        operation: peek, hit (also a hold, a confirmation or a renewal), record, refund or reset.
        keys: The key of each rule's state.
        algorithms: The algorithm of each rule.
        at: The time in microseconds; negative for the server's clock.
        costs: The cost of each rule.
        birth: The birth of new states.
        receipts: The receipt of each rule that is refunded or replaced; empty for none.
    """

    operation: str
    keys: Sequence[bytes]
    algorithms: Sequence[Algorithm] = ()
    at: int = -1
    costs: Sequence[int] = ()
    birth: int = 0
    receipts: Sequence[tuple[int, ...]] = ()


class ServerClock(WallClock):
    """The clock of a server, for the queues of `Tickets`."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        return self._now_us()


class Server:
    """Base class of the servers.

    Attributes:
        states: The stored states.
        is_up: Whether it accepts connections.
        is_replica: Whether it refuses writes.
        silent_until: The time until which it is stopped.
        wrong_replies: Error replies and invalid replies.
        invalid: The invalid replies among them, which a client cannot detect after a refund or reset.
        goodbye: The last message before the server ends a connection.
    """

    wrong_replies: tuple[bytes, ...] = ()
    invalid: tuple[bytes, ...] = ()
    goodbye = b""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.now_us = network.now_us
        self.states: dict[bytes, State] = {}
        self.tickets = Tickets(ServerClock(network.now_us))
        self._queues = sqlite3.connect(":memory:", check_same_thread=False)
        for statement in SCHEMA:
            self._queues.execute(statement)
        self.is_up = True
        self.is_replica = False
        self.silent_until = 0.0

    def restart(self) -> None:
        """Drop the data that is not on disk."""

    def fail_over(self, rng: Random, snapshot: dict[bytes, State]) -> Server:
        """Replace this server by a replica with older states."""
        self.states = snapshot
        return self

    def execute(self, request: ServerRequest) -> tuple[list[Verdict], list[Any]]:
        """Execute a request; return the verdict and the receipt of each rule, if it is a decision.

        Raises:
            OtherWindow: The client has to send other calendar windows.
            Uncountable: A rule cannot count the recorded units.
        """
        operation, keys, algorithms, at, costs, birth, receipts = request
        now = self.now_us() if at < 0 else at
        before = [self.states.get(key) for key in keys]
        if operation == "reset":
            self._write(keys, [None] * len(keys))
        elif operation == "refund":
            self._write(keys, [*map(_refund, algorithms, before, receipts, costs, [now] * len(keys))])
        elif operation == "record":
            self._write(keys, [*_recorded(algorithms, before, now, costs, birth)])
        else:
            replaces = [receipt or None for receipt in receipts] if any(receipts) else None
            after, verdicts = decide_all(algorithms, before, now, costs, birth, replaces)
            if after is before or operation == "peek":
                return verdicts, []
            self._write(keys, after)
            return verdicts, [*map(_receipt, algorithms, before, after, costs, receipts)]
        return [], []

    def queue(self, queue: bytes, ticket: str, priority: int, lasting_us: int) -> bool:
        """Add a waiting call to a queue, keep it there or remove it; return whether it is first. Wake no other call."""
        if lasting_us:
            return self.tickets.enter(queue, ticket, priority, lasting_us, self._queues)
        self.tickets.leave(queue, ticket, self._queues)
        return False

    def _write(self, keys: Sequence[bytes], after: Sequence[State | None]) -> None:
        for key, state in zip(keys, after, strict=True):
            if state is None:
                self.states.pop(key, None)
            else:
                self.states[key] = state


def _refund(algorithm: Algorithm, before: State | None, receipt: Any, cost: int, now: int) -> State | None:
    return algorithm.refund(before, receipt, cost, now) if receipt else before


def _recorded(
    algorithms: Sequence[Algorithm], before: Sequence[Any], now: int, costs: Sequence[int], birth: int
) -> Iterator[State | None]:
    for i, (algorithm, state, cost) in enumerate(zip(algorithms, before, costs, strict=True)):
        try:
            yield algorithm.record(state, now, cost, birth) if cost else state
        except CostTooHigh as error:
            raise Uncountable(i, error.capacity) from error


def _receipt(algorithm: Algorithm, before: Any, after: State | None, cost: int, replaced: Any) -> Any:
    if replaced and isinstance(algorithm, Concurrent):
        return replaced
    return algorithm.receipt(before, after, cost) if cost and after is not None else ()


class Session:
    """A server's side of a connection.

    Attributes:
        next_reply: The reply to send instead of executing the next request, or None.
        fault: The fault that set `next_reply`, or None.
        is_over: Whether the server has stopped reading.
    """

    def __init__(self, server: Any, link: Link) -> None:
        self.server = server
        self.link = link
        self.next_reply: bytes | None = None
        self.fault: list[Any] | None = None
        self.is_over = False

    def send(self, data: bytes) -> None:
        """Send bytes to the client."""
        self.link.send("client", data)

    def take_next_reply(self, *, is_read: bool = True) -> bytes | None:
        """Clear and return `next_reply`; return an error for an invalid reply that the client would not read."""
        reply, self.next_reply = self.next_reply, None
        if reply is not None and self.fault is not None:
            self.fault[1], self.fault = self.server.now_us(), None
        if not is_read and reply in self.server.invalid:
            reply = self.server.wrong_replies[0]
        if reply is not None and reply is self.server.goodbye:
            self.is_over = True
        return reply
