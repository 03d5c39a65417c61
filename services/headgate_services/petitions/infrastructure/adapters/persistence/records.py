"""Petitions, co-signs, the queue, the ledger and the halt in PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

from blake3 import blake3
from psycopg.types.json import Jsonb

from headgate_services.petitions.domain.models import CoSign, Draft, Petition, PetitionState, PetitionType
from headgate_services.petitions.infrastructure.adapters.persistence.database import Database

_COLUMNS = """
    id, type, state, content_hash, realm, submitter_id, created_at, updated_at, fate_reason,
    (SELECT count(*) FROM petition_co_signs WHERE petition_id = petition_submissions.id)
"""
_SAVE = f"""
    INSERT INTO petition_submissions (type, text, realm, submitter_id, content_hash, notification_preferences)
    VALUES (%s, %s, %s, %s, %s, %s) RETURNING {_COLUMNS}
"""
_GET = f"SELECT {_COLUMNS} FROM petition_submissions WHERE id = %s"
_CHANGE = f"""
    UPDATE petition_submissions SET state = %s, fate_reason = %s WHERE id = %s RETURNING {_COLUMNS}
"""

_DEPTH = "SELECT depth, extract(epoch FROM clock_timestamp() - counted_at)::float8 FROM petition_queue"
_LOCK_QUEUE = "SELECT FROM petition_queue FOR UPDATE"
_RECOUNT = """
    UPDATE petition_queue
    SET depth = (SELECT count(*) FROM petition_submissions WHERE state = 'RECEIVED'), counted_at = clock_timestamp()
    RETURNING depth
"""
_TAKE_PLACE = "UPDATE petition_queue SET depth = depth + 1 WHERE depth < %s RETURNING depth"

_CO_SIGN = """
    INSERT INTO petition_co_signs (petition_id, signer_id) VALUES (%s, %s) ON CONFLICT DO NOTHING
    RETURNING id, signed_at
"""
_CO_SIGNERS = "SELECT count(*) FROM petition_co_signs WHERE petition_id = %s"

_APPEND = """
    INSERT INTO ledger.governance_events (event_type, actor_id, trace_id, payload)
    VALUES (%s, %s, %s, %s) RETURNING sequence
"""
_APPEND_UNLESS_HALTED = """
    INSERT INTO ledger.governance_events (event_type, actor_id, trace_id, payload)
    SELECT %s, %s, %s, %s WHERE NOT EXISTS (SELECT FROM halt_state WHERE is_halted) RETURNING sequence
