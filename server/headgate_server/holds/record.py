"""A hold in the store: its record, the atomic step that changes it, and its id."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from headgate import HeadgateError, StoreConflict
from headgate.costs import Cost
from headgate.keys import Key
from headgate.quotas import QuotaValue
from headgate.stores import LONGEST_NOTE, OVERFLOW, AsyncNotes, Receipts
from headgate_server.notes import PAUSES, read_note, write_note

MARGIN = 600.0
"""Seconds for which an id is valid after its units have expired, so that a late settle is not an error."""

CONFIRMING_US = 30_000_000
"""Microseconds after which a confirmation without a result is lost, because its worker was killed."""

_ID = re.compile(r"[A-Za-z0-9_-]{28}")


class HoldsUnsupported(HeadgateError):
    """The limiter's store cannot keep holds."""


class HoldBusy(HeadgateError):
    """Another call is confirming the hold."""


class SettleClaim(NamedTuple):
    """The outcome of a hold. No two claims are equal, so only one caller finds its own in the record.

    Attributes:
        cost: The final cost.
        nonce: Makes the claim unique.
        since_us: When a confirmation began, by the worker's clock; `None` if the claim is final.
    """

    cost: Cost
    nonce: str
    since_us: int | None = None

    @classmethod
    def new(cls, cost: Cost, since_us: int | None = None) -> SettleClaim:
        """Return a unique claim."""
        return cls(cost if isinstance(cost, int) else dict(cost), secrets.token_hex(8), since_us)


@dataclass(frozen=True, slots=True)
class HoldRecord:
    """The record of a hold.

    Attributes:
        limiter: Name of the limiter.
        key: The key.
        cost: The held units: one number for all, or a number for each unit.
        tier: The caller's tier.
        rules: Identities of the charged rules; the receipts identify shadow rules.
        receipts: Receipts to give the units back.
        kept_for: Lifetime of the record in seconds, while it is open.
        watched_in: The run of the server in which hooks count the hold as open; `None` if they do not.
        quota: The quotas of the call.
        claim: The outcome; `None` while the hold is open.
        lost: Whether a confirmation was lost, so that the receipts may have been used.
    """

    limiter: str
    key: Key | None
    cost: Cost
    tier: str | None
    rules: tuple[str, ...]
    receipts: Receipts | None
    kept_for: float
    watched_in: str | None
    quota: QuotaValue | None = None
    claim: SettleClaim | None = None
    lost: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the outcome can no longer change."""
        return self.claim is not None and self.claim.since_us is None

    def claimed(self, claim: SettleClaim | None) -> HoldRecord:
        """Return the record with another outcome."""
        return replace(self, claim=claim)

    def text(self) -> str:
        """Return the record as JSON.

        Raises:
            HoldsUnsupported: The receipts cannot be written as JSON.
        """
        return json.dumps({field.name: _encoded(getattr(self, field.name)) for field in fields(self)})

    @classmethod
    def from_text(cls, text: str) -> HoldRecord:
        """Return the record in a text.

        Raises:
            StoreConflict: It is not a record.
        """
        try:
            record = cls(**{name: _decoded(value) for name, value in json.loads(text).items()})
            return record.claimed(msgspec.convert(record.claim, SettleClaim | None))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreConflict("the record of a hold was not written by Headgate") from error


def _encoded(value: object) -> object:
    """Return a value for JSON; bytes, mappings and the overflow key become an object that names their type."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"bytes": b64encode(value).decode()}
        case tuple():
            return [_encoded(part) for part in value]
        case Mapping():
            return {"mapping": {name: _encoded(part) for name, part in value.items()}}
        case _ if value is OVERFLOW:
            return {"overflow": True}
    raise HoldsUnsupported(f"a hold cannot be kept with a receipt of type {type(value).__name__}")


def _decoded(value: Any) -> Any:
    """Return the value that `_encoded` was given."""
    match value:
        case list():
            return tuple(_decoded(part) for part in value)
        case {"bytes": encoded}:
            return b64decode(encoded)
        case {"mapping": parts}:
            return {name: _decoded(part) for name, part in parts.items()}
        case {"overflow": _}:
            return OVERFLOW
    return value


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


def new_id(limiter: str) -> str:
    """Return an id that cannot be guessed; its end tells which limiter's store to read first."""
    return secrets.token_urlsafe(18) + limiter_hint(limiter)


def is_id(hold_id: object) -> bool:
    """Return whether a value has the form of an id."""
    return isinstance(hold_id, str) and _ID.fullmatch(hold_id) is not None


def limiter_hint(limiter: str) -> str:
    """Return the end of the ids of a limiter's holds."""
    digest = blake2b(limiter.encode("utf-8", "surrogatepass"), digest_size=3).digest()
    return urlsafe_b64encode(digest).decode()
