"""What is noted of a hold, and how a store is asked for it."""

from __future__ import annotations

import json
import re
import secrets
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from headgate import HeadgateError
from headgate.circuit import AsyncCircuit, breaker_of
from headgate.costs import Cost
from headgate.errors import StoreConflict, StoreUnavailable
from headgate.keys import Key
from headgate.quotas import QuotaValue
from headgate.stores.base import AsyncNotes, Receipts
from headgate.stores.counters import OVERFLOW

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9_-]{28}")


class HoldsUnsupported(HeadgateError):
    """The limiter's store cannot remember holds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is noted of a hold when it is taken.

    Attributes:
        limiter: Name of the limiter.
        key: Whose units.
        cost: How many, of everything or of each unit.
        tier: The caller's tier.
        rules: Identities of the rules that were charged; of shadow rules the receipts tell.
        receipts: What gives the units back.
        kept_for: Seconds for which this is noted.
        watched_in: The run of the server in which hooks count it as open; `None` if they were told already that it is not.
        quota: The quotas that the call brought along.
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
        """Return it as it is noted.

        Raises:
            HoldsUnsupported: The store that charged has receipts of its own kind.
        """
        return json.dumps({field.name: _written(getattr(self, field.name)) for field in fields(self)})

    @classmethod
    def read(cls, text: str) -> Entry:
        """Return what was noted so.

        Raises:
            StoreConflict: It was not noted by us.
        """
        try:
            return cls(**{name: _read(written) for name, written in json.loads(text).items()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreConflict("what is noted under the id of a hold was not noted by us") from error


def _written(value: object) -> object:
    """Return a value as JSON can write it: what has no form there as an object whose one name says what it is."""
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
    """Return what `_written` wrote so."""
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


def new_claim(cost: Cost) -> str:
    """Return the outcome of a hold as it is noted; no two are alike, so that only one of them can be the first."""
    return json.dumps([cost if isinstance(cost, int) else dict(cost), secrets.token_hex(8)])


def cost_in(claim: str) -> Cost:
    """Return the cost in an outcome.

    Raises:
        StoreConflict: It was not noted by us.
    """
    try:
        cost, _ = json.loads(claim)
        return {unit: int(units) for unit, units in cost.items()} if isinstance(cost, dict) else int(cost)
    except (ValueError, TypeError) as error:
        raise StoreConflict("what is noted as the outcome of a hold was not noted by us") from error


def new_id(limiter: str) -> str:
    """Return an id that nobody can guess; its end says in which limiter's store to look first."""
    return secrets.token_urlsafe(18) + hint_of(limiter)


def is_id(hold_id: object) -> bool:
    """Return whether a hold may have this id."""
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
    """Return the name under which the outcome of a hold is noted; of so many attempts before, each was refused."""
    return f"hold/{hold_id}/end/{attempt}" if attempt else f"hold/{hold_id}/end"


def refused_of(end: str) -> str:
    """Return the name under which it is noted that an outcome was refused, so that the hold is open still."""
    return f"{end}/refused"


async def claim_end(notes: AsyncNotes, hold_id: str, claim: str, seconds: float) -> tuple[str, str]:
    """Note the outcome of a hold if there is none yet; return the name of the note, and the outcome that stands."""
    for attempt in count():
        end = end_of(hold_id, attempt)
        stands = await keep(notes, end, claim, seconds)
        if stands == claim or await look_up(notes, refused_of(end)) is None:
            break
    return end, stands


async def has_ended(notes: AsyncNotes, hold_id: str) -> bool:
    """Return whether an outcome of a hold stands."""
    for attempt in count():
        end = end_of(hold_id, attempt)
        if await look_up(notes, end) is None:
            return False
        if await look_up(notes, refused_of(end)) is None:
            break
    return True


async def keep(notes: AsyncNotes, name: str, text: str, seconds: float) -> str:
    """Note a text, as `AsyncNotes.note`; once more if it is unknown what became of it."""

    async def note() -> str:
        try:
            return await notes.note(name, text, seconds)
        except StoreUnavailable:
            return await notes.note(name, text, seconds)

    return await _ask(notes, note, writes=True)


async def look_up(notes: AsyncNotes, name: str) -> str | None:
    """Return what is noted, as `AsyncNotes.noted`."""
    return await _ask(notes, lambda: notes.noted(name), writes=False)


async def _ask(notes: AsyncNotes, call: Callable[[], Awaitable[T]], *, writes: bool) -> T:
    """Ask a store, unless it is known to be down."""
    if not notes.remote:
        return await call()
    return await _circuit_of(notes).call(writes, call)


_circuits: WeakKeyDictionary[AsyncNotes, AsyncCircuit] = WeakKeyDictionary()


def _circuit_of(notes: AsyncNotes) -> AsyncCircuit:
    """Return the circuit of a store; it must live as long, for it is what probes."""
    circuit = _circuits.get(notes)
    if circuit is None:
        wanted = ref(notes)  # what a value holds on to never goes out of such a dictionary

        async def probe() -> None:
            found = wanted()
            if found is not None:
                await found.noted("headgate.ping")

        circuit = _circuits[notes] = AsyncCircuit(breaker_of(notes), probe)
    return circuit
