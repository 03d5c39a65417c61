"""The store on a Redis or Valkey server: exact, and shared by everybody who can reach it.

One script decides all rules of a request where the states are (`gate.lua`), by the server's clock. This module ties the
parts together: what is said (`flows`, `codec`), to whom (`endpoint`, `cluster`), and over which connections (`peer`, and the
engine that all stores over a network share).
"""

from __future__ import annotations

import logging
import math
import time
from typing import TypeVar, cast

from redis import RedisCluster
from redis.asyncio import RedisCluster as AsyncRedisCluster

from headgate._checks import check_text
from headgate.clock import Clock, check_clock
from headgate.costs import Costs
from headgate.errors import ConfigError
from headgate.keys import Key, note_key
from headgate.rules import Rule
from headgate.stores.base import (
    Answer,
    AsyncGate,
    AsyncNotes,
    Gate,
    Guarantees,
    Receipts,
    check_deadline,
    check_note,
    note_bytes,
    note_text,
)
from headgate.stores.redis import codec, eviction
from headgate.stores.redis.cluster import ClusterEncoder, ClusterRouter, Nodes, TaskCluster, ThreadCluster
from headgate.stores.redis.codec import Reply, ScriptCall, Tag
from headgate.stores.redis.endpoint import RedisEndpoint, Target
from headgate.stores.redis.flows import Flow, Flows, single
from headgate.stores.redis.peer import NodePeer, RedisPeer
from headgate.stores.redis.urls import place_of
from headgate.stores.remote._async.gate import AsyncRemoteGate
from headgate.stores.remote._sync.gate import RemoteGate
from headgate.stores.remote.encoding import EncodedRequest, RequestEncoder
from headgate.stores.remote.store import RemoteStore
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine
from headgate.stores.request import Request

T = TypeVar("T")

logger = logging.getLogger("headgate")

DEFAULT_DEADLINE = 1.0
"""Seconds."""

INSPECT_SECONDS = 60.0
"""Least time between two inspections of a server's settings."""

_MAY_LOSE = "nothing when a client dies. When the server does, what it had not written to disk or replicated"


