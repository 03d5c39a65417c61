"""A simulated PostgreSQL database with the functions of the migrations, and the part of libpq that the store uses."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from psycopg import OperationalError
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus

from headgate.stores.postgres import codec as sql
from headgate.stores.postgres.peer import QUEUE
from tests.simulation.network import Link, Network
from tests.simulation.servers import (
    OtherWindow,
    Server,
    ServerRequest,
    Session,
    Uncountable,
    algorithm_of,
)

PORT = 5432
OPERATIONS = {
    sql.PEEK: "peek",
    sql.HIT: "hit",
    sql.MOVE: "hit",
    sql.RECORD: "record",
    sql.REFUND: "refund",
    sql.RESET: "reset",
}


class SimulatedPGconn:
    """The part of a libpq connection in pipeline mode that the store uses.

    Messages are frames: a length, a kind of one byte, and the body. A frame to the server is a statement with its arguments.
    A frame from the server is a value (`v`), no value (`n`), an error (`e`: SQLSTATE, severity, text), or the last message
    before the server ends the connection (`x`).
    """

    def __init__(self, link: Link) -> None:
        self.socket = link
        self.status = ConnStatus.OK
        self.nonblocking = 0
        self._buffer = bytearray()
        self._results: deque[Any] = deque()

    def enter_pipeline_mode(self) -> None:
        pass

    def send_query_prepared(self, name: bytes, arguments: Any, *_: Any) -> None:
        if self.status != ConnStatus.OK:
            raise OperationalError("no connection to the server")
        packed = b"".join(
            struct.pack(">i", -1) if a is None else struct.pack(">i", len(a)) + a for a in (name, *arguments)
        )
        self.socket.send("server", frame(b"q", packed))

    def send_query_params(self, text: bytes, arguments: Any, *_: Any) -> None:
        assert text == QUEUE.text
        self.send_query_prepared(QUEUE.name, arguments)

    def pipeline_sync(self) -> None:
        pass

    def flush(self) -> int:
        return 0

    def consume_input(self) -> None:
        link = self.socket
        if link.inbox:
            self._buffer += link.take()
            for kind, body in frames(self._buffer):
                self._add(kind, body)
        elif link.is_over:
            self.status = ConnStatus.BAD
            raise OperationalError("server closed the connection unexpectedly")

    def _add(self, kind: bytes, body: bytes) -> None:
        sqlstate, severity, text = body.split(b" ", 2) if kind in b"ex" else (None, None, b"")
        fields = {
            DiagnosticField.SQLSTATE: sqlstate,
            DiagnosticField.SEVERITY_NONLOCALIZED: severity,
            DiagnosticField.MESSAGE_PRIMARY: text,
        }
        status = {b"v": ExecStatus.TUPLES_OK, b"n": ExecStatus.COMMAND_OK}.get(kind, ExecStatus.FATAL_ERROR)
        result = SimpleNamespace(
            status=int(status),
            get_value=lambda *_: body or None,
            error_field=fields.get,
            get_error_message=lambda: text.decode(),
        )
        self._results += (
            (result, None)
            if kind == b"x"
            else (result, None, SimpleNamespace(status=int(ExecStatus.PIPELINE_SYNC)))
        )

    def is_busy(self) -> int:
        return not self._results

    def get_result(self) -> Any:
        return self._results.popleft()

    def finish(self) -> None:
        self.status = ConnStatus.BAD
        if self.socket.is_over and not self.socket.inbox:
            self.socket.network.unread += len(list(filter(None, self._results))) > 1
        self.socket.close()


def frame(kind: bytes, body: bytes) -> bytes:
    """Encode a message."""
    return struct.pack(">ic", len(body), kind) + body


def frames(buffer: bytearray) -> list[tuple[bytes, bytes]]:
    """Remove all complete messages from a buffer, and return them."""
    found = []
    while len(buffer) >= 5:
        size, kind = struct.unpack_from(">ic", buffer)
        if len(buffer) < 5 + size:
            break
        found.append((kind, bytes(buffer[5 : 5 + size])))
        del buffer[: 5 + size]
    return found


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
    invalid = wrong_replies[4:]
    goodbye = frame(b"x", b"57P01 FATAL terminating connection due to administrator command")

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        network.servers[PORT] = self

    def session(self, link: Link) -> Session:
        """Return the server's side of a new connection."""
        return PostgresSession(self, link)


