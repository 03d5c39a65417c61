"""The store in a PostgreSQL database: exact, shared by everybody who can reach it, and there after a restart.

One function call decides all rules of a request where the states are (`sql/schema.sql`), by the database's clock. This
module ties the parts together: what is said (`codec`), to whom (`endpoint`), and how, from threads (`threads`) and from
tasks (`tasks`).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from headgate.clock import Clock
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
from headgate.stores.breaker import stop_probes
from headgate.stores.postgres.codec import Codec, NoteCall, Reply, StateCall
from headgate.stores.postgres.endpoint import Endpoint
from headgate.stores.postgres.migrations import migrate
from headgate.stores.postgres.tasks import Pipes
from headgate.stores.postgres.threads import Lines
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

DEFAULT_DEADLINE = 1.0
"""Seconds."""

_MAY_LOSE = "nothing when a client dies; the last moments when the server does (synchronous_commit = off)"
_MAY_LOSE_DURABLE = "nothing"


class PostgresStore:
    """Counts in a PostgreSQL (14 or later) database, in which `headgate migrate` or `store.migrate()` was run once.

    Args:
        url: `postgresql://user:password@host:port/database`, or any other connection string of libpq.
        namespace: Part of the identity of what is counted, for several applications in one database.
        deadline: Seconds after which a call is given up, with `StoreUnavailable`.
        durable: Whether a call waits until the database has what it counted on disk. Without, a call is several times
            quicker, and a crash of the server (not of a client) may forget what was counted in its last moments, about
            half a second.
        max_connections: How many connections threads may have at once; tasks share one per event loop.
        prepare: Whether to have the database parse the statements just once per connection. A pooler in transaction mode
            must know how to follow (PgBouncer from 1.21 on does); `False` works through any.
        clock: Where time comes from, instead of the database's clock.

    Threads, tasks, event loops and processes may share a store; one that was made before a fork connects anew.
    """

    remote = True
    has_rules = False

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "headgate",
        deadline: float = DEFAULT_DEADLINE,
        durable: bool = False,
        max_connections: int = 10,
        prepare: bool = True,
        clock: Clock | None = None,
    ) -> None:
        if type(max_connections) is not int or max_connections < 1:
            raise ConfigError(
                f"max_connections must be a whole number of at least 1, not {max_connections!r}"
            )
        self.endpoint = Endpoint(url, prepare)
        self.namespace = namespace
        self.deadline = check_deadline(deadline)
        self.durable = durable
        self.clock = clock
        self._lines = Lines(self.endpoint, max_connections, durable)
        self._pipes = Pipes(self.endpoint, durable)

    @property
    def guarantees(self) -> Guarantees:
        """What this store keeps and what it cannot."""
        return Guarantees(
            shared=True, durable=True, may_lose=_MAY_LOSE_DURABLE if self.durable else _MAY_LOSE
        )

    @property
    def notes(self) -> AsyncNotes:
        """The store itself keeps notes."""
        return self

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        """Return the operations on the states of these rules; calls are given up after `deadline` seconds."""
        codec = Codec(limiter, rules, self.namespace, self.clock)
        return _PostgresGate(
            codec, self._lines, self.deadline if deadline is None else check_deadline(deadline)
        )

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """Return the operations on the states of these rules; calls are given up after `deadline` seconds."""
        codec = Codec(limiter, rules, self.namespace, self.clock)
        return _AsyncPostgresGate(
            codec, self._pipes, self.deadline if deadline is None else check_deadline(deadline)
        )

    async def note(self, name: str, text: str, seconds: float) -> str:
        """See `AsyncNotes.note`. The time is the database's, whatever `clock` the store has."""
        lasting = check_note(name, text, seconds)
        request = NoteCall(note_key(self.namespace, name), note_bytes(text), lasting)
        kept = await self._pipes.note(request, self.deadline)
        assert kept is not None  # it is ours if nobody else's was there
        return note_text(kept)

    async def noted(self, name: str) -> str | None:
        """See `AsyncNotes.noted`."""
        kept = await self._pipes.note(NoteCall(note_key(self.namespace, name)), self.deadline)
        return None if kept is None else note_text(kept)

    def migrate(self) -> list[str]:
        """Make or update Headgate's tables and functions; see `headgate.stores.postgres.migrate`."""
        return migrate(self.endpoint.conninfo)

    def close(self) -> None:
        """Close all connections; those of event loops as soon as these run."""
        stop_probes(self)
        self._lines.close()
        self._pipes.close()

    async def aclose(self) -> None:
        """Close all connections; those of other event loops as soon as these run."""
        stop_probes(self)
        await self._pipes.aclose()
        self._lines.close()

    def __enter__(self) -> PostgresStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> PostgresStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.endpoint.name}>"


class _PostgresGate:
    """A limiter's rules, for threads."""

    def __init__(self, codec: Codec, lines: Lines, deadline: float) -> None:
        self._codec = codec
        self._call = lines.call
        self._deadline = deadline

    def ask(self, request: Request) -> Answer:
        call = self._codec.ask(request)
        return call.plan.answer(request, call, self._call(call, self._deadline))

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        self._call(self._codec.refund(receipts, cost, now), self._deadline)

    def reset(self, key: Key | None) -> None:
        self._call(self._codec.reset(key), self._deadline)


class _AsyncPostgresGate:
    """A limiter's rules, for tasks.

    A caller may be cancelled at any time. What it had asked for then counts as charged if it has been sent; a hold is
    released; and what has been used or is given back is told to the end.
    """

    def __init__(self, codec: Codec, pipes: Pipes, deadline: float) -> None:
        self._codec = codec
        self._call = pipes.call
        self._deadline = deadline

    async def ask(self, request: Request) -> Answer:
        call = self._codec.ask(request)
        if request.operation == "record":
            reply = await self._call(call, self._deadline, must_leave=True)
        elif request.operation == "hold":
            release = partial(self._release, call, request.now)
            reply = await self._call(call, self._deadline, abandoned=release)
        else:
            reply = await self._call(call, self._deadline)
        return call.plan.answer(request, call, reply)

    async def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        await self._call(self._codec.refund(receipts, cost, now), self._deadline, must_leave=True)

    async def reset(self, key: Key | None) -> None:
        await self._call(self._codec.reset(key), self._deadline, must_leave=True)

    def _release(self, call: StateCall, now: int | None, reply: Reply) -> None:
        """Give back what was held for a caller that has been cancelled meanwhile."""
        receipts = call.plan.receipts(call, reply)
        if receipts is not None:
            refund = self._codec.refund(receipts, call.cost, now)
            self._call(refund, self._deadline, must_leave=True).add_done_callback(_mention_failure)


def _mention_failure(future: asyncio.Future[Reply]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("a hold whose caller was cancelled could not be released: %s", error)
