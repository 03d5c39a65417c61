"""Readiness: can a submission be written?

A database can answer `SELECT 1` and still fail every submission: it may be a read-only replica, or a table or a right may be
missing. So the check writes a petition with its event, its count and its place in the queue, by the same statements as a
submission, and rolls everything back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

import psycopg

from headgate_services.petitions.application.ports import RateLimitPolicy
from headgate_services.petitions.config import PetitionQueueConfig
from headgate_services.petitions.domain.models import REALMS, Draft, PetitionType
from headgate_services.petitions.infrastructure.adapters.persistence.database import Database
from headgate_services.petitions.infrastructure.adapters.persistence.rate_limit_store import (
    PostgresRateLimitStore,
)
from headgate_services.petitions.infrastructure.adapters.persistence.records import (
    LedgerEvent,
    PetitionRecords,
)

REHEARSAL_SECONDS = 30.0
"""How long a successful rehearsal is valid; until then the database only has to answer."""


class PostgresReadiness:
    """Checks that submissions can be written.

    Args:
        database: The database of the service.
        counters: The counters of submissions.
        policy: The limits on submissions.
        queue: The settings of the queue.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        database: Database,
        counters: PostgresRateLimitStore,
        policy: RateLimitPolicy,
        queue: PetitionQueueConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._counters = counters
        self._policy = policy
        self._queue = queue
        self._clock = clock
        self._valid_until = float("-inf")
        self._rehearsing = asyncio.Lock()

    async def check(self) -> None:
        """Raise an error if submissions cannot be written.

        A full queue, a reached limit and a halt are not errors: the service can decide.
        """
        # One rehearsal at a time, and not for every request: it locks the queue.
        async with self._rehearsing:
            if self._clock() >= self._valid_until:
                await self._rehearse()
                self._valid_until = self._clock() + REHEARSAL_SECONDS
                return
        await self._database.ping()

    async def _rehearse(self) -> None:
        records = PetitionRecords(self._database)
        await records.measure_queue(self._queue.cache_ttl_seconds)
        draft = Draft(PetitionType.META, "readiness check", REALMS[0], counted_as=uuid4())
        event = LedgerEvent("petition.submission.rehearsed", "readiness", str(draft.counted_as), {})
        async with self._database.transaction():
            await records.get_halt_reason()
            await records.save_petition(draft)
            await records.append(event)
            await self._counters.hold(self._policy, draft.counted_as, draft.realm)
            await records.take_place(self._queue.threshold)
            raise psycopg.Rollback
