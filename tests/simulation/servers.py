"""Servers that run the pure algorithms behind the encoding of the real ones.

They answer as soon as a request is complete. Counts survive a restart; a failover restores a snapshot. `next_reply` of a
session replaces one reply by an error or nonsense.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import h11
from hiredis import Reader

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
from headgate.policy import AsyncLivePolicy, parse_policy
from headgate.quota import MAX_UNITS
from headgate.rules import Rule
from headgate.stores.postgres import codec as sql
from headgate.stores.redis import codec as lua
from headgate_server.factory import make_app
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Link, frame, frames


class OtherWindow(Exception):
    """The time is in none of the windows in a request."""

    def __init__(self, now: int) -> None:
        self.now = now


@dataclass(frozen=True, slots=True)
class SentCalendar(Windows):
    """A calendar as a server knows it: by where three windows begin that follow each other."""

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


class Server:
    """Base class of the servers.

    Attributes:
        states: The stored states.
        is_up: Whether it accepts connections.
        silent_until: The end of a stop.
        skew_us: The error of its clock.
        done: The number of requests.
    """

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.states: dict[bytes, State] = {}
        self.is_up = True
        self.is_replica = False
        self.silent_until = 0.0
        self.skew_us = 0
        self.done = 0

    def now_us(self) -> int:
        """Return the time by this server's clock."""
        return self.loop.now_us() + self.skew_us

    def restart(self) -> None:
        """Drop the data that is not on disk."""

    def decide(
        self,
        keys: Sequence[bytes],
        algorithms: Sequence[Algorithm],
        now: int,
        costs: Sequence[int],
        birth: int,
        replaces: Sequence[Any] | None,
        *,
        writes: bool,
    ) -> tuple[list[Verdict], list[Any]]:
        """Decide a request, and return the verdict and the receipt of each rule."""
        before = [self.states.get(key) for key in keys]
        after, verdicts = decide_all(algorithms, before, now, costs, birth, replaces)
        if after is before or not writes:
            return verdicts, []
        receipts = [
            renewed
            if renewed and isinstance(algorithm, Concurrent)
            else algorithm.receipt(old, new, cost)
            if cost and new is not None
            else ()
            for algorithm, old, new, cost, renewed in zip(
                algorithms, before, after, costs, replaces or [None] * len(keys), strict=True
            )
        ]
        self._write(keys, after)
        return verdicts, receipts

    def record(
        self,
        keys: Sequence[bytes],
        algorithms: Sequence[Algorithm],
        now: int,
        costs: Sequence[int],
        birth: int,
    ) -> tuple[int, int] | None:
        """Count units; return the place of the rule that cannot, and how many it could."""
        after: list[State | None] = []
        for i, (key, algorithm, cost) in enumerate(zip(keys, algorithms, costs, strict=True)):
            before = self.states.get(key)
            try:
                after.append(algorithm.record(before, now, cost, birth) if cost else before)
            except CostTooHigh as error:
                return i, error.capacity
        self._write(keys, after)
        return None

    def refund(
        self,
        keys: Sequence[bytes],
        algorithms: Sequence[Algorithm],
        now: int,
        costs: Sequence[int],
        receipts: Any,
    ) -> None:
        """Give units back."""
        for key, algorithm, cost, receipt in zip(keys, algorithms, costs, receipts, strict=True):
            if receipt:
                self._write([key], [algorithm.refund(self.states.get(key), receipt, cost, now)])

    def _write(self, keys: Sequence[bytes], after: Sequence[State | None]) -> None:
        for key, state in zip(keys, after, strict=True):
            if state is None:
                self.states.pop(key, None)
            else:
                self.states[key] = state


