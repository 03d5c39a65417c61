"""Every refusal for a limit leaves a trace in the ledger (AC4, D4).

One event per refusal, written before the client has its answer. While an event about a submitter is being written, more
refusals of the same kind wait and then share the next one, which says how many they are: a flood cannot make more than
one write per submitter wait for the database, and no refusal is forgotten.

A refusal stays a refusal whatever happens here: failing to write is logged, loudly. While the system is halted nothing is
written, which is logged as well.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from uuid import UUID

from headgate.apps.petitions.application.ports import Event, EventLedgerPort
from headgate.apps.petitions.application.services.logging_mixin import LoggingMixin
from headgate.apps.petitions.domain.errors import RateLimitExceededError

_MOST_TRACES = 100

Kind = tuple[UUID, str, str]


@dataclass(slots=True)
class _Batch:
    """Refusals of one kind that share an event."""

    latest: RateLimitExceededError
    written: asyncio.Future[int]
    traces: list[str] = field(default_factory=list)
    refusals: int = 0


class RefusalWitnessService(LoggingMixin):
    """Writes refusals into the ledger."""

    component = "petition.witness"

    def __init__(self, ledger: EventLedgerPort) -> None:
        self._ledger = ledger
        self._writing: dict[Kind, asyncio.Task[int]] = {}
        self._waiting: dict[Kind, _Batch] = {}
        self._last_sequence = 0

    async def witness(self, refusal: RateLimitExceededError, trace_id: str) -> int:
        """Write a refusal down and return the number of the latest event that is known; never raises for a failure."""
        kind = (refusal.submitter_id, refusal.counter, refusal.scope)
        batch = self._waiting.get(kind)
        if batch is None:
            batch = self._waiting[kind] = _Batch(refusal, asyncio.get_running_loop().create_future())
        batch.latest = refusal
        batch.refusals += 1
        batch.traces.append(trace_id)
        if kind not in self._writing:
            self._start(kind)
        # Shielded: a client that hangs up must not take the event of the others with it.
        return await asyncio.shield(batch.written)

    async def aclose(self) -> None:
        """Wait for what is being written."""
        while self._writing:
            await asyncio.wait(list(self._writing.values()))
            await asyncio.sleep(0)  # their callbacks start what waited for them

    def _start(self, kind: Kind) -> None:
        batch = self._waiting.pop(kind)
        task = asyncio.create_task(self._write(batch))
        self._writing[kind] = task

        def done(task: asyncio.Task[int]) -> None:
            del self._writing[kind]
            batch.written.set_result(self._last_sequence if task.cancelled() else task.result())
            if kind in self._waiting:
                self._start(kind)

        task.add_done_callback(done)

    async def _write(self, batch: _Batch) -> int:
        event = _event(batch)
        try:
            sequence = await self._ledger.append_unless_halted(event)
            if sequence is None:
                self.log.warning("rate_limit_witness_skipped", reason="halted", **event.payload)
                sequence = await self._ledger.last_sequence()
        except Exception:
            # Whatever it was, the client must have its 429.
            self.log.exception("rate_limit_witness_failed", **event.payload)
            return self._last_sequence
        self._last_sequence = max(self._last_sequence, sequence)
        return sequence


def _event(batch: _Batch) -> Event:
    refusal = batch.latest
    payload = {
        "submitter_id": str(refusal.submitter_id),
        "current_count": refusal.current_count,
        "limit": refusal.limit,
        "reset_at": refusal.reset_at.isoformat(),
        "scope": refusal.scope,
        "window_minutes": refusal.window_minutes,
        "refusals": batch.refusals,
        "trace_ids": batch.traces[:_MOST_TRACES],
    }
    event_type = f"petition.{refusal.counter}.rate_limited"
    return Event(event_type, f"submitter:{refusal.submitter_id}", batch.traces[0], payload)