class PostgresSession(Session):
    """A connection to a database."""

    def __init__(self, server: Server, link: Link) -> None:
        super().__init__(server, link)
        self._buffer = bytearray()

    def receive(self, data: bytes) -> None:
        """Reply to all complete statements."""
        self._buffer += data
        for _, body in frames(self._buffer):
            if not self.is_over:
                self.send(self._answer(_arguments(body)))
        if self.is_over:
            self.link.break_off()

    def _answer(self, statement: list[Any]) -> bytes:
        name, *arguments = statement
        if (reply := self.take_next_reply(is_read=name == b"one")) is not None:
            return reply
        if self.server.is_replica:
            return frame(b"e", b"25006 ERROR cannot execute UPDATE in a read-only transaction")
        if name == b"clean":
            return frame(b"v", b"")
        if name == QUEUE.name:
            queue, ticket, priority, lasting = arguments
            return frame(b"v", b"%c" % self.server.queue(queue, ticket.decode(), int(priority), int(lasting)))
        if name == b"one":
            key, operation, *shape, _ = arguments
            kind, a, b, c, d, at, cost, birth = map(int, shape)
            request = ServerRequest(
                OPERATIONS[int(operation)], [key], [algorithm_of(kind, a, b, c, d)], at, [cost], birth, [()]
            )
            reply = self._run(request)
        else:
            keys, _, program, _ = arguments
            numbers = [struct.unpack(">q", number)[0] for number in _elements(program)]
            requests = _decode(_elements(keys), numbers)
            reply = [number for request in requests for number in self._run(request)]
        head = sql._ARRAY_HEAD.pack(1, 0, sql._BIGINT, len(reply), 1)
        return frame(b"v", head + b"".join(sql._NUMBER.pack(8, number) for number in reply) if reply else b"")

    def _run(self, request: ServerRequest) -> list[int]:
        """Execute one request, and return its part of the reply."""
        blank, rules = [0] * sql.PER_RULE, len(request.keys)
        try:
            verdicts, receipts = self.server.execute(request)
        except OtherWindow as other:
            return [sql._OTHER_WINDOW, other.now, *blank[2:], *blank * (rules - 1)]
        except Uncountable as error:
            codes = [sql._UNCOUNTABLE if i == error.index else sql._ADMITTED for i in range(rules)]
            return [number for code in codes for number in (code, error.capacity, *blank[2:])]
        if request.operation == "record":
            return [sql._ADMITTED, *blank[1:]] * rules
        is_admitted = all(verdict.allowed for verdict in verdicts)
        reply: list[int] = []
        for i, (verdict, cost) in enumerate(zip(verdicts, request.costs[: len(verdicts)], strict=True)):
            retry = verdict.retry_after_us
            code = sql._ADMITTED if verdict.allowed else sql._NEVER if retry is None else retry
            reset = verdict.reset_after_us or 0
            receipt = receipts[i][:-1][:5] if receipts else ()
            left = verdict.remaining + (cost if is_admitted else 0)
            reply += [code, left, reset, reset, *receipt, *[0] * (5 - len(receipt))]
        return reply


def _decode(keys: list[bytes], program: list[int]) -> Iterator[ServerRequest]:
    """Yield the requests of a batch."""
    numbers = iter(program)
    for operation in numbers:
        at, birth, rules = next(numbers), next(numbers), next(numbers)
        own, algorithms, costs, receipts = list[bytes](), list[Any](), list[int](), list[tuple[int, ...]]()
        for _ in range(rules):
            own.append(keys[next(numbers) - 1])
            if operation == sql.RESET:
                continue
            shape = [next(numbers) for _ in range(5)]
            algorithms.append(algorithm_of(*shape))
            costs.append(next(numbers))
            receipt: tuple[int, ...] = ()
            if operation in (sql.REFUND, sql.MOVE):
                birth_of, *rest = (next(numbers) for _ in range(sql.PER_RECEIPT + 1))
                size = 8 if shape[0] == 3 else 2
                receipt = () if birth_of < 0 else (birth_of, *rest[: size - 1], rest[-1])
            receipts.append(receipt)
        yield ServerRequest(OPERATIONS[operation], own, algorithms, at, costs, birth, receipts)


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
