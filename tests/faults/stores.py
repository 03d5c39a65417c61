"""The stores under test, each with its servers and faults."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import Kind, RedisServer, answers_ping
from tests.faults.history import Loss
from tests.faults.proxy import FaultProxy
from tests.faults.traffic import policy_text, subjects
from tests.integration.redis.cluster import Cluster, running_cluster
from tests.integration.redis.sentinel import fail_over, running_sentinel
from tests.integration.waiting import until
from tests.server.loopback import ServerProcess, no_room_for_files

AOF = ("--appendonly", "yes", "--appendfsync", "always")
"""Options of a server that syncs every write to disk before its reply."""

UNREPLICATED_US = 5_000_000
"""Maximum lag of a promoted replica, on a busy machine."""

ASYNC_COMMIT_US = 3_000_000
"""Maximum age of writes that asynchronous commit loses in a crash: half a second, and more on a busy machine."""

Fault = Callable[[random.Random], None]


def now_us() -> int:
    """Return the wall-clock time of the machine."""
    return time.time_ns() // 1000


@dataclass
class StoreUnderTest:
    """A store that workers call.

    Attributes:
        name: Name of the store.
        urls: URLs of the store; some go through a proxy.
        options: Arguments of the store.
        scale: Factor of the limits.
        shared: Whether workers share the counts.
        skewed: Whether workers may have wrong clocks, because the store uses a different clock.
        quotas: Whether calls may pass the argument `quota`.
        full_disk: Whether workers write to files themselves, and can therefore run out of space.
        slack_us: Maximum difference between the store's clock and the wall clock.
        deadline_us: Maximum duration of a call on an idle machine.
        most_at_once: Maximum number of concurrent hits. Further hits would wait until their deadline has passed, and would
            widen the bounds of the checker so that it may miss a single wrong decision.
        faults: Fault functions by name. Each repairs the damage before it returns.
        losses: Declared losses of the store.
        is_broken: Whether a server failed to restart.
    """

    name: str
    urls: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    scale: int = 1
    shared: bool = True
    skewed: bool = True
    quotas: bool = True
    full_disk: bool = False
    slack_us: int = 0
    deadline_us: int = 1_000_000
    most_at_once: int = 300
    faults: dict[str, Fault] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    is_broken: bool = False


@contextlib.contextmanager
def memory(load: int) -> Iterator[StoreUnderTest]:
    """A memory store in each worker."""
    yield StoreUnderTest("memory", ["memory://"], scale=8 * load, shared=False, skewed=False)


@contextlib.contextmanager
def sqlite(load: int) -> Iterator[StoreUnderTest]:
    """A database file shared by all workers."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/limits.db"
        yield StoreUnderTest("sqlite", [url], scale=load, skewed=False, full_disk=True, deadline_us=5_000_000)


@contextlib.contextmanager
def one_redis(load: int, kind: Kind) -> Iterator[StoreUnderTest]:
    """A server that syncs every write to disk, reached directly or through a fault proxy."""
    with RedisServer(kind, AOF) as server, FaultProxy(server.port) as proxy:
        urls = [server.url, f"redis://127.0.0.1:{proxy.port}/0"]
        store = StoreUnderTest(kind, urls, scale=3 * load)
        store.faults = {
            **server_faults(server),
            **proxy_faults(proxy),
            "restart the server": lambda rng: restart_redis(server),
            "fill the disk": lambda rng: fill_disk(server),
        }
        yield store


@contextlib.contextmanager
def redis_cluster(load: int) -> Iterator[StoreUnderTest]:
    """Three nodes; one at a time is stopped or killed, and slots move between them."""
    with running_cluster("redis") as cluster:
        for node in cluster.nodes:
            node.command("CONFIG", "SET", "appendfsync", "always")
            node.command("CONFIG", "SET", "appendonly", "yes")
            node.options = (*node.options, *AOF)
        store = StoreUnderTest(
            "cluster",
            [f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}?hash_tag=limiter"],
            scale=2 * load,
        )

        def stop_node(rng: random.Random) -> None:
            stop_server(rng.choice(cluster.nodes), rng)

        def kill_node(rng: random.Random) -> None:
            kill_server(rng.choice(cluster.nodes), rng)
            await_cluster(cluster)

        store.faults = {
            "stop a node": stop_node,
            "kill a node": kill_node,
            "move a slot": lambda rng: move_slot(cluster, rng),
        }
        yield store


