"""A cluster of three servers on this machine."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import redis

from headgate.testing.servers import Kind, RedisServer
from tests.integration.waiting import until

SLOTS = 16384
HIGHEST_PORT = 22_000
"""Nodes use a second port, 10000 above the client port; both must be below the range of ephemeral ports."""


class Cluster:
    """Three nodes that share the slots evenly."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes
        self.clients = [redis.Redis.from_url(node.url) for node in nodes]
        self.ids = [self._decide(i, "CLUSTER", "MYID").decode() for i in range(len(nodes))]
        for i, client in enumerate(self.clients):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(i * SLOTS // 3, (i + 1) * SLOTS // 3))
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        self._await_agreement()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def owner(self, slot: int) -> int:
        """Return the number of the node that has a slot."""
        return next(i for i in range(3) if slot < (i + 1) * SLOTS // 3)

    def begin_move(self, slot: int, source: int, target: int) -> None:
        """Start the migration of a slot; the target then serves new keys after ASKING."""
        self._decide(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        self._decide(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])

    def move(self, slot: int, source: int, target: int) -> None:
        """Move a slot and its keys."""
        self.begin_move(slot, source, target)
        self.finish_move(slot, source, target)

    def finish_move(self, slot: int, source: int, target: int) -> None:
        """Move the keys of a slot, and then the slot. This may be repeated after an error, and `begin_move` may not."""
        while keys := self._decide(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            self.clients[source].execute_command(
                "MIGRATE", "127.0.0.1", self.nodes[target].port, "", 0, 5000, "KEYS", *keys
            )
        for i in (target, source):
            self._decide(i, "CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])

    @contextlib.contextmanager
    def replica_of(self, node: int) -> Iterator[RedisServer]:
        """Run a replica of a node as long as a block does; afterwards the node has its slots again."""
        primary = self.nodes[node]
        primary.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        with RedisServer(primary.kind, primary.options, port=find_low_port()) as replica:
            replica.command("CLUSTER", "MEET", "127.0.0.1", str(primary.port))
            until(lambda: b"OK" in replica.command("CLUSTER", "REPLICATE", self.ids[node]))
            until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
            name = replica.command("CLUSTER", "MYID").split(b"\r\n")[1]
            self._await_replica(name)
            yield replica
            if b"role:slave" in primary.command("INFO", "replication"):
                self._await_replica(self.ids[node].encode())
                self.hand_over(primary)
            for other in self.nodes:
                other.command("CLUSTER", "FORGET", name.decode())

    def hand_over(self, replica: RedisServer) -> None:
        """Promote a replica without a vote of the other nodes."""
        until(lambda: b"OK" in replica.command("CLUSTER", "FAILOVER", "TAKEOVER"))
        until(lambda: b"role:master" in replica.command("INFO", "replication"))

    def _await_replica(self, name: bytes) -> None:
        """Return once all nodes know that one is a replica."""
        for node in self.nodes:
            until(
                lambda node=node: any(
                    line.startswith(name) and b"slave" in line
                    for line in node.command("CLUSTER", "NODES").splitlines()
                )
            )

    def round_trips(self) -> int:
        """Return how many calls of the script all nodes have counted."""
        stats: list[Any] = [client.info("commandstats") for client in self.clients]
        return sum(s.get("cmdstat_evalsha", {"calls": 0})["calls"] for s in stats)

    def keys(self) -> list[int]:
        """Return how many keys each node has."""
        return [int(client.dbsize()) for client in self.clients]  # type: ignore[arg-type]

    def _decide(self, node: int, *words: object) -> Any:
        return self.clients[node].execute_command(*words)  # type: ignore[arg-type]

    def _await_agreement(self) -> None:
        deadline = time.monotonic() + 30
        while not all(self._agrees(i) for i in range(len(self.nodes))):
            assert time.monotonic() < deadline, "the nodes do not agree"
            time.sleep(0.02)

    def _agrees(self, node: int) -> bool:
        state = self.nodes[node].command("CLUSTER", "INFO")
        slots = self._decide(node, "CLUSTER", "SLOTS")
        return b"cluster_state:ok" in state and len(slots) == len(self.nodes)


@contextlib.contextmanager
def running_cluster(kind: Kind) -> Iterator[Cluster]:
    """Run a cluster as long as a block does."""
    options = (
        *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
        *("--cluster-node-timeout", "5000", "--cluster-require-full-coverage", "no"),
    )
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(RedisServer(kind, options, port=find_low_port())) for _ in range(3)]
        cluster = Cluster(nodes)
        for client in cluster.clients:
            stack.callback(client.close)
        yield cluster


def find_low_port() -> int:
    """Return a port that is free and has another free one 10000 above."""
    for port in range(10_000 + time.monotonic_ns() % 10_000, HIGHEST_PORT):
        try:
            with (
                socket.create_server(("127.0.0.1", port)),
                socket.create_server(("127.0.0.1", port + 10_000)),
            ):
                return port
        except OSError:
            continue
    raise RuntimeError("no free port")
