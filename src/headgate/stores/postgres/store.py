"""The PostgreSQL store: exact, shared by all processes that can reach the database, and kept over a restart.

One call of an SQL function decides all rules of a request, by the database's clock; see `sql/migrations`. This module puts
the parts together: the encoding (`codec`), the address (`endpoint`), the connections (`peer`), and the engine that all
network stores share (`stores/remote`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from headgate._checks import check_text
from headgate.clock import Clock, check_clock
from headgate.costs import Costs
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
from headgate.stores.postgres.codec import Codec, NoteCall, Reply
from headgate.stores.postgres.endpoint import PostgresEndpoint
from headgate.stores.postgres.migrations import migrate
from headgate.stores.postgres.peer import PostgresPeer
from headgate.stores.remote._async.gate import AsyncRemoteGate
from headgate.stores.remote._sync.gate import RemoteGate
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.remote.store import RemoteStore
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine
from headgate.stores.request import Request

DEFAULT_DEADLINE = 1.0
"""Seconds."""

_MAY_LOSE = "nothing when a client dies; the last moments when the server does (synchronous_commit = off)"
_MAY_LOSE_DURABLE = "nothing"


class PostgresStore(RemoteStore):
    """Counts in a PostgreSQL (15 or later) database, in which `headgate migrate` or `store.migrate()` was run once.

    Args:
        url: `postgresql://user:password@host:port/database`, or any other connection string of libpq.
        namespace: Part of the identity of what is counted, for several applications in one database.
        deadline: Seconds after which a call is given up, with `StoreUnavailable`.
        durable: Whether a call waits until the database has what it counted on disk. Without, a call is several times
            quicker, and a crash of the server (not of a client) may forget what was counted in its last moments, about
            half a second.
        prepare: Whether to have the database parse the statements just once per connection. A pooler in transaction mode
            must know how to follow (PgBouncer from 1.21 on does); `False` works through any.
        clock: Where time comes from, instead of the database's clock.

    Threads, tasks, event loops and processes may share a store; one that was made before a fork connects anew.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "headgate",
        deadline: float = DEFAULT_DEADLINE,
        durable: bool = False,
        prepare: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.endpoint = PostgresEndpoint(url)
        self.namespace = check_text("namespace=", namespace, 0)
        self.deadline = check_deadline(deadline)
        self.durable = durable
        self.clock = check_clock(clock)
        peer = PostgresPeer(self.endpoint, durable, prepare)
        self._threads = ThreadEngine(peer, self.deadline)
        self._tasks = AsyncEngine(peer, self.deadline)

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
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        return RemoteGate(self.endpoint.name, self._encoder(limiter, rules), self._threads, seconds)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """Return the operations on the states of these rules; calls are given up after `deadline` seconds."""
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        return AsyncRemoteGate(self.endpoint.name, self._encoder(limiter, rules), self._tasks, seconds)

    async def note(self, name: str, text: str, seconds: float) -> str:
        """See `AsyncNotes.note`. The time is the database's, whatever `clock` the store has."""
        lasting = check_note(name, text, seconds)
        kept = await self._note(NoteCall(note_key(self.namespace, name), note_bytes(text), lasting))
        return note_text(kept)

    async def noted(self, name: str) -> str | None:
        """See `AsyncNotes.noted`."""
        kept = await self._note(NoteCall(note_key(self.namespace, name)))
        return None if kept is None else note_text(kept)

    def migrate(self) -> list[str]:
        """Make or update Headgate's tables and functions; see `headgate.stores.postgres.migrate`."""
        return migrate(self.endpoint.conninfo)

    def _encoder(self, limiter: str, rules: tuple[Rule, ...]) -> PostgresEncoder:
        return PostgresEncoder(Codec(limiter, rules, self.namespace, self.clock))

    async def _note(self, request: NoteCall) -> Any:
        return await self._tasks.call(request, time.monotonic() + self.deadline)


class PostgresEncoder:
    """Encodes the operations of a limiter's gate; see `RequestEncoder`."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def ask(self, request: Request) -> EncodedRequest[Answer]:
        call = self._codec.ask(request)
        return call, partial(call.plan.answer, request, call)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        return self._codec.refund(receipts, cost, now), _nothing

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        return self._codec.reset(key), _nothing


def _nothing(reply: Reply | None) -> None:
    """Read a reply that has nothing to say, if there is one."""
