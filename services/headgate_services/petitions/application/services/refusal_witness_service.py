"""Every refusal for a limit leaves a trace in the ledger (AC4, D4).

One event per refusal, written before the client has its answer. While an event about a submitter is being written, more
refusals of the same kind wait and then share the next one, which says how many they are.

A flood has its cap: after the first few refusals of one kind in a row, the next ones are held back and share an event when
there are a hundred of them, or when a minute has passed. No refusal is forgotten, and a flooder cannot fill the ledger.

A refusal stays a refusal whatever happens here: failing to write is logged, loudly. While the system is halted nothing is
written, which is logged as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from headgate_services.petitions.application.ports import EventLedgerPort, LedgerEvent
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.domain.errors import RateLimitExceededError

INDIVIDUALLY = 10
"""How many refusals of one kind in a row have an event each."""

TOGETHER = 100
"""How many share one after that."""

QUIET_SECONDS = 60.0
"""How long they are held back at most, and after which silence a flood is over."""

_MOST_TRACES = 100
_MOST_FOLLOWED = 10_000

Kind = tuple[UUID, str, str]


@dataclass(slots=True)
class _Batch:
    """Refusals of one kind that share an event."""

    latest: RateLimitExceededError
    written: asyncio.Future[int]
    traces: list[str] = field(default_factory=list)
    refusals: int = 0

    def add(self, refusal: RateLimitExceededError, trace_id: str) -> None:
        self.latest = refusal
        self.refusals += 1
        self.traces.append(trace_id)

    def merge(self, other: _Batch) -> None:
        self.latest = other.latest
        self.refusals += other.refusals
        self.traces += other.traces


def _new_batch(refusal: RateLimitExceededError) -> _Batch:
    return _Batch(refusal, asyncio.get_running_loop().create_future())


@dataclass(slots=True)
class _Flood:
    """Refusals of one kind in a row: how many there were, when the last one came, and those that are held back."""

    seen: int = 0
    last: float = 0.0
    held: _Batch | None = None

    def is_over(self, now: float) -> bool:
        return self.held is None and now - self.last > QUIET_SECONDS


class RefusalWitnessService(LoggingMixin):
    """Writes refusals into the ledger.

    Args:
        ledger: Where to.
        clock: Seconds that never go back.
    """

    def __init__(self, ledger: EventLedgerPort, clock: Callable[[], float] = time.monotonic) -> None:
        self._init_logger(component="petition.witness")
        self._ledger = ledger
        self._clock = clock
        self._floods: dict[Kind, _Flood] = {}
        self._writing: dict[Kind, asyncio.Task[int]] = {}
        self._waiting: dict[Kind, _Batch] = {}
        self._last_sequence = 0

    async def witness(self, refusal: RateLimitExceededError, trace_id: str) -> int:
        """Write a refusal down and return the number of the latest event that is known; never raises for a failure."""
        kind = (refusal.submitter_id, refusal.counter, refusal.scope)
        flood = self._flood(kind)
        if flood.seen > INDIVIDUALLY and kind not in self._waiting:
            if flood.held is None:
                flood.held = _new_batch(refusal)
                asyncio.get_running_loop().call_later(QUIET_SECONDS, self._let_go, kind)
            flood.held.add(refusal, trace_id)
            if flood.held.refusals >= TOGETHER:
                self._let_go(kind)
            return self._last_sequence
        batch = self._waiting.setdefault(kind, _new_batch(refusal))
        batch.add(refusal, trace_id)
        if kind not in self._writing:
            self._start(kind)
        # Shielded: a client that hangs up must not take the event of the others with it.
        return await asyncio.shield(batch.written)

    async def aclose(self) -> None:
        """Write what is held back, and wait for what is being written."""
        for kind in list(self._floods):
            self._let_go(kind)
        while self._writing:
            await asyncio.wait(list(self._writing.values()))
            await asyncio.sleep(0)  # their callbacks start what waited for them

    def _flood(self, kind: Kind) -> _Flood:
        """Return the flood that a refusal belongs to, itself included; those that are over are forgotten."""
        now = self._clock()
        if len(self._floods) >= _MOST_FOLLOWED:
            self._floods = {each: flood for each, flood in self._floods.items() if not flood.is_over(now)}
        flood = self._floods.get(kind)
        if flood is None or flood.is_over(now):
            flood = self._floods[kind] = _Flood()
        flood.seen += 1
        flood.last = now
        return flood

    def _let_go(self, kind: Kind) -> None:
        """Write the event of what is held back."""
        flood = self._floods.get(kind)
        if flood is None or flood.held is None:
            return
        held, flood.held = flood.held, None
        waiting = self._waiting.setdefault(kind, held)
        if waiting is not held:
            waiting.merge(held)
        if kind not in self._writing:
            self._start(kind)

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
                self._log.warning("rate_limit_witness_skipped", reason="halted", **event.payload)
                sequence = await self._ledger.last_sequence()
        except Exception:  # noqa: BLE001  # whatever it was, the client must have its 429
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
        "refusals": batch.refusals,
        "trace_ids": batch.traces[:_MOST_TRACES],
    }
    event_type = f"petition.{refusal.counter}.rate_limited"
    return LedgerEvent(event_type, f"submitter:{refusal.submitter_id}", batch.traces[0], payload)
