"""A simulated Redis server that executes Headgate's script: alone, in a cluster, or with Sentinels."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random
from typing import Any

from hiredis import Reader
from redis.crc import key_slot

from headgate.algorithms import Algorithm, TokenBucket
from headgate.decision import Verdict
from headgate.quota import MAX_UNITS
from headgate.stores.redis import codec as lua
from tests.simulation.network import Link, Network
from tests.simulation.servers import (
    OtherWindow,
    Server,
    ServerRequest,
    Session,
    Uncountable,
    algorithm_of,
)

HOST = "10.0.0.1"
OPERATIONS = {
    lua.Operation.PEEK: "peek",
    lua.Operation.HIT: "hit",
    lua.Operation.HOLD: "hit",
    lua.Operation.RECORD: "record",
    lua.Operation.REFUND: "refund",
    lua.Operation.RESET: "reset",
    lua.Operation.QUEUE: "queue",
}
SLOTS = 16384
BLOCK = SLOTS // 16
"""Number of slots that move together."""


class RedisServer(Server):
    """A Redis server.

    Attributes:
        port: Its port.
        cluster: The cluster of this node, or None.
    """

    wrong_replies = (
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"-BUSY Redis is busy running a script.\r\n",
        b"*1\r\n$3\r\nabc\r\n",
        b":7\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    )
    invalid = wrong_replies[3:]

    def __init__(self, network: Network, port: int = 6379, cluster: Cluster | None = None) -> None:
        super().__init__(network)
        self.port = port
        self.cluster = cluster
        self.has_script = False
        network.servers[port] = self

    def session(self, link: Link) -> Session:
        """Return the server's side of a new connection."""
        return RedisSession(self, link)

    def restart(self) -> None:
        self.has_script = False


class RedisSession(Session):
    """A connection to a Redis server."""

    def __init__(self, server: Server, link: Link) -> None:
        super().__init__(server, link)
        self._reader = Reader()
        self._is_asking = False

    def receive(self, data: bytes) -> None:
        """Reply to all complete commands."""
        self._reader.feed(data)
        while (command := self._reader.gets()) is not False:
            reply = self._answer(command)
            self._is_asking = command[0] == b"ASKING"
            self.send(reply)

    def _answer(self, command: list[bytes]) -> bytes:
        name, server = command[0].upper(), self.server
        if name == b"CLUSTER":
            return _resp(server.cluster.slots())
        if name not in (b"EVAL", b"EVALSHA"):
            return b"+OK\r\n"
        size = int(command[2])
        keys, bodies = command[3 : 3 + size], command[3 + size :]
        is_read = not {"refund", "reset", "queue"} & {OPERATIONS[lua.Operation(body[0])] for body in bodies}
        if (reply := self.take_next_reply(is_read=is_read)) is not None:
            return reply
        if server.cluster and (elsewhere := server.cluster.redirection(server, keys, self._is_asking)):
            return _resp(elsewhere)
        if name == b"EVALSHA" and not server.has_script:
            return b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
        server.has_script = True
        replies = []
        for body in bodies:
            rules = lua._HEAD.unpack_from(body)[1]
            replies.append(run_script(server, keys[:rules], body))
            keys = keys[rules:]
        return _resp(replies)


def run_script(server: Server, keys: list[bytes], body: bytes) -> Any:
    """Execute one call of the script, and return its reply."""
    operation = OPERATIONS[lua.Operation(body[0])]
    if server.is_replica and operation != "peek":
        return Exception("READONLY You can't write against a read only replica.")
    if operation == "queue":
        _, _, _, lasting_ms, priority = lua._HEAD.unpack_from(body)
        ticket = body[lua._HEAD.size :].decode()
        return int(server.queue(keys[0], ticket, int(priority), int(lasting_ms) * 1000))
    request = _decode(operation, keys, body)
    try:
        verdicts, receipts = server.execute(request)
    except OtherWindow as other:
        return Exception(f"EDGES {other.now}")
    except Uncountable as error:
        return [error.index + 1, MAX_UNITS - error.capacity]
    if not verdicts:
        return 0
    packed = b"".join(map(_verdict, request.algorithms, verdicts))
    if body[0] == lua.Operation.HOLD:
        for algorithm, receipt in zip(request.algorithms, receipts, strict=bool(receipts)):
            own = receipt[:5] if isinstance(algorithm, TokenBucket) else receipt[:-1]
            packed += struct.pack(f"<{len(own)}q", *own)
    return packed


def _decode(operation: str, keys: list[bytes], body: bytes) -> ServerRequest:
    if operation == "reset":
        return ServerRequest(operation, keys)
    _, rules, at, cost, birth = lua._HEAD.unpack_from(body)
    place = lua._HEAD.size
    algorithms = []
    for _ in range(rules):
        algorithms.append(algorithm_of(*map(int, lua._RULE.unpack_from(body, place))))
        place += lua._RULE.size
    costs, receipts = [int(cost)] * rules, [()] * rules
    if cost < 0 or operation == "refund":
        costs, receipts = map(list, zip(*_own(body, place, rules), strict=True))
    return ServerRequest(operation, keys, algorithms, int(at), costs, int(birth), receipts)