@contextlib.contextmanager
def sentinel(load: int) -> Iterator[StoreUnderTest]:
    """A primary, its replica, and a sentinel that promotes the replica."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RedisServer("valkey")) for _ in range(2)]
        servers[0].command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        servers[1].command("REPLICAOF", "127.0.0.1", str(servers[0].port))
        until(lambda: b"state=online" in servers[0].command("INFO", "replication"))
        port = stack.enter_context(running_sentinel(servers[0]))
        store = StoreUnderTest("sentinel", [f"redis+sentinel://127.0.0.1:{port}/primary/0"], scale=2 * load)

        def promote(rng: random.Random) -> None:
            began = now_us()
            until(lambda: all(_is_connected(server) for server in servers))
            fail_over_to_replica(port, servers)
            # Until the old primary is demoted, some callers may still use it; its writes are lost.
            store.losses.append(Loss(began - UNREPLICATED_US, began, now_us()))

        def stop_any(rng: random.Random) -> None:
            began = now_us()
            stop_server(rng.choice(servers), rng)
            store.losses.append(Loss(began - UNREPLICATED_US, began, now_us()))

        store.faults = {"promote the replica": promote, "stop a server": stop_any}
        yield store


@contextlib.contextmanager
def postgres(load: int, *, durable: bool = True) -> Iterator[StoreUnderTest]:
    """A database, reached directly or through a fault proxy."""
    with PostgresServer() as server, FaultProxy(server.port) as proxy:
        from headgate.stores.postgres import migrate

        migrate(server.url)
        urls = [server.url, server.url.replace(f":{server.port}/", f":{proxy.port}/")]
        store = StoreUnderTest(
            "postgres" if durable else "postgres-async", urls, {"durable": durable}, scale=load
        )
        store.faults = {**server_faults(server), **proxy_faults(proxy)}
        if not durable:
            store.faults["kill the server"] = losing(store, store.faults["kill the server"], ASYNC_COMMIT_US)
        yield store


@contextlib.contextmanager
def server_on_redis(load: int) -> Iterator[StoreUnderTest]:
    """A Headgate server on a Redis server that syncs every write to disk; either may fail."""
    with RedisServer("redis", AOF) as redis_server, headgate_server(2 * load, redis_server.url) as store:
        store.name = "server-redis"
        store.most_at_once = 300  # the server sends hits to Redis concurrently, but to a file one by one
        store.faults = {
            **store.faults,
            "stop the server's Redis": lambda rng: stop_server(redis_server, rng),
            "kill the server's Redis": lambda rng: kill_server(redis_server, rng),
        }
        del store.faults["fill the disk"]  # this Headgate server writes no files
        yield store


@contextlib.contextmanager
def headgate_server(load: int, url: str | None = None) -> Iterator[StoreUnderTest]:
    """A Headgate server on the store at `url`, or on a SQLite file, with a policy file that changes."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "headgate.toml"
        url = url or f"sqlite:///{folder}/limits.db"
        usual, other = (policy_text(url, subjects(load), others=others) for others in (False, True))
        config.write_text(usual)
        with (
            ServerProcess(config) as server,
            FaultProxy(int(server.url.rpartition(":")[2])) as proxy,
        ):
            urls = [server.url, f"http://127.0.0.1:{proxy.port}"]
            store = StoreUnderTest("server", urls, scale=load, quotas=False, most_at_once=100)

            def reload(rng: random.Random) -> None:
                config.write_text(rng.choice((usual, other)))
                server.signal(signal.SIGHUP)

            def stop(rng: random.Random) -> None:
                server.signal(signal.SIGSTOP)
                sleep_randomly(rng, 0.05, 1.5)
                server.signal(signal.SIGCONT)

            def kill(rng: random.Random) -> None:
                server.kill()
                sleep_randomly(rng, 0, 0.3)
                server.start()

            def restart(rng: random.Random) -> None:
                server.stop()
                server.start()

            def fill_disk(rng: random.Random) -> None:
                with no_room_for_files(server.pid):
                    sleep_randomly(rng, 0.05, 0.5)

            store.faults = {
                **proxy_faults(proxy),
                "reload the policy": reload,
                "stop the server": stop,
                "kill the server": kill,
                "restart the server": restart,
                "fill the disk": fill_disk,
            }
            yield store


STORES: dict[str, Callable[[int], contextlib.AbstractContextManager[StoreUnderTest]]] = {
    "memory": memory,
    "sqlite": sqlite,
    "redis": lambda load: one_redis(load, "redis"),
    "valkey": lambda load: one_redis(load, "valkey"),
    "cluster": redis_cluster,
    "sentinel": sentinel,
    "postgres": postgres,
    "postgres-async": lambda load: postgres(load, durable=False),
    "server": headgate_server,
    "server-redis": server_on_redis,
}
"""Factories by name of the store. The argument is the load, a factor of the limits: bursts make more hits."""


