"""A hold in the store: its record, and the atomic step that changes it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headgate import HeadgateError, StoreConflict
from headgate.stores import LONGEST_NOTE, AsyncNotes
from headgate_server.holds.record import HoldRecord, SettleClaim
from headgate_server.notes import PAUSES, read_note, write_note

MARGIN = 600.0
"""Seconds for which an id is valid after its units have expired, so that a late settle is not an error."""

CONFIRMING_US = 30_000_000
"""Microseconds after which a confirmation without a result is lost, because its worker was killed."""


class HoldBusy(HeadgateError):
    """Another call is confirming the hold."""


class StoredHold:
    """A hold in the store.

    Args:
        notes: The store.
        hold_id: The id of the hold.
        record: The record, as it was last read or written.
    """

    def __init__(self, notes: AsyncNotes, hold_id: str, record: HoldRecord) -> None:
        self.notes = notes
        self.hold_id = hold_id
        self.record = record

    @classmethod
    async def read(cls, notes: AsyncNotes, hold_id: str) -> StoredHold | None:
        """Return a hold; `None` if the store has no record of it."""
        text = await read_note(notes, f"hold/{hold_id}")
        return None if text is None else cls(notes, hold_id, HoldRecord.from_text(text))

    async def write(self) -> None:
        """Write a new record, or extend the lifetime of an unchanged one."""
        await write_note(self.notes, f"hold/{self.hold_id}", self.record.text(), self.record.kept_for)

    async def claim(self, claim: SettleClaim, now_us: int) -> SettleClaim:
        """Give an open hold its outcome, and return the outcome that it has.

        Raises:
            HoldBusy: Another call is confirming the hold.
        """
        while True:
            found = self.record.claim
            if found is None:
                if await self._replace(self.record.claimed(claim)):
                    return claim
            elif found.since_us is None:
                return found
            elif abs(now_us - found.since_us) >= CONFIRMING_US:  # safe even if the clocks of workers differ
                await self._replace(replace(self.record, claim=None, lost=True))
            else:
                await self._wait_for_change()

    async def end_confirmation(self, *, is_final: bool) -> None:
        """Make a confirmed hold final, or open again after a refusal."""
        claim = self.record.claim
        assert claim is not None
        await self._replace(self.record.claimed(claim._replace(since_us=None) if is_final else None))

    async def _replace(self, record: HoldRecord) -> bool:
        """Replace the record in one atomic step; return false if another call was first, whose record is then read.

        A changed record is kept longer than a new one, so that the worker that took the hold still finds the outcome
        when the hold has expired.
        """
        old, new = self.record.text(), record.text()
        seconds = kept_for(record.kept_for)
        stored = await write_note(self.notes, f"hold/{self.hold_id}", new, seconds, old)
        if stored != new and HoldRecord.from_text(stored) == self.record:
            raise StoreConflict("the record of a hold was not written by Headgate")
        self.record = HoldRecord.from_text(stored)
        return stored == new

    async def _wait_for_change(self) -> None:
        """Wait until another call has confirmed the hold, and read the new record."""
        for pause in PAUSES:
            await asyncio.sleep(pause)
            stored = await self.read(self.notes, self.hold_id)
            if stored is not None and stored.record != self.record:
                self.record = stored.record
                return
        raise HoldBusy("another call is confirming this hold; send the call again")


def kept_for(seconds: float) -> float:
    """Return the lifetime of a record whose units expire after `seconds`."""
    return min(seconds + MARGIN, LONGEST_NOTE)