class Session:
    """A server's side of a connection.

    Attributes:
        next_reply: A replacement of the next reply, or None; the request is not executed.
        fault: The fault that this is.
        is_over: Whether the server takes nothing more from it.
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

    def instead(self, *, is_read: bool = True) -> bytes | None:
        """Return what to send instead of an answer, once; an error if the client would not look at a wrong answer."""
        reply, self.next_reply = self.next_reply, None
        if reply is not None and self.fault is not None:
            self.fault[1], self.fault = self.server.now_us(), None
        if not is_read and reply in self.server.nonsense:
            reply = self.server.wrong_replies[0]
        if reply is not None and reply is self.server.goodbye:
            self.is_over = True
        return reply

    def close(self) -> None:
        """Handle the end of the client."""


# --- Redis ------------------------------------------------------------------------------------------------------------


class RedisServer(Server):
    """A Redis server with the script."""

    wrong_replies = (
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"-BUSY Redis is busy running a script.\r\n",
        b"*1\r\n$3\r\nabc\r\n",
        b":7\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    )
    nonsense = wrong_replies[3:]
    goodbye = b""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__(loop)
        self.has_script = False

    def session(self, link: Link) -> RedisSession:
        return RedisSession(self, link)

    def restart(self) -> None:
        self.has_script = False


class RedisSession(Session):
    """A connection to a Redis server."""

    def __init__(self, server: RedisServer, link: Link) -> None:
        super().__init__(server, link)
        self._reader = Reader()

    def receive(self, data: bytes) -> None:
        self._reader.feed(data)
        while (command := self._reader.gets()) is not False:
            self.send(self._answer(command))

    def _answer(self, command: list[bytes]) -> bytes:
        name = command[0].upper()
        if name not in (b"EVAL", b"EVALSHA"):
            return b"+OK\r\n"
        size = int(command[2])
        keys, bodies = command[3 : 3 + size], command[3 + size :]
        is_read = all(body[0] not in (lua.Operation.REFUND, lua.Operation.RESET) for body in bodies)
        if (reply := self.instead(is_read=is_read)) is not None:
            return reply
        if name == b"EVALSHA" and not self.server.has_script:
            return b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
        self.server.has_script = True
        replies = []
        for body in bodies:
            rules = lua._HEAD.unpack_from(body)[1]
            replies.append(self._run(keys[:rules], body))
            keys = keys[rules:]
        return b"*%d\r\n%b" % (len(replies), b"".join(map(_resp, replies)))

    def _run(self, keys: list[bytes], body: bytes) -> Any:
        server = self.server
        server.done += 1
        operation, rules, at, cost, birth = lua._HEAD.unpack_from(body)
        if server.is_replica and operation != lua.Operation.PEEK:
            return Exception("READONLY You can't write against a read only replica.")
        if operation == lua.Operation.RESET:
            for key in keys:
                server.states.pop(key, None)
            return 0
        now = server.now_us() if at < 0 else int(at)
        place = lua._HEAD.size
        algorithms = []
        for _ in range(rules):
            algorithms.append(algorithm_of(*map(int, lua._RULE.unpack_from(body, place))))
            place += lua._RULE.size
        costs, receipts = [int(cost)] * rules, [()] * rules
        if cost < 0 or operation == lua.Operation.REFUND:
            costs, receipts = map(list, zip(*_own(body, place, rules), strict=True))
        return self._decided(operation, keys, algorithms, now, costs, int(birth), receipts)

    def _decided(
        self, operation: int, keys: Any, algorithms: Any, now: int, costs: Any, birth: int, receipts: Any
    ) -> Any:
        server = self.server
        if operation == lua.Operation.REFUND:
            server.refund(keys, algorithms, now, costs, receipts)
            return 0
        assert operation in (1, 2, 3, 4), f"the simulated server does not know operation {operation}"
        replaces = [receipt or None for receipt in receipts] if any(receipts) else None
        try:
            if operation == lua.Operation.RECORD:
                failed = server.record(keys, algorithms, now, costs, birth)
                return 0 if failed is None else [failed[0] + 1, MAX_UNITS - failed[1]]
            verdicts, given = server.decide(
                keys, algorithms, now, costs, birth, replaces, writes=operation != lua.Operation.PEEK
            )
        except OtherWindow as other:
            return Exception(f"EDGES {other.now}")
        packed = b"".join(map(_verdict, algorithms, verdicts))
        if operation == lua.Operation.HOLD:
            for algorithm, receipt in zip(algorithms, given, strict=bool(given)):
                own = receipt[:5] if isinstance(algorithm, TokenBucket) else receipt[:-1]
                packed += struct.pack(f"<{len(own)}q", *own)
        return packed


def _own(body: bytes, place: int, rules: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    for _ in range(rules):
        cost, numbers = lua._OWN.unpack_from(body, place)
        place += lua._OWN.size
        yield int(cost), tuple(map(int, struct.unpack_from(f"<{numbers}d", body, place)))
        place += 8 * numbers


def _verdict(algorithm: Algorithm, verdict: Verdict) -> bytes:
    tick = algorithm.tick if isinstance(algorithm, TokenBucket) else 1
    retry, reset = verdict.retry_after_us, verdict.reset_after_us
    lag = (retry or reset or 0) % tick
    flags = verdict.allowed + 2 * (retry is not None) + 4 * (reset is not None)
    ticks = [((us or 0) - (lag if us else 0)) // tick for us in (retry, reset)]
    return lua._VERDICT.pack(flags, verdict.remaining, *ticks, lag)


def _resp(reply: Any) -> bytes:
    if isinstance(reply, Exception):
        return b"-%b\r\n" % str(reply).encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, list):
        return b"*%d\r\n%b" % (len(reply), b"".join(map(_resp, reply)))
    return b"$%d\r\n%b\r\n" % (len(reply), reply)


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


class PostgresServer(Server):
    """A database with the functions of the migrations."""

    wrong_replies = (
        frame(b"e", b"40001 ERROR could not serialize access"),
        frame(b"e", b"57014 ERROR canceling statement due to statement timeout"),
        frame(b"e", b"53200 ERROR out of shared memory"),
        frame(b"e", b"XX000 ERROR internal error"),
        frame(b"v", b"\0\0\0\1\0\0\0\0\0\0\0\x14\0\0\0\1\0\0\0\1\0\0\0\x08\0\0\0\0\0\0\0\7"),
        frame(b"n", b""),
    )
    nonsense = wrong_replies[4:]
    goodbye = frame(b"x", b"57P01 FATAL terminating connection due to administrator command")

    def session(self, link: Link) -> PostgresSession:
        return PostgresSession(self, link)


class PostgresSession(Session):
    """A connection to a database."""

    def __init__(self, server: PostgresServer, link: Link) -> None:
        super().__init__(server, link)
        self._buffer = bytearray()

    def receive(self, data: bytes) -> None:
        self._buffer += data
        for _, body in frames(self._buffer):
            if not self.is_over:
                self.send(self._answer(_arguments(body)))
        if self.is_over:
            self.link.break_off()

    def _answer(self, statement: list[Any]) -> bytes:
        name, *arguments = statement
        if (reply := self.instead(is_read=name == b"one")) is not None:
            return reply
        if self.server.is_replica:
            return frame(b"e", b"25006 ERROR cannot execute UPDATE in a read-only transaction")
        if name == b"clean":
            return frame(b"v", b"")
        self.server.done += 1
        if name == b"one":
            key, operation, *numbers, _ = arguments
            kind, a, b, c, d, at, cost, birth = map(int, numbers)
            reply = self._run(int(operation), [key], [(kind, a, b, c, d)], at, [cost], birth, [()])
        else:
            keys, _, program, _ = arguments
            reply = self._program(_elements(keys), [struct.unpack(">q", n)[0] for n in _elements(program)])
        head = sql._ARRAY_HEAD.pack(1, 0, sql._BIGINT, len(reply), 1)
        return frame(b"v", head + b"".join(sql._NUMBER.pack(8, number) for number in reply) if reply else b"")

    def _program(self, keys: list[bytes], program: list[int]) -> list[int]:
        reply: list[int] = []
        numbers = iter(program)
        for operation in numbers:
            at, birth, rules = next(numbers), next(numbers), next(numbers)
            own: list[bytes] = []
            shapes, costs, receipts = [], [], []
            for _ in range(rules):
                own.append(keys[next(numbers) - 1])
                if operation == sql.RESET:
                    continue
                shapes.append(tuple(next(numbers) for _ in range(5)))
                costs.append(next(numbers))
                receipt: tuple[int, ...] = ()
                if operation in (sql.REFUND, sql.MOVE):
                    birth_of, *rest = (next(numbers) for _ in range(sql.PER_RECEIPT + 1))
                    size = 8 if shapes[-1][0] == 3 else 2
                    receipt = () if birth_of < 0 else (birth_of, *rest[: size - 1], rest[-1])
                receipts.append(receipt)
            reply += self._run(operation, own, shapes, at, costs, birth, receipts)
        return reply

    def _run(
        self, operation: int, keys: Any, shapes: Any, at: int, costs: Any, birth: int, receipts: Any
    ) -> list[int]:
        server = self.server
        now = server.now_us() if at < 0 else at
        if operation == sql.RESET:
            for key in keys:
                server.states.pop(key, None)
            return []
        algorithms = [algorithm_of(*shape) for shape in shapes]
        if operation == sql.REFUND:
            server.refund(keys, algorithms, now, costs, receipts)
            return []
        assert operation in (sql.PEEK, sql.HIT, sql.RECORD, sql.MOVE), (
            f"the simulated database does not know {operation}"
        )
        blank = [0] * sql.PER_RULE
        replaces = [receipt or None for receipt in receipts] if any(receipts) else None
        try:
            if operation == sql.RECORD:
                failed = server.record(keys, algorithms, now, costs, birth) or (-1, 0)
                codes = [sql._UNCOUNTABLE if i == failed[0] else sql._ADMITTED for i in range(len(keys))]
                return [number for code in codes for number in (code, failed[1], *blank[2:])]
            verdicts, given = server.decide(
                keys, algorithms, now, costs, birth, replaces, writes=operation != sql.PEEK
            )
        except OtherWindow as other:
            return [sql._OTHER_WINDOW, other.now, *blank[2:], *blank * (len(keys) - 1)]
        is_admitted = all(verdict.allowed for verdict in verdicts)
        reply: list[int] = []
        for i, (verdict, cost) in enumerate(zip(verdicts, costs, strict=True)):
            retry = verdict.retry_after_us
            code = sql._ADMITTED if verdict.allowed else sql._NEVER if retry is None else retry
            reset = verdict.reset_after_us or 0
            receipt = given[i][:-1][:5] if given else ()
            left = verdict.remaining + (cost if is_admitted else 0)
            reply += [code, left, reset, reset, *receipt, *[0] * (5 - len(receipt))]
        return reply


def _arguments(body: bytes) -> list[bytes | None]:
    found: list[bytes | None] = []
    place = 0
    while place < len(body):
        (size,) = struct.unpack_from(">i", body, place)
        place += 4
        found.append(None if size < 0 else body[place : place + size])
        place += max(0, size)
    return found


def _elements(array: bytes) -> list[bytes]:
    return [each for each in _arguments(array[sql._ARRAY_HEAD.size :]) if each is not None]


# --- Our server -------------------------------------------------------------------------------------------------------


class HeadgateServer(Server):
    """The real application of `headgate serve`, on a store in memory, behind a small HTTP server."""

    wrong_replies = (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<p>hi</p>",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    )
    nonsense = ()
    goodbye = b""

    def __init__(self, loop: SimulatedLoop, policy: str) -> None:
        super().__init__(loop)
        self._policy = parse_policy(policy)
        self._live: Any = None
        self.app: Any = None

    def open(self) -> None:
        """Make the application."""
        self._live = AsyncLivePolicy(self._policy, clock=ServerClock(self))
        self.app = make_app(self._live)

    def reload(self, policy: str) -> None:
        """Put another policy in force."""
        self._live._use(parse_policy(policy))

    def session(self, link: Link) -> HttpSession:
        return HttpSession(self, link)


class ServerClock(WallClock):
    """The clock of a simulated server, as a limiter takes it."""

    def __init__(self, server: Server) -> None:
        self.now_us = server.now_us  # type: ignore[method-assign]


def policy_of(subjects: Sequence[Any], *, others: bool) -> str:
    """Return the policy file of some limiters, with the one or the other limits."""
    lines = ['[store]\nurl = "memory://"\n']
    for subject in subjects:
        rules = [_toml(rule) for rule in (subject.others if others else subject.rules)]
        lines.append(f"[limiters.{subject.name}]\nrules = [{', '.join(rules)}]\n")
    return "\n".join(lines)


def _toml(rule: Rule) -> str:
    def data(quota: Any) -> str:
        return json.dumps(rule.data_of(quota))

    parts = {"kind": json.dumps(rule.kind), "name": json.dumps(rule.name), "quota": data(rule.quota)}
    if rule.kind == "concurrent":
        parts["lease"] = f'"{rule.quota.period_us // 1000}ms"'
    if rule.kind == "sliding_window":
        parts["buckets"] = str(rule.buckets)
    if rule.scope:
        parts["scope"] = json.dumps(rule.scope)
    if rule.unit != "requests" and rule.kind != "concurrent":
        parts["unit"] = json.dumps(rule.unit)
    parts["tiers"] = "{ " + ", ".join(f"{tier} = {data(own)}" for tier, own in rule.tiers.items()) + " }"
    return "{ " + ", ".join(f"{name} = {value}" for name, value in parts.items()) + " }"


class HttpSession(Session):
    """A connection to our server."""

    def __init__(self, server: HeadgateServer, link: Link) -> None:
        super().__init__(server, link)
        self._parser = h11.Connection(h11.SERVER)
        self._request: Any = None
        self._body = b""
        self._task: asyncio.Task[None] | None = None

    def receive(self, data: bytes) -> None:
        self._parser.receive_data(data)
        while isinstance(event := self._parser.next_event(), (h11.Request, h11.Data, h11.EndOfMessage)):
            if isinstance(event, h11.Request):
                self._request, self._body = event, b""
            elif isinstance(event, h11.Data):
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                if (reply := self.instead()) is not None:
                    self.send(reply)
                    self.link.break_off()
                    return
                self._task = self.server.loop.create_task(
                    self._serve(), context=self.server.loop.world.context
                )

    async def _serve(self) -> None:
        self.server.done += 1
        request, body = self._request, self._body
        scope = {
            "type": "http",
            "method": request.method.decode(),
            "path": request.target.decode(),
            "raw_path": request.target,
            "query_string": b"",
            "headers": list(request.headers),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        sent = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.server.app(scope, receive, send)
        start, *rest = sent
        whole = b"".join(message.get("body", b"") for message in rest)
        out = self._parser.send(h11.Response(status_code=start["status"], headers=start["headers"]))
        out += self._parser.send(h11.Data(data=whole)) + self._parser.send(h11.EndOfMessage())
        if self._parser.our_state is h11.DONE:
            self._parser.start_next_cycle()
        self.send(out)

    def close(self) -> None:
        pass  # a request that has begun is answered, to nobody
