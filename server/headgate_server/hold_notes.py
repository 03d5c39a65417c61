"""The notes that a store keeps of a hold.

    hold/ID                what was taken (`HoldNote`)
    hold/ID/end            the outcome (`Claim`); a confirmation that was refused or lost makes room for another,
    hold/ID/end/N          under the number of attempts before it
    hold/ID/end/N/result   what came of a confirmation

The text of a note never changes. So one caller writes the outcome, and all others find it.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import msgspec

from headgate import HeadgateError, StoreConflict, StoreUnavailable
from headgate.costs import Cost
from headgate.keys import Key
from headgate.outage import AsyncCircuit, breaker_of
from headgate.quotas import QuotaValue
from headgate.stores import OVERFLOW, AsyncNotes, Receipts

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9_-]{28}")

REFUSED, LOST, ADMITTED = "refused", "lost", "admitted"
"""Results of a confirmation."""

MOVE_US = 30_000_000
"""Microseconds after which a confirmation without a result is lost: its worker was killed in between."""

PAUSES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds to wait, again and again, for the result of another call that has the same hold."""


class HoldsUnsupported(HeadgateError):
    """The limiter's store cannot remember holds."""


class HoldBusy(HeadgateError):
    """Another call is confirming the hold just now."""


@dataclass(frozen=True, slots=True)
class HoldNote:
    """The note of a hold that was taken.

    Attributes:
        limiter: Name of the limiter.
        key: Whose units.
        cost: How many, of everything or of each unit.
        tier: The caller's tier.
        rules: Identities of the rules that were charged; those of shadow rules are in the receipts.
        receipts: What gives the units back.
        kept_for: Seconds for which the note is kept.
        watched_in: The run of the server in which hooks count it as open; `None` if they do not.
        quota: The quotas of the call.
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

    def text(self) -> str:
        """Return the text of the note.

        Raises:
            HoldsUnsupported: The store that charged has receipts of its own kind.
        """
        return json.dumps({field.name: _written(getattr(self, field.name)) for field in fields(self)})

    @classmethod
    def read(cls, text: str) -> HoldNote:
        """Return the hold in a note.

        Raises:
            StoreConflict: The note is not one of ours.
        """
        try:
            return cls(**{name: _read(written) for name, written in json.loads(text).items()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreConflict("the note of a hold was not written by Headgate") from error


def _written(value: object) -> object:
    """Return a value as JSON; bytes, mappings and the overflow key as an object with one name, which is the type."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"bytes": b64encode(value).decode()}
        case tuple():
            return [_written(part) for part in value]
        case Mapping():
            return {"mapping": {scope: _written(part) for scope, part in value.items()}}
        case _ if value is OVERFLOW:
            return {"overflow": True}
    raise HoldsUnsupported(f"a hold cannot be remembered that was charged to a {type(value).__name__}")


def _read(written: Any) -> Any:
    """Return the value of `_written`."""
    match written:
        case list():
            return tuple(_read(part) for part in written)
        case {"bytes": value}:
            return b64decode(value)
        case {"mapping": value}:
            return {scope: _read(part) for scope, part in value.items()}
        case {"overflow": _}:
            return OVERFLOW
    return written


class Claim(NamedTuple):
    """The outcome of a hold as it is noted. No two are equal, so only one caller finds its own claim.

    Attributes:
        cost: The cost that stands.
        nonce: Makes the claim unique.
        moved_at: When a confirmation began, in microseconds: it may still be refused. `None` in the claim of a settlement,
            which is final.
    """

    cost: Cost
    nonce: str
    moved_at: int | None = None

    @classmethod
    def new(cls, cost: Cost, moved_at: int | None = None) -> Claim:
        """Return a claim unlike all others."""
        return cls(cost if isinstance(cost, int) else dict(cost), secrets.token_hex(8), moved_at)

    def text(self) -> str:
        """Return the claim as it is noted."""
        return json.dumps(self if self.moved_at is not None else self[:2])

    @classmethod
    def read(cls, text: str) -> Claim:
        """Return the claim in a note.

        Raises:
            StoreConflict: The note is not one of ours.
        """
        try:
            return msgspec.convert(json.loads(text), cls)
        except (ValueError, msgspec.ValidationError) as error:
            raise StoreConflict("the note of a hold's outcome was not written by Headgate") from error


class HoldEnd(NamedTuple):
    """What came of claiming the outcome of a hold.

    Attributes:
        name: The name of the note with the claim.
        claim: The claim that stands.
        is_ours: Whether that is the caller's own.
        is_lost: Whether an earlier confirmation was lost, so that no one knows whether its receipts still count.
    """

    name: str
    claim: Claim
    is_ours: bool
    is_lost: bool


