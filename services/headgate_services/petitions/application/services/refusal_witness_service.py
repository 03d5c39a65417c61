"""Events in the ledger for every refusal by a limit (AC4, D4).

Ten refusals of one kind per minute have one event each, which is written before the response. Further refusals share an
event with their number, written after a hundred refusals or a minute, so that a flood cannot fill the ledger. These are
answered before their event is written, so a killed process loses the latest of them.

A failure to write is logged as an error and does not change the response. While the system is halted, nothing is written,
and that is logged too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from uuid import UUID

from headgate import Limiter, MemoryStore
from headgate.clock import Clock
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.domain.errors import RateLimitExceededError
from headgate_services.petitions.infrastructure.adapters.persistence import LedgerEvent, PetitionRecords

INDIVIDUALLY = "10/minute"
"""The most refusals of one kind that have an event each."""

TOGETHER = 100
"""The number of refusals that share an event after that."""

MERGED_SECONDS = 60.0
"""The longest time until merged refusals are written."""

_MOST_FOLLOWED = 10_000

Kind = tuple[UUID, str, str]


@dataclass(slots=True)
class _Batch:
    """Refusals of one kind that share an event."""

    latest: RateLimitExceededError
    traces: list[str] = field(default_factory=list)


class RefusalWitnessService(LoggingMixin):
    """Writes refusals into the ledger.

    Args:
        ledger: The ledger.
        clock: A clock for tests.
    """

    def __init__(self, ledger: PetitionRecords, clock: Clock | None = None) -> None:
        self._init_logger(component="petition.witness")
        self._ledger = ledger
        self._individually = Limiter(
            INDIVIDUALLY, name="witness", store=MemoryStore(max_keys=_MOST_FOLLOWED, clock=clock)
        )
        self._merged: dict[Kind, _Batch] = {}
        self._writing: set[asyncio.Task[int]] = set()
        self._last_sequence = 0

    async def witness(self, refusal: RateLimitExceededError, trace_id: str) -> int:
        """Write a refusal, and return the number of the latest known event; errors are only logged."""
        kind = (refusal.submitter_id, refusal.counter, refusal.scope)
        if self._individually.hit("/".join(map(str, kind))):
            # Shielded: the event is written even if the client hangs up.
            return await asyncio.shield(self._start(_Batch(refusal, [trace_id])))
        if kind not in self._merged:
            self._merged[kind] = _Batch(refusal)
            asyncio.get_running_loop().call_later(MERGED_SECONDS, self._write_merged, kind)
        batch = self._merged[kind]
        batch.latest = refusal
        batch.traces.append(trace_id)
        if len(batch.traces) >= TOGETHER:
            self._write_merged(kind)
        if not self._last_sequence and self._writing:  # in a burst, the first events may not be written yet
            await asyncio.wait(self._writing, return_when=asyncio.FIRST_COMPLETED)
        return self._last_sequence

    async def aclose(self) -> None:
        """Write merged refusals, and wait until everything is written."""
        for kind in list(self._merged):
            self._write_merged(kind)
        if self._writing:
            await asyncio.wait(list(self._writing))

    def _write_merged(self, kind: Kind) -> None:
        """Start to write the merged refusals of a kind, if there are any."""
        if batch := self._merged.pop(kind, None):
            self._start(batch)

    def _start(self, batch: _Batch) -> asyncio.Task[int]:
        task = asyncio.create_task(self._write(batch))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def _write(self, batch: _Batch) -> int:
        event = _event(batch)
        try:
            sequence = await self._ledger.append_unless_halted(event)
            if sequence is None:
                self._log.warning("rate_limit_witness_skipped", reason="halted", **event.payload)
                sequence = await self._ledger.last_sequence()
        except Exception:  # noqa: BLE001  # the client must get its 429 in any case
            self._log.exception("rate_limit_witness_failed", **event.payload)
            return self._last_sequence
        self._last_sequence = max(self._last_sequence, sequence)
        return sequence


def _event(batch: _Batch) -> LedgerEvent:
    refusal = batch.latest
    payload = {
        "submitter_id": str(refusal.submitter_id),
        "current_count": refusal.current_count,
        "limit": refusal.limit,
        "reset_at": refusal.reset_at.isoformat(),
        "scope": refusal.scope,
        "window_minutes": refusal.window_minutes,
        "refusals": len(batch.traces),
        "trace_ids": batch.traces,
    }
    event_type = f"petition.{refusal.counter}.rate_limited"
    return LedgerEvent(event_type, f"submitter:{refusal.submitter_id}", batch.traces[0], payload)
