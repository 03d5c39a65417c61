"""The store on a Redis or Valkey server: exact, and shared by everybody who can reach it.

One script decides all rules of a request where the states are (`gate.lua`), by the server's clock. This module ties the
parts together: what is said (`flows`, `codec`), to whom (`endpoint`, `cluster`), and how, from threads (`threads`) and from
tasks (`tasks`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from redis import RedisCluster
from redis.asyncio import RedisCluster as AsyncRedisCluster

from headgate.clock import Clock
from headgate.errors import ConfigError, StoreError
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
from headgate.stores.breaker import stop_probes
from headgate.stores.redis import codec, eviction
from headgate.stores.redis.cluster import ClusterLines, ClusterPipes, SlotMap
from headgate.stores.redis.codec import Reply, Tag
from headgate.stores.redis.endpoint import Target
from headgate.stores.redis.flows import Flow, Flows
from headgate.stores.redis.tasks import Pipes
from headgate.stores.redis.threads import Lines
from headgate.stores.redis.urls import place_of
from headgate.stores.request import Request

T = TypeVar("T")

logger = logging.getLogger("headgate")

DEFAULT_DEADLINE = 1.0
"""Seconds."""

_MAY_LOSE = "nothing when a client dies. When the server does, what it had not written to disk or replicated"


class RedisStore:
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
    counted until they expire. With `hash_tag="limiter"`, or where all rules count by the same key, that cannot happen.
    """

    remote = True
    has_rules = False

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
        self.namespace = namespace
        self.deadline = check_deadline(deadline)
        self.clock = clock
        self._cluster = cluster or place.is_cluster or isinstance(target, (RedisCluster, AsyncRedisCluster))
        self._tag: Tag | None = cast(Tag, tag) if self._cluster else None
        self._evicts: str | None = None  # not known yet
        self._slots = SlotMap(self.endpoint)
        self._lines: dict[float, Lines | ClusterLines] = {}
        self._pipes: dict[float, Pipes | ClusterPipes] = {}

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
        """Find out what else is to be known of the server; part of `ping`."""
        self._note_eviction(eviction.ask(self.endpoint, self.deadline))

    async def ainspect_server(self) -> None:
        """As `inspect_server`, for coroutines."""
        self._note_eviction(await eviction.ask_async(self.endpoint, self.deadline))

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
        lines = self._lines.get(seconds)
        if lines is None:
            self.endpoint.connection(seconds)  # fails here rather than at the first call
            lines = self._lines[seconds] = (
                ClusterLines(self._slots, seconds) if self._cluster else Lines(self.endpoint, seconds)
            )
        return _RedisGate(self._flows(limiter, rules), lines)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """Return the operations on the states of these rules; calls are given up after `deadline` seconds."""
        pipes = self._pipes_within(self.deadline if deadline is None else check_deadline(deadline))
        return _AsyncRedisGate(self._flows(limiter, rules), pipes)

    async def note(self, name: str, text: str, seconds: float) -> str:
        """See `AsyncNotes.note`. The time is the server's, whatever `clock` the store has."""
        lasting = check_note(name, text, seconds)
        request = codec.note(note_key(self.namespace, name), note_bytes(text), lasting)
        return note_text(await self._pipes_within(self.deadline).call(request))

    async def noted(self, name: str) -> str | None:
        """See `AsyncNotes.noted`."""
        kept = await self._pipes_within(self.deadline).call(codec.noted(note_key(self.namespace, name)))
        return None if kept is None else note_text(kept)

    def close(self) -> None:
        """Close all connections; those of event loops as soon as these run."""
        stop_probes(self)
        for lines in self._lines.values():
            lines.close()
        for pipes in self._pipes.values():
            pipes.close()

    async def aclose(self) -> None:
        """Close all connections; those of other event loops as soon as these run."""
        stop_probes(self)
        for pipes in self._pipes.values():
            await pipes.aclose()
        for lines in self._lines.values():
            lines.close()

    def _pipes_within(self, seconds: float) -> Pipes | ClusterPipes:
        """Return the connections for tasks whose calls are given up after so many seconds."""
        pipes = self._pipes.get(seconds)
        if pipes is None:
            self.endpoint.async_connection(seconds)  # fails here rather than at the first call
            pipes = self._pipes[seconds] = (
                ClusterPipes(self._slots, seconds) if self._cluster else Pipes(self.endpoint, seconds)
            )
        return pipes

    def _flows(self, limiter: str, rules: tuple[Rule, ...]) -> Flows:
        return Flows(limiter, rules, self.namespace, self._tag, self.clock)

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> RedisStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.endpoint.name}>"