def new_id(limiter: str) -> str:
    """Return an id that cannot be guessed; its end says in which limiter's store to look first."""
    return secrets.token_urlsafe(18) + hint_of(limiter)


def is_id(hold_id: object) -> bool:
    """Return whether this has the form of a hold's id."""
    return isinstance(hold_id, str) and _ID.fullmatch(hold_id) is not None


def hint_of(limiter: str) -> str:
    """Return the end of the ids of a limiter's holds."""
    return urlsafe_b64encode(
        blake2b(limiter.encode("utf-8", "surrogatepass"), digest_size=3).digest()
    ).decode()


def start_of(hold_id: str) -> str:
    """Return the name under which it is noted that a hold was taken."""
    return f"hold/{hold_id}"


def end_of(hold_id: str, attempt: int = 0) -> str:
    """Return the name under which the outcome of a hold is noted, after so many attempts that were refused or lost."""
    return f"hold/{hold_id}/end/{attempt}" if attempt else f"hold/{hold_id}/end"


def result_of(end: str) -> str:
    """Return the name under which the result of a confirmation is noted: refused, lost, or admitted."""
    return f"{end}/result"


async def claim_end(notes: AsyncNotes, hold_id: str, claim: Claim, seconds: float, now: int) -> HoldEnd:
    """Note the outcome of a hold if there is none yet; `now` is in microseconds.

    Raises:
        HoldBusy: Another call is confirming the hold just now.
    """
    text, is_lost = claim.text(), False
    for attempt in count():
        end = end_of(hold_id, attempt)
        stands = await keep(notes, end, text, seconds)
        if stands == text:
            break
        other = Claim.read(stands)
        if other.moved_at is None:
            return HoldEnd(end, other, is_ours=False, is_lost=is_lost)
        result = await _result(notes, end, other.moved_at, seconds, now)
        if result not in (REFUSED, LOST):
            return HoldEnd(end, other, is_ours=False, is_lost=is_lost)
        is_lost = is_lost or result == LOST
    return HoldEnd(end, claim, is_ours=True, is_lost=is_lost)


async def _result(notes: AsyncNotes, end: str, moved_at: int, seconds: float, now: int) -> str:
    """Return what came of a confirmation of another call, and wait for it for a moment."""
    for pause in (*PAUSES, None):
        result = await look_up(notes, result_of(end))
        if result is not None:
            return result
        if abs(now - moved_at) >= MOVE_US:  # clocks of workers may differ; to take it for lost is always safe
            return await keep(notes, result_of(end), LOST, seconds)
        if pause is not None:
            await asyncio.sleep(pause)
    raise HoldBusy("another call is confirming this hold; send the call again")


async def has_ended(notes: AsyncNotes, hold_id: str) -> bool | None:
    """Return whether an outcome of a hold stands; `None` if that is being decided."""
    for attempt in count():
        end = end_of(hold_id, attempt)
        stands = await look_up(notes, end)
        if stands is None:
            return False
        if Claim.read(stands).moved_at is None:
            break
        result = await look_up(notes, result_of(end))
        if result is None:
            return None
        if result not in (REFUSED, LOST):
            break
    return True


async def keep(notes: AsyncNotes, name: str, text: str, seconds: float) -> str:
    """Note a text, as `AsyncNotes.note`; try again once if the outcome is unknown."""

    async def note() -> str:
        try:
            return await notes.note(name, text, seconds)
        except StoreUnavailable:
            return await notes.note(name, text, seconds)

    return await _decide(notes, note, writes=True)


async def look_up(notes: AsyncNotes, name: str) -> str | None:
    """Return the text of a note, as `AsyncNotes.get_note`."""
    return await _decide(notes, lambda: notes.get_note(name), writes=False)


async def _decide(notes: AsyncNotes, call: Callable[[], Awaitable[T]], *, writes: bool) -> T:
    """Ask a store, unless its breaker is open."""
    if not notes.remote:
        return await call()
    return await _circuit_of(notes).call(writes, call)


_circuits: WeakKeyDictionary[AsyncNotes, AsyncCircuit] = WeakKeyDictionary()


def _circuit_of(notes: AsyncNotes) -> AsyncCircuit:
    """Return the circuit of a store; it lives as long as the store, because it sends the probes."""
    circuit = _circuits.get(notes)
    if circuit is None:
        wanted = ref(notes)  # a value that refers to its key would keep it in the dictionary for ever

        async def probe() -> None:
            found = wanted()
            if found is not None:
                if getattr(found, "is_closed", False):
                    breaker_of(found).stop()
                await found.get_note("headgate.ping")

        circuit = _circuits[notes] = AsyncCircuit(breaker_of(notes), probe)
    return circuit
