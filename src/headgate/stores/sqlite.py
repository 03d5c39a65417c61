"""The SQLite store: exact, durable, and shared by the processes of one machine.

The pure functions run inside `BEGIN IMMEDIATE`, so that no other thread or process writes between reading and writing. A
state is one row. Expired states are removed incrementally: every 64th write checks the next 128 rows.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Sequence
from functools import partial

from headgate._checks import check_text
from headgate.algorithms import Algorithm, Concurrent, Receipt, State, decide_all, is_state
from headgate.clock import Clock
from headgate.costs import Costs
from headgate.decision import Decision
from headgate.errors import StoreConflict
from headgate.keys import Key, note_key, storage_keys
from headgate.rules import Rule
from headgate.stores.base import (
    RECORDED,
    Answer,
    AsyncGate,
    AsyncNotes,
    Births,
    Gate,
    Receipts,
    check_note,
    given_back,
    note_bytes,
    note_text,
    plain_tiers,
)
from headgate.stores.queues import AsyncQueues, QueueNames, Queues
from headgate.stores.request import Request
from headgate.stores.sqlite_file import SQLiteFile, look_after
from headgate.stores.sqlite_queues import SCHEMA as QUEUE_SCHEMA
from headgate.stores.sqlite_queues import AsyncSQLiteQueues, SQLiteQueues, Tickets

_WRITES_PER_CLEANING = 64
_ROWS_PER_CLEANING = 128
_GRACE_US = 3_600_000_000  # additional lifetime of a state that was written with an explicit `now=`

_NOTES_PER_CLEANING = 2

_CREATE = """
    CREATE TABLE IF NOT EXISTS headgate_states (
        id BLOB PRIMARY KEY,
        state BLOB NOT NULL,     -- 64-bit integers, little-endian
        expires INTEGER NOT NULL -- microseconds since the epoch, by this store's clock
    ) WITHOUT ROWID
"""
_SELECT = "SELECT state FROM headgate_states WHERE id = ?"
_UPSERT = "INSERT OR REPLACE INTO headgate_states VALUES (?, ?, ?)"
_DELETE = "DELETE FROM headgate_states WHERE id = ?"
_NEXT = "SELECT id, expires FROM headgate_states WHERE id > ? ORDER BY id LIMIT ?"

_CREATE_NOTES = """
    CREATE TABLE IF NOT EXISTS headgate_notes (
        id BLOB PRIMARY KEY,
        note BLOB NOT NULL,      -- text in UTF-8
        expires INTEGER NOT NULL -- microseconds since the epoch, by this store's clock
    ) WITHOUT ROWID
"""
_INDEX_NOTES = "CREATE INDEX IF NOT EXISTS headgate_notes_expires ON headgate_notes (expires)"
_SELECT_NOTE = "SELECT note, expires FROM headgate_notes WHERE id = ? AND expires > ?"
_KEEP_NOTE = "INSERT OR REPLACE INTO headgate_notes VALUES (?, ?, ?)"
_CLEAN_NOTES = """
    DELETE FROM headgate_notes WHERE id IN (
        SELECT id FROM headgate_notes WHERE expires <= ? ORDER BY expires LIMIT ?
    )
