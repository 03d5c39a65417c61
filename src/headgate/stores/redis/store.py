"""The store on a Redis or Valkey server: exact, and shared by all processes that can reach it.

One script on the server decides all rules of a request (`gate.lua`), by the server's clock. This module puts the parts
together: the encoding (`operations`, `codec`), the addresses (`endpoint`, `cluster`), the connections (`peer`), and the
engine that all network stores share (`stores/remote`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from redis import RedisCluster
from redis.asyncio import RedisCluster as AsyncRedisCluster

from headgate._checks import check_text
from headgate.clock import Clock, check_clock
from headgate.errors import ConfigError, StoreError
from headgate.keys import PlainKey, storage_keys
from headgate.rules import Rule
from headgate.stores.base import Guarantees, check_deadline
from headgate.stores.redis import codec
from headgate.stores.redis.cluster import ClusterRouter, Nodes, TaskCluster, ThreadCluster
from headgate.stores.redis.endpoint import RedisEndpoint, Target
from headgate.stores.redis.eviction import INFO_MEMORY, read_policy
from headgate.stores.redis.operations import RedisOperations
from headgate.stores.redis.peer import NodePeer, RedisPeer
from headgate.stores.redis.slots import Tag, tagged_keys, tagged_name
from headgate.stores.redis.subscription import RedisSubscription
from headgate.stores.redis.urls import place_of
from headgate.stores.remote.encoding import RequestEncoder
from headgate.stores.remote.listener import WakeListener
from headgate.stores.remote.store import RemoteStateStore
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine

logger = logging.getLogger("headgate")

DEFAULT_DEADLINE = 1.0
"""Seconds."""

_MAY_LOSE = (
    "nothing if a client crashes; if the server crashes, counts that were not yet on disk or replicated"
)


class RedisStore(RemoteStateStore):
    """Counts on a Redis (6.2 or later) or Valkey server.

    Args:
        target: A URL (`redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`; `redis+sentinel://` and
            `redis+cluster://`, see `urls`), or a client of redis-py. The store uses the client's address, credentials and
            TLS settings, but opens separate connections.
        namespace: Separates the states of several applications on one server.
        deadline: Seconds after which a call fails with `StoreUnavailable`.
        clock: The clock to use instead of the server's.
        cluster: Whether the server is a node of a cluster; not needed if the URL or client is a cluster's.
        hash_tag: In a cluster, the states that share a slot: `"key"` for all rules of a limiter with the same key, or
            `"limiter"` for all states of a limiter.

    Threads, tasks, event loops and processes may share a store; after a fork, the child opens new connections.

    In a cluster, all states of a call must be in one slot. So a limiter whose rules count by different keys needs
    `hash_tag="limiter"`; otherwise it raises `ConfigError`.
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
            raise ConfigError(f"hash_tag must be 'key' or 'limiter', not {tag!r}")
        self.endpoint = place.endpoint
        self.namespace = check_text("namespace=", namespace, 0)
        self.deadline = check_deadline(deadline)
        self.clock = check_clock(clock)
        is_client_of_cluster = isinstance(target, (RedisCluster, AsyncRedisCluster))
        self._is_cluster = cluster or place.is_cluster or is_client_of_cluster
        self._tag: Tag | None = cast(Tag, tag) if self._is_cluster else None
        self._evicts: str | None = None  # not known yet
        self._threads = Nodes(lambda endpoint: ThreadEngine(self._peer(endpoint), self.deadline))
        self._tasks = Nodes(lambda endpoint: AsyncEngine(self._peer(endpoint), self.deadline))
        self._wake_ups = WakeListener(self._subscribe)
        router = ClusterRouter(self.endpoint)
        self._thread_cluster = ThreadCluster(self._threads, router)
        self._task_cluster = TaskCluster(self._tasks, router)

    @property
    def guarantees(self) -> Guarantees:
        """The guarantees of this store."""
        if self._evicts is None:
            evicted = "; single keys at any time, unless its maxmemory-policy is noeviction"
        else:
            evicted = (
                f"; single keys at any time, because its maxmemory-policy is {self._evicts}"
                if self._evicts
                else ""
            )
        return Guarantees(shared=True, durable=True, may_lose=_MAY_LOSE + evicted)

    def inspect_server(self) -> None:
        """Read the server's eviction policy; part of `ping`."""
        with suppress(StoreError):  # some providers forbid the command
            due = time.monotonic() + self.deadline
            self._note_eviction(read_policy(self._threads.at(self.endpoint).call(INFO_MEMORY, due)))

    async def ainspect_server(self) -> None:
        """Like `inspect_server`, for coroutines."""
        with suppress(StoreError):
            due = time.monotonic() + self.deadline
            self._note_eviction(read_policy(await self._tasks.at(self.endpoint).call(INFO_MEMORY, due)))

    def _note_eviction(self, policy: str | None) -> None:
        if policy and policy != self._evicts:
            logger.warning(
                "%s evicts keys when its memory is full (maxmemory-policy %s), which resets limits; set noeviction",
                self.endpoint.name,
                policy,
            )
        self._evicts = policy

    def _peer(self, endpoint: RedisEndpoint) -> RedisPeer:
        return NodePeer(endpoint) if self._is_cluster else RedisPeer(endpoint)

    def _encoder(self, limiter: str, rules: tuple[Rule, ...]) -> RequestEncoder:
        if self._tag is None:
            keys = storage_keys(self.namespace, limiter, rules)
        else:
            keys = tagged_keys(self.namespace, limiter, rules, self._tag)
        return RedisOperations(rules, keys, self.clock)

    def _thread_engine(self) -> ThreadCluster | ThreadEngine:
        self.endpoint.connection(self.deadline)  # raises now rather than at the first call
        return self._thread_cluster if self._is_cluster else self._threads.at(self.endpoint)

    def _task_engine(self) -> TaskCluster | AsyncEngine:
        self.endpoint.async_connection(self.deadline)  # raises now rather than at the first call
        return self._task_cluster if self._is_cluster else self._tasks.at(self.endpoint)

    def _name_state(self, limiter: str) -> Callable[[bytes, PlainKey], bytes]:
        if self._tag is not None:
            return tagged_name(self.namespace, limiter, self._tag)
        return super()._name_state(limiter)

    def _subscribe(self, process: str) -> RedisSubscription:
        return RedisSubscription(self.endpoint, process, self.deadline)

    def _queue_request(self, queue: bytes, ticket: str, priority: int, lasting_us: int) -> Any:
        return codec.queue_call(queue, ticket, priority, lasting_us)

    def _note_request(self, key: bytes, text: bytes | None, lasting_us: int, replaced: bytes | None) -> Any:
        return codec.get_note(key) if text is None else codec.note(key, text, lasting_us, replaced)