class _RedisGate:
    """A limiter's rules, for threads."""

    def __init__(self, flows: Flows, lines: Lines | ClusterLines) -> None:
        self._flows = flows
        self._call = lines.call

    def ask(self, request: Request) -> Answer:
        return self._run(self._flows.ask(request))

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        self._run(self._flows.refund(receipts, cost, now))

    def reset(self, key: Key | None) -> None:
        self._run(self._flows.reset(key))

    def _run(self, flow: Flow[T]) -> T:
        """Make the calls that a flow asks for, and return what it returns."""
        try:
            request = next(flow)
            while True:
                try:
                    reply = self._call(request)
                except StoreError as error:
                    request = flow.throw(error)
                else:
                    request = flow.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result


class _AsyncRedisGate:
    """A limiter's rules, for tasks.

    A caller may be cancelled at any time. What it had asked for then counts as charged if it has been sent; a hold is
    released; and what has been used or is given back is told to the end.
    """

    def __init__(self, flows: Flows, pipes: Pipes | ClusterPipes) -> None:
        self._flows = flows
        self._call = pipes.call
        self._call_watched = pipes.call_watched
        self._running: set[asyncio.Task[Any]] = set()

    async def ask(self, request: Request) -> Answer:
        if request.operation == "record":
            return await self._to_the_end(self._flows.ask(request))
        if not self._flows.may_spread:
            return await self._ask_once(request)
        if request.operation == "peek":
            return await self._run(self._flows.ask(request))
        return await self._to_the_end(
            self._flows.ask(request), lambda answer: self._release(answer[1], request.cost, request.now)
        )

    async def _ask_once(self, request: Request) -> Answer:
        """Ask for a decision that takes a single call."""
        question = self._flows.question(request)
        if request.operation != "hold":
            return question.answer(await self._call(question.call))

        def release(reply: Reply) -> None:
            self._release(question.answer(reply)[1], request.cost, request.now)

        return question.answer(await self._call_watched(question.call, release))

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        await self._to_the_end(self._flows.refund(receipts, cost, now))

    async def reset(self, key: Key | None) -> None:
        await self._to_the_end(self._flows.reset(key))

    def _release(self, receipts: Receipts | None, cost: int, now: int | None) -> None:
        """Give back a hold whose caller was cancelled; what cannot be given back counts until it expires."""
        if receipts is not None:
            self._start(self._run(self._flows.refund(receipts, cost, now)))

    async def _run(self, flow: Flow[T]) -> T:
        """Make the calls that a flow asks for, and return what it returns."""
        try:
            request = next(flow)
            while True:
                try:
                    reply = await self._call(request)
                except StoreError as error:
                    request = flow.throw(error)
                else:
                    request = flow.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _to_the_end(self, flow: Flow[T], abandoned: Callable[[T], None] | None = None) -> T:
        """As `_run`, even if the caller is cancelled; the result is then handed to `abandoned`."""
        task = self._start(self._run(flow))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if abandoned is not None and not task.cancelled():
                task.add_done_callback(
                    lambda done: done.cancelled() or done.exception() or abandoned(done.result())
                )
            raise

    def _start(self, running: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(running)
        self._running.add(task)  # an event loop alone does not keep its tasks
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has seen it, unless it was cancelled