"""
_LAST = "SELECT coalesce(max(sequence), 0) FROM ledger.governance_events"

_REASON = "SELECT reason FROM halt_state WHERE is_halted"
_HALT = "UPDATE halt_state SET is_halted = TRUE, reason = %s, halted_at = clock_timestamp()"
_RESUME = "UPDATE halt_state SET is_halted = FALSE, reason = NULL, halted_at = NULL"


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """An entry of the ledger.

    Attributes:
        type: Three lower-case words: branch, noun and verb.
        actor_id: The id of the person or program that did it.
        trace_id: The id under which the logs have it.
        payload: The details.
    """

    type: str
    actor_id: str
    trace_id: str
    payload: Mapping[str, Any]


class QueueMeasure(NamedTuple):
    """Number of waiting petitions, and the age of the count in seconds; petitions saved since are included."""

    depth: int
    age: float


class PetitionRecords:
    """All records of the service except the counters.

    Statements run in the current transaction, or else on their own.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def transaction(self) -> AbstractAsyncContextManager[object]:
        """Open a transaction; see `Database.transaction`."""
        return self._database.transaction()

    async def _row(self, query: LiteralString, *parameters: Any) -> tuple[Any, ...] | None:
        async with self._database.connection() as connection:
            cursor = await connection.execute(query, parameters)
            return await cursor.fetchone() if cursor.description else None

    async def _number(self, query: LiteralString, *parameters: Any) -> int:
        row = await self._row(query, *parameters)
        assert row is not None  # these queries always return one
        return int(row[0])

    async def save_petition(self, draft: Draft) -> Petition:
        """Store a new petition with the BLAKE3 hash of its text."""
        preferences = draft.notification_preferences
        row = await self._row(
            _SAVE,
            draft.type,
            draft.text,
            draft.realm,
            draft.submitter_id,
            blake3(draft.text.encode()).digest(),
            None if preferences is None else Jsonb(dict(preferences)),
        )
        return _petition(row)

    async def get_petition(self, petition_id: UUID, *, for_update: bool = False) -> Petition | None:
        """Return a petition; `for_update` locks it until the transaction ends."""
        row = await self._row(f"{_GET} FOR UPDATE" if for_update else _GET, petition_id)
        return None if row is None else _petition(row)

    async def change_petition(self, petition_id: UUID, state: PetitionState, fate_reason: str) -> Petition:
        """Set the state of a petition, and the reason."""
        return _petition(await self._row(_CHANGE, state, fate_reason, petition_id))

    async def add_co_sign(self, petition_id: UUID, signer_id: UUID) -> CoSign | None:
        """Save a co-sign; `None` if this identity has co-signed the petition before."""
        row = await self._row(_CO_SIGN, petition_id, signer_id)
        if row is None:
            return None
        id_, signed_at = row
        count = await self._number(_CO_SIGNERS, petition_id)
        return CoSign(id_, petition_id, signer_id, signed_at, count)

    async def measure_queue(self, max_age: float) -> QueueMeasure:
        """Return the number of waiting petitions; count them if the last count is older than `max_age` seconds."""
        row = await self._row(_DEPTH)
        assert row is not None  # a migration put it there
        if row[1] < max_age:
            return QueueMeasure(row[0], row[1])
        async with self._database.transaction():
            # Petitions hold this lock until they are committed, so the count misses none of them. The lock is a separate
            # statement, because the snapshot of the count must be taken after the lock.
            await self._row(_LOCK_QUEUE)
            return QueueMeasure(await self._number(_RECOUNT), 0.0)

    async def take_place(self, threshold: int) -> int | None:
        """Add one if fewer than `threshold` wait, and return the new number; `None` if the queue is full.

        Other transactions that take a place wait until the current one ends.
        """
        row = await self._row(_TAKE_PLACE, threshold)
        return None if row is None else int(row[0])

    async def append(self, event: LedgerEvent) -> int:
        """Append an event to the ledger, and return its number."""
        return await self._number(_APPEND, *_columns(event))

    async def append_unless_halted(self, event: LedgerEvent) -> int | None:
        """Write an event and return its number; while the system is halted, write nothing and return `None`."""
        row = await self._row(_APPEND_UNLESS_HALTED, *_columns(event))
        return None if row is None else int(row[0])

    async def last_sequence(self) -> int:
        """Return the number of the latest event; 0 in an empty ledger."""
        return await self._number(_LAST)

    async def get_halt_reason(self) -> str | None:
        """Return the reason of the halt; `None` if the system is not halted."""
        row = await self._row(_REASON)
        return None if row is None else str(row[0])

    async def halt(self, reason: str) -> None:
        """Refuse all writes until `resume`."""
        await self._row(_HALT, reason)

    async def resume(self) -> None:
        """Accept writes again."""
        await self._row(_RESUME)


def _petition(row: tuple[Any, ...] | None) -> Petition:
    assert row is not None  # RETURNING always returns a row
    id_, type_, state, content_hash, *rest = row
    return Petition(id_, PetitionType(type_), PetitionState(state), bytes(content_hash), *rest)


def _columns(event: LedgerEvent) -> tuple[str, str, str, Jsonb]:
    return event.type, event.actor_id, event.trace_id, Jsonb(dict(event.payload))