def _own(body: bytes, place: int, rules: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the cost and the receipt of each rule."""
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
    """Encode a reply."""
    if isinstance(reply, Exception):
        return b"-%b\r\n" % str(reply).encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, list):
        return b"*%d\r\n%b" % (len(reply), b"".join(map(_resp, reply)))
    return b"$%d\r\n%b\r\n" % (len(reply), reply)


class Cluster:
    """The nodes of a cluster, and the slots of each.

    The nodes share their states: moving slots changes only their owner. One node is a spare without slots. It takes over the
    slots of a failed node, which then becomes the spare.
    """

    def __init__(self, network: Network) -> None:
        self.nodes = [RedisServer(network, port, self) for port in range(7000, 7004)]
        self._spare = self.nodes[-1]
        self._owners = [self.nodes[block % 3] for block in range(SLOTS // BLOCK)]
        self._moving: dict[int, RedisServer] = {}
        for node in self.nodes:
            node.states = self.nodes[0].states

    @property
    def states(self) -> dict[bytes, Any]:
        """The states of all nodes."""
        return self.nodes[0].states

    def slots(self) -> list[Any]:
        """Return the reply to CLUSTER SLOTS."""
        return [
            [block * BLOCK, block * BLOCK + BLOCK - 1, [HOST.encode(), node.port, b"id"]]
            for block, node in enumerate(self._owners)
        ]

    def redirection(self, node: RedisServer, keys: list[bytes], is_asking: bool) -> Exception | None:
        """Return the redirection of a node that does not own the slot of a request, or None."""
        slot = int(key_slot(keys[0]))
        owner, target = self._owners[slot // BLOCK], self._moving.get(slot // BLOCK)
        if node is owner and target is not None:
            return Exception(f"ASK {slot} {HOST}:{target.port}")
        if node is owner or (node is target and is_asking):
            return None
        return Exception(f"MOVED {slot} {HOST}:{owner.port}")

    def begin_move(self, rng: Random) -> int:
        """Start to move a random block of slots to another node; return the block."""
        block = rng.randrange(len(self._owners))
        others = [node for node in self.nodes if node not in (self._owners[block], self._spare)]
        self._moving[block] = rng.choice(others)
        return block

    def end_move(self, block: int) -> None:
        """Finish the move of a block."""
        if block in self._moving:
            self._owners[block] = self._moving.pop(block)

    def fail_over(self, rng: Random, snapshot: dict[bytes, Any]) -> RedisServer:
        """Move the slots of a random node, with older states, to the spare node; return the failed node."""
        failed = rng.choice([node for node in self.nodes if node is not self._spare])
        blocks = {block for block, node in enumerate(self._owners) if node is failed}
        for key in {*self.states, *snapshot}:
            if int(key_slot(key)) // BLOCK in blocks:
                self.states.pop(key, None)
                if key in snapshot:
                    self.states[key] = snapshot[key]
        self._owners = [self._spare if node is failed else node for node in self._owners]
        self._moving = {block: node for block, node in self._moving.items() if node is not failed}
        self._spare = failed
        return failed


class SentinelGroup:
    """A primary, its replica, and two Sentinels that report the address of the primary."""

    def __init__(self, network: Network) -> None:
        self.nodes = [RedisServer(network, port) for port in (6379, 6380)]
        self.sentinels = [SentinelServer(network, port, self) for port in (26379, 26380)]
        self.primary, self._replica = self.nodes
        self._replica.is_replica = True

    @property
    def states(self) -> dict[bytes, Any]:
        """The states of the primary."""
        return self.primary.states

    def promote(self, snapshot: dict[bytes, Any]) -> None:
        """Make the replica the primary; the old primary still accepts writes until `demote`."""
        self.primary, self._replica = self._replica, self.primary
        self.primary.states, self.primary.is_replica = snapshot, False

    def demote(self) -> None:
        """Make the old primary a replica of the new one."""
        self._replica.states, self._replica.is_replica = self.primary.states, True


class SentinelServer(Server):
    """A Sentinel."""

    def __init__(self, network: Network, port: int, group: SentinelGroup) -> None:
        super().__init__(network)
        self.group = group
        network.servers[port] = self

    def session(self, link: Link) -> Session:
        """Return the server's side of a new connection."""
        return SentinelSession(self, link)


class SentinelSession(RedisSession):
    """A connection to a Sentinel."""

    def _answer(self, command: list[bytes]) -> bytes:
        if command[0] != b"SENTINEL":
            return b"+OK\r\n"
        return _resp([HOST.encode(), str(self.server.group.primary.port).encode()])
