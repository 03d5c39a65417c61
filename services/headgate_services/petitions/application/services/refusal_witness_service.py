"""Events in the ledger for every refusal by a limit (AC4, D4).

The first refusals of one kind in a row have one event each, which is written before the response. Further refusals share an
event with their number, written after a hundred refusals or a minute, so that a flood cannot fill the ledger. These are
answered before their event is written, so a killed process loses the latest of them.

A failure to write is logged as an error and does not change the response. While the system is halted, nothing is written,
and that is logged too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.domain.errors import RateLimitExceededError
from headgate_services.petitions.infrastructure.adapters.persistence import LedgerEvent, PetitionRecords

INDIVIDUALLY = 10
"""The number of refusals of one kind in a row that have an event each."""

TOGETHER = 100
"""The number of refusals that share an event after that."""

QUIET_SECONDS = 60.0
"""The longest time until merged refusals are written, and the silence that ends a flood."""

_MOST_FOLLOWED = 10_000

Kind = tuple[UUID, str, str]


@dataclass(slots=True)
class _Batch:
    """Refusals of one kind that share an event."""

    latest: RateLimitExceededError
    traces: list[str] = field(default_factory=list)

    def add(self, refusal: RateLimitExceededError, trace_id: str) -> None:
        self.latest = refusal
        self.traces.append(trace_id)


@dataclass(slots=True)
class _Flood:
    """Refusals of one kind in a row: their number, the time of the last one, and the current batch of merged refusals."""

    seen: int = 0
    last: float = 0.0
    held: _Batch | None = None

    def is_over(self, now: float) -> bool:
        return self.held is None and now - self.last > QUIET_SECONDS


class RefusalWitnessService(LoggingMixin):
    """Writes refusals into the ledger.

    Args:
        ledger: The ledger.
        clock: Monotonic seconds.
    """

    def __init__(self, ledger: PetitionRecords, clock: Callable[[], float] = time.monotonic) -> None:
        self._init_logger(component="petition.witness")
        self._ledger = ledger
        self._clock = clock
        self._floods: dict[Kind, _Flood] = {}
        self._writing: set[asyncio.Task[int]] = set()
        self._last_sequence = 0

    async def witness(self, refusal: RateLimitExceededError, trace_id: str) -> int:
        """Write a refusal, and return the number of the latest known event; errors are only logged."""
        kind = (refusal.submitter_id, refusal.counter, refusal.scope)
        flood = self._flood(kind)
        if flood.seen <= INDIVIDUALLY:
            # Shielded: the event is written even if the client hangs up.
            return await asyncio.shield(self._start(_Batch(refusal, [trace_id])))
        if flood.held is None:
            flood.held = _Batch(refusal)
            asyncio.get_running_loop().call_later(QUIET_SECONDS, self._write_held, kind)
        flood.held.add(refusal, trace_id)
        if len(flood.held.traces) >= TOGETHER:
            self._write_held(kind)
        if not self._last_sequence and self._writing:  # in a burst, the first events may not be written yet
            await asyncio.wait(self._writing, return_when=asyncio.FIRST_COMPLETED)
        return self._last_sequence

    async def aclose(self) -> None:
        """Write merged refusals, and wait until everything is written."""
        for kind in list(self._floods):
            self._write_held(kind)
        if self._writing:
            await asyncio.wait(list(self._writing))

    def _flood(self, kind: Kind) -> _Flood:
        """Return the flood of a refusal after counting it; floods that ended are removed."""
        now = self._clock()
        if len(self._floods) >= _MOST_FOLLOWED:
            self._floods = {each: flood for each, flood in self._floods.items() if not flood.is_over(now)}
        flood = self._floods.get(kind)
        if flood is None or flood.is_over(now):
            flood = self._floods[kind] = _Flood()
        flood.seen += 1
        flood.last = now
        return flood

    def _write_held(self, kind: Kind) -> None:
        """Start to write the merged refusals of a flood, if there are any."""
        flood = self._floods.get(kind)
        if flood is not None and flood.held is not None:
            held, flood.held = flood.held, None
            self._start(held)

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