"""


class SQLiteStore(SQLiteFile):
    """Counts in an SQLite file.

    Args:
        path: The file, created if it does not exist; `":memory:"` for a database in memory.
        timeout: Seconds to wait for other writing processes before `StoreUnavailable` is raised.
        namespace: Part of the identity of counts, for several applications in one file.
        clock: The clock; by default the machine's wall clock, shared by all its processes.

    Several threads, processes and event loops may use one file. Each process has its own store; after a fork the child opens
    the file again. Use a local disk: SQLite's locks are not reliable on network file systems.
    """

    schema = (_CREATE, _CREATE_NOTES, _INDEX_NOTES, *QUEUE_SCHEMA)
    remote = False
    has_rules = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float = 5.0,
        namespace: str = "headgate",
        clock: Clock | None = None,
    ) -> None:
        self.namespace = check_text("namespace=", namespace, 0)
        self._writes = 0
        self._cleaned_up_to = b""
        super().__init__(path, timeout=timeout, clock=clock)
        self.tickets = Tickets(self.clock)

    @property
    def notes(self) -> AsyncNotes:
        """The store itself."""
        return self

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        return _SQLiteGate(self, limiter, rules)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        return _WorkerGate(self, _SQLiteGate(self, limiter, rules))

    def bind_queues(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Queues:
        """Return the queues of a limiter's waiting calls."""
        return SQLiteQueues(self, QueueNames(self.namespace, limiter, rules), self.tickets)

    def bind_queues_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncQueues:
        """Return the queues of a limiter's waiting calls."""
        return AsyncSQLiteQueues(self, QueueNames(self.namespace, limiter, rules), self.tickets)

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        """See `AsyncNotes.note`."""
        lasting = check_note(name, text, seconds, replaces)
        row, note = note_key(self.namespace, name), note_bytes(text)
        replaced = None if replaces is None else note_bytes(replaces)

        def work(connection: sqlite3.Connection) -> bytes:
            now = self.clock.now_us()
            kept, expires = connection.execute(_SELECT_NOTE, (row, now)).fetchone() or (note, 0)
            if kept not in (note, replaced):
                return kept
            connection.execute(_KEEP_NOTE, (row, note, max(expires, now + lasting)))
            connection.execute(_CLEAN_NOTES, (now, _NOTES_PER_CLEANING))
            return note

        return note_text(await self.in_worker(partial(self.transact, work, write=True)))

    async def get_note(self, name: str) -> str | None:
        """See `AsyncNotes.get_note`."""
        row = note_key(self.namespace, name)

        def work(connection: sqlite3.Connection) -> tuple[bytes, int] | None:
            kept: tuple[bytes, int] | None = connection.execute(
                _SELECT_NOTE, (row, self.clock.now_us())
            ).fetchone()
            return kept

        kept = await self.in_worker(partial(self.transact, work, write=False))
        return None if kept is None else note_text(kept[0])

    def save(
        self,
        connection: sqlite3.Connection,
        row: bytes,
        algorithm: Algorithm,
        state: State | None,
        explicit_now: int | None,
    ) -> None:
        """Write a state with its expiry by this store's clock, which is later if the call has an explicit time."""
        if state is None:
            connection.execute(_DELETE, (row,))
            return
        expires = algorithm.fresh_at(state)
        if explicit_now is not None:
            expires = self.clock.now_us() + max(0, expires - explicit_now) + _GRACE_US
        connection.execute(_UPSERT, (row, struct.pack(f"<{len(state)}q", *state), expires))
        self._writes += 1
        if self._writes % _WRITES_PER_CLEANING == 0:
            self._clean(connection)

    def _clean(self, connection: sqlite3.Connection) -> None:
        """Remove expired states among the next few rows."""
        rows = connection.execute(_NEXT, (self._cleaned_up_to, _ROWS_PER_CLEANING)).fetchall()
        now = self.clock.now_us()
        connection.executemany(_DELETE, [(row,) for row, expires in rows if expires <= now])
        self._cleaned_up_to = rows[-1][0] if len(rows) == _ROWS_PER_CLEANING else b""