class RedisStore(RemoteStore):
    """Counts on a Redis (6.2 or later) or Valkey server.

    Args:
        target: A URL (`redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`; `redis+sentinel://` and
            `redis+cluster://`, see `urls`), or a client of redis-py, of which the address, the login and the settings of TLS
            are taken. Connections are the store's own: no pool is shared.
        namespace: Part of the identity of what is counted, for several applications on one server.
        deadline: Seconds after which a call is given up, with `StoreUnavailable`.
        clock: Where time comes from, instead of the server's clock.
        cluster: Whether the server is a node of a cluster; its URL or client may say so itself.
        hash_tag: In a cluster, what lies in one slot: `"key"`, all rules of a limiter that count by the same key, or
            `"limiter"`, everything that a limiter counts.

    Threads, tasks, event loops and processes may share a store; one that was made before a fork connects anew.

    In a cluster, rules of one request that lie in several slots are charged one after the other, and refunded if a later
    one refuses: in between, others may see units that are then given back, and a client that dies there leaves them
    counted until they expire. A hold over several slots can be neither confirmed nor renewed: that is a `ConfigError`. With
    `hash_tag="limiter"`, or where all rules count by the same key, none of this can happen.
    """

    def __init__(
        self,
        target: Target,
        *,
        namespace: str = "headgate",
        deadline: float = DEFAULT_DEADLINE,
        clock: Clock | None = None,
        cluster: bool = False,
        hash_tag: Tag = "key",
    ) -> None:
        place = place_of(target)
        tag = place.hash_tag or hash_tag
        if tag not in ("key", "limiter"):
            raise ConfigError(f"hash_tag is 'key' or 'limiter', not {tag!r}")
        self.endpoint = place.endpoint
        self.namespace = check_text("namespace=", namespace, 0)
        self.deadline = check_deadline(deadline)
        self.clock = check_clock(clock)
        is_client_of_cluster = isinstance(target, (RedisCluster, AsyncRedisCluster))
        self._is_cluster = cluster or place.is_cluster or is_client_of_cluster
        self._tag: Tag | None = cast(Tag, tag) if self._is_cluster else None
        self._evicts: str | None = None  # not known yet
        self._inspected_at = -math.inf
        self._threads = Nodes(lambda endpoint: ThreadEngine(self._peer(endpoint), self.deadline))
        self._tasks = Nodes(lambda endpoint: AsyncEngine(self._peer(endpoint), self.deadline))
        router = ClusterRouter(self.endpoint)
        self._thread_cluster = ThreadCluster(router, self._threads)
        self._task_cluster = TaskCluster(router, self._tasks)

    async def aclose(self) -> None:
        """Close all connections; those of other event loops as soon as these run."""
        self.is_closed = True
        await self._task_cluster.aclose()
        await super().aclose()

    @property
    def guarantees(self) -> Guarantees:
        """What this store keeps and what it cannot."""
        if self._evicts is None:
            evicted = "; and single keys at any time, if its maxmemory-policy is not noeviction"
        else:
            evicted = (
                f"; and single keys at any time: its maxmemory-policy is {self._evicts}"
                if self._evicts
                else ""
            )
        return Guarantees(
            shared=True, durable=True, all_or_nothing=self._tag != "key", may_lose=_MAY_LOSE + evicted
        )

    def inspect_server(self) -> None:
        """Find out what else is to be known of the server; part of `ping`, but only once a minute."""
        if self._may_inspect():
            self._note_eviction(eviction.ask(self.endpoint, self.deadline))

    async def ainspect_server(self) -> None:
        """Like `inspect_server`, for coroutines."""
        if self._may_inspect():
            self._note_eviction(await eviction.ask_async(self.endpoint, self.deadline))

    def _may_inspect(self) -> bool:
        """Return whether the last inspection, which takes a connection, was long ago."""
        is_due = time.monotonic() - self._inspected_at >= INSPECT_SECONDS
        if is_due:
            self._inspected_at = time.monotonic()
        return is_due

    def _note_eviction(self, policy: str | None) -> None:
        if policy and policy != self._evicts:
            logger.warning(
                "%s drops keys when it is full (maxmemory-policy %s), and so forgets what was counted; set noeviction",
                self.endpoint.name,
                policy,
            )
        self._evicts = policy

    @property
    def notes(self) -> AsyncNotes:
        """The store itself keeps notes."""
        return self

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        """Return the operations on the states of these rules; calls are given up after `deadline` seconds."""
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        self.endpoint.connection(seconds)  # fails here rather than at the first call
        engine = self._thread_cluster if self._is_cluster else self._threads.at(self.endpoint)
        return RemoteGate(self.endpoint.name, self._encoder(limiter, rules), engine, seconds)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """Return the operations on the states of these rules; calls are given up after `deadline` seconds."""
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        self.endpoint.async_connection(seconds)  # fails here rather than at the first call
        engine = self._task_cluster if self._is_cluster else self._tasks.at(self.endpoint)
        return AsyncRemoteGate(self.endpoint.name, self._encoder(limiter, rules), engine, seconds)

    async def note(self, name: str, text: str, seconds: float) -> str:
        """See `AsyncNotes.note`. The time is the server's, whatever `clock` the store has."""
        lasting = check_note(name, text, seconds)
        return note_text(
            await self._ask(codec.note(note_key(self.namespace, name), note_bytes(text), lasting))
        )

    async def noted(self, name: str) -> str | None:
        """See `AsyncNotes.noted`."""
        kept = await self._ask(codec.noted(note_key(self.namespace, name)))
        return None if kept is None else note_text(kept)

    async def _ask(self, request: ScriptCall) -> Reply:
        due = time.monotonic() + self.deadline
        if self._is_cluster:
            return await self._task_cluster.call(single(request), due)
        return await self._tasks.at(self.endpoint).call(request, due)

    def _peer(self, endpoint: RedisEndpoint) -> RedisPeer:
        return NodePeer(endpoint) if self._is_cluster else RedisPeer(endpoint)

    def _encoder(self, limiter: str, rules: tuple[Rule, ...]) -> RequestEncoder:
        flows = Flows(limiter, rules, self.namespace, self._tag, self.clock)
        return ClusterEncoder(flows) if self._is_cluster else RedisEncoder(flows)


class RedisEncoder:
    """Encodes the operations of a limiter's gate for a single server; see `RequestEncoder`."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows

    def ask(self, request: Request) -> EncodedRequest[Answer]:
        if request.operation == "record":
            return _only(self._flows.ask(request))
        return self._flows.question(request)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        return _only(self._flows.refund(receipts, cost, now))

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        return _only(self._flows.reset(key))


def _only(flow: Flow[T]) -> EncodedRequest[T]:
    """Return the one request of a flow that has no more."""

    def read(reply: Reply) -> T:
        try:
            flow.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        raise AssertionError("it had another request")

    try:
        return next(flow), read
    except StopIteration as stop:
        result: T = stop.value
        return None, lambda _: result