# --- Faults of servers ----------------------------------------------------------------------------------------------


def server_faults(server: Any) -> dict[str, Fault]:
    """Return the faults of a server."""
    return {
        "stop the server": lambda rng: stop_server(server, rng),
        "kill the server": lambda rng: kill_server(server, rng),
    }


def sleep_randomly(rng: random.Random, shortest: float, longest: float) -> None:
    """Sleep for a random number of seconds while real processes run."""
    time.sleep(rng.uniform(shortest, longest))


def proxy_faults(proxy: FaultProxy) -> dict[str, Fault]:
    """Return the faults of the connections to a server."""

    def with_mode(mode: Any) -> Fault:
        def fault(rng: random.Random) -> None:
            proxy.mode = mode
            sleep_randomly(rng, 0.02, 0.3)
            proxy.mode = "forward"

        return fault

    return {
        "drop connections": lambda rng: proxy.drop_connections(),
        "lose replies": with_mode("lose replies"),
        "cut requests": with_mode("cut halfway"),
    }


def stop_server(server: Any, rng: random.Random) -> None:
    """Suspend a server, sometimes for longer than a deadline."""
    server.pause()
    sleep_randomly(rng, 0.05, 1.5)
    server.resume()


def kill_server(server: Any, rng: random.Random) -> None:
    """Kill a server as `kill -9` does, and restart it."""
    server.kill()
    sleep_randomly(rng, 0, 0.3)
    server.start()


def restart_redis(server: RedisServer) -> None:
    """Shut down a server cleanly, and restart it."""
    os.kill(server.pid, signal.SIGTERM)
    until(lambda: not answers_ping(server.port))
    server.kill()
    server.start()


def fill_disk(server: RedisServer) -> None:
    """Limit the size of a server's files until the server exits, or for two seconds, then restart it."""
    size = max((path.stat().st_size for path in server.folder.rglob("*.aof")), default=0)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size + 2000, resource.RLIM_INFINITY))
    deadline = time.monotonic() + 2
    while answers_ping(server.port) and time.monotonic() < deadline:
        time.sleep(0.02)
    server.kill()
    server.start()


def losing(store: StoreUnderTest, fault: Fault, span_us: int) -> Fault:
    """Return a fault that also declares that the last writes of the store may be lost."""

    def declared(rng: random.Random) -> None:
        began = now_us()
        fault(rng)
        store.losses.append(Loss(began - span_us, began, now_us()))

    return declared


def move_slot(cluster: Cluster, rng: random.Random) -> None:
    """Move a slot with keys from one node to another."""
    source, target = rng.sample(range(len(cluster.nodes)), 2)
    key: Any = cluster.clients[source].randomkey()
    if key is None:
        return
    slot = int(cluster.clients[source].cluster("KEYSLOT", key))

    def is_done(step: Callable[[int, int, int], None]) -> bool:
        try:
            step(slot, source, target)
        except redis.ResponseError:  # a restarted node briefly reports that the cluster is down
            return False
        return True

    await_cluster(cluster)
    until(lambda: is_done(cluster.begin_move))
    until(lambda: is_done(cluster.finish_move))


def await_cluster(cluster: Cluster) -> None:
    """Wait until all nodes report a healthy cluster.

    Raises:
        AssertionError: A node did not do so in time. The message contains the state that each node reports.
    """
    try:
        until(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in cluster.nodes))
    except AssertionError as error:
        seen = [
            node.command("CLUSTER", word).decode() for node in cluster.nodes for word in ("INFO", "NODES")
        ]
        raise AssertionError("\n".join(seen)) from error


def _is_connected(server: RedisServer) -> bool:
    """Return whether a server is a primary, or a replica that is connected to its primary."""
    about = server.command("INFO", "replication")
    return b"role:master" in about or b"master_link_status:up" in about


def fail_over_to_replica(port: int, servers: list[RedisServer]) -> None:
    """Promote the replica through the Sentinel, and wait until the old primary is its replica."""
    primaries = [b"role:master" in server.command("INFO", "replication") for server in servers]
    successor, before = servers[primaries.index(False)], servers[primaries.index(True)]
    fail_over(port, successor)
    until(lambda: b"master_link_status:up" in before.command("INFO", "replication"))