class _SQLiteGate:
    """A limiter's rules over the rows of an SQLite store."""

    def __init__(self, store: SQLiteStore, limiter: str, rules: tuple[Rule, ...]) -> None:
        self._store = store
        self._tiers = plain_tiers(rules, shared=True)
        self._names = tuple(rule.name for rule in rules)
        self._rows = storage_keys(store.namespace, limiter, rules)
        self._new_birth = Births()

    def decide(self, request: Request) -> Answer:
        decide = self._record if request.operation == "record" else self._decide
        work = partial(decide, request, self._tiers.for_request(request), self._rows(request.key))
        writes = request.operation != "peek" and (request.charges or request.replaces is not None)
        return self._store.transact(work, write=writes)

    def _decide(
        self,
        request: Request,
        algorithms: Sequence[Algorithm],
        rows: Sequence[bytes],
        connection: sqlite3.Connection,
    ) -> Answer:
        at = self._store.clock.now_us() if request.now is None else request.now
        birth, costs = self._new_birth(), request.costs(len(rows))
        replaces = [receipt or None for _, receipt in request.replaces or ()] or [None] * len(rows)
        states = [_load(connection, *each) for each in zip(rows, algorithms, strict=True)]
        after, verdicts = decide_all(
            algorithms, states, at, costs, birth, replaces, is_final=request.is_punishable
        )
        decision = Decision.make(self._names, verdicts)
        if request.operation == "peek":
            return decision, None
        receipts: list[tuple[object, Receipt]] = []
        for i, (algorithm, row, cost) in enumerate(zip(algorithms, rows, costs, strict=True)):
            before, state = states[i], after[i]
            if request.operation == "hold" and decision.allowed:
                receipts.append((row, algorithm.receipt(before, state, cost) if state and cost else ()))
            if state is not before:
                self._store.save(connection, row, algorithm, state, request.now)
                if request.replaces is not None and not cost:
                    self._wake_waiter(connection, algorithm, row)
        return decision, tuple(receipts) if any(receipt for _, receipt in receipts) else None

    def _record(
        self,
        request: Request,
        algorithms: Sequence[Algorithm],
        rows: Sequence[bytes],
        connection: sqlite3.Connection,
    ) -> Answer:
        at = self._store.clock.now_us() if request.now is None else request.now
        birth = self._new_birth()
        for algorithm, row, cost in zip(algorithms, rows, request.costs(len(rows)), strict=True):
            if cost:
                before = _load(connection, row, algorithm)
                after = algorithm.record(before, at, cost, birth)
                if after is not before:
                    self._store.save(connection, row, algorithm, after, request.now)
        return RECORDED

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        def work(connection: sqlite3.Connection) -> None:
            at = self._store.clock.now_us() if now is None else now
            for algorithm, (row, receipt), units in given_back(self._tiers.own, receipts, cost):
                assert isinstance(row, bytes)
                before = _load(connection, row, algorithm)
                after = algorithm.refund(before, receipt, units, at)
                if after is not before:
                    self._store.save(connection, row, algorithm, after, now)
                    self._wake_waiter(connection, algorithm, row)

        self._store.transact(work, write=True)

    def reset(self, key: Key | None) -> None:
        def work(connection: sqlite3.Connection) -> None:
            for algorithm, row in zip(self._tiers.own, self._rows(key), strict=True):
                connection.execute(_DELETE, (row,))
                self._wake_waiter(connection, algorithm, row)

        self._store.transact(work, write=True)

    def _wake_waiter(self, connection: sqlite3.Connection, algorithm: Algorithm, row: bytes) -> None:
        """Wake the first waiter for a place that was released."""
        if isinstance(algorithm, Concurrent):
            self._store.tickets.wake_first(row, connection)


class _WorkerGate:
    """The gate for coroutines; calls run in the store's thread."""

    def __init__(self, store: SQLiteStore, gate: _SQLiteGate) -> None:
        self._store = store
        self._gate = gate

    async def decide(self, request: Request) -> Answer:
        return await self._store.in_worker(
            partial(self._gate.decide, request),
            completes=request.is_completed,
            abandoned=partial(self._release, request) if request.is_given_up else None,
        )

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._store.in_worker(partial(self._gate.refund, receipts, cost, now), completes=True)

    async def reset(self, key: Key | None) -> None:
        await self._store.in_worker(partial(self._gate.reset, key), completes=True)

    def _release(self, request: Request, answer: Answer) -> None:
        """Give back a hold whose caller was cancelled."""
        receipts = answer[1]
        if receipts is not None:
            refund = partial(self._gate.refund, receipts, request.cost, request.now)
            self._store.start_in_worker(refund).add_done_callback(partial(look_after, None))


def _load(connection: sqlite3.Connection, row: bytes, algorithm: Algorithm) -> State | None:
    """Return the state in a row, or `None` if there is no such row."""
    found = connection.execute(_SELECT, (row,)).fetchone()
    if found is None:
        return None
    try:
        state = struct.unpack(f"<{len(found[0]) // 8}q", found[0])
    except (struct.error, TypeError):
        state = ()
    if not is_state(algorithm, state):
        raise StoreConflict(f"SQLite: the row {row!r} of headgate_states does not hold a state")
    return state
