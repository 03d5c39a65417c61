"""A recorded hold: its id, its record in the store, the atomic step that changes it, and its units by the current rules."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from headgate import AsyncHold, AsyncLimiter, ConfigError, CostTooHigh, HeadgateError, StoreConflict
from headgate.algorithms import algorithm_for
from headgate.costs import Cost, Units
from headgate.keys import Key
from headgate.policy import SHADOW, AsyncVersion
from headgate.quotas import QuotaValue, quotas_of
from headgate.stores import LONGEST_NOTE, OVERFLOW, UNLIMITED, AsyncNotes, Receipts
from headgate_server.notes import PAUSES, read_note, write_note

logger = logging.getLogger("headgate")

MARGIN = 600.0
"""Seconds for which an id is valid after its units have expired, so that a late settle is not an error."""

CONFIRMING_US = 30_000_000
"""Microseconds after which a confirmation without a result is lost, because its worker was killed."""

_ID = re.compile(r"[A-Za-z0-9_-]{28}")


class HoldsUnsupported(HeadgateError):
    """The limiter's store cannot keep holds."""


class HoldBusy(HeadgateError):
    """Another call is confirming the hold."""


def new_id(limiter: str) -> str:
    """Return an id that cannot be guessed; its end identifies the limiter whose store to read first."""
    return secrets.token_urlsafe(18) + limiter_hint(limiter)


def is_id(hold_id: object) -> bool:
    """Return whether a value has the form of an id."""
    return isinstance(hold_id, str) and _ID.fullmatch(hold_id) is not None


def limiter_hint(limiter: str) -> str:
    """Return the end of the ids of a limiter's holds."""
    digest = blake2b(limiter.encode("utf-8", "surrogatepass"), digest_size=3).digest()
    return urlsafe_b64encode(digest).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
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
        final: The final cost, or that of the confirmation in progress; `None` while the hold is open.
        confirming_since: When the confirmation in progress began, in microseconds by the worker's clock.
        nonce: Makes the record of each call that ends the hold unique, so that only one call finds its own.
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
    final: Cost | None = None
    confirming_since: int | None = None
    nonce: str = ""
    lost: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the outcome can no longer change."""
        return self.final is not None and self.confirming_since is None

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
            return cls(**{name: _decoded(value) for name, value in json.loads(text).items()})
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


def kept_for(seconds: float) -> float:
    """Return the lifetime of a record whose units expire after `seconds`."""
    return min(seconds + MARGIN, LONGEST_NOTE)


class StoredHold:
    """A hold in the store, and the atomic step that changes it.

    Args:
        notes: The store.
        hold_id: The id of the hold.
        text: The text of its record.

    Attributes:
        record: The record.
        text: Its text, as it was last read or written.
    """

    def __init__(self, notes: AsyncNotes, hold_id: str, text: str) -> None:
        self.notes = notes
        self.hold_id = hold_id
        self._set(text)

    def _set(self, text: str) -> None:
        # Not encoded again for `replaces=`: another version of Headgate may have written it.
        self.text, self.record = text, HoldRecord.from_text(text)

    @classmethod
    async def read(cls, notes: AsyncNotes, hold_id: str) -> StoredHold | None:
        """Return a hold; `None` if the store has no record of it."""
        text = await read_note(notes, f"hold/{hold_id}")
        return None if text is None else cls(notes, hold_id, text)

    async def write(self) -> None:
        """Write a new record, or extend the lifetime of an unchanged one."""
        await write_note(self.notes, f"hold/{self.hold_id}", self.text, self.record.kept_for)

    async def claim(self, cost: Cost, now_us: int, *, to_confirm: bool = False) -> bool:
        """Give an open hold its final cost, or begin to confirm it; return false if another call has made it final.

        Raises:
            HoldBusy: Another call is confirming the hold.
        """
        while not self.record.is_final:
            since = self.record.confirming_since
            is_lost = since is not None and abs(now_us - since) >= CONFIRMING_US  # also if clocks differ
            if since is not None and not is_lost:
                await self._wait_for_change()
                continue
            claimed = replace(
                self.record,
                final=cost if isinstance(cost, int) else dict(cost),
                confirming_since=now_us if to_confirm else None,
                nonce=secrets.token_hex(8),
                lost=self.record.lost or is_lost,
            )
            if await self._replace(claimed):
                return True
        return False

    async def end_confirmation(self, *, is_final: bool) -> None:
        """Make a confirmed hold final, or reopen it after a refusal."""
        final = self.record.final if is_final else None
        await self._replace(replace(self.record, final=final, confirming_since=None))

    async def _replace(self, record: HoldRecord) -> bool:
        """Replace the record in one atomic step; return false if another call was first, whose record is then read.

        A changed record is kept longer than a new one, so that the worker that took the hold still finds the outcome
        when the hold has expired.
        """
        new, seconds = record.text(), kept_for(record.kept_for)
        stored = await write_note(self.notes, f"hold/{self.hold_id}", new, seconds, self.text)
        self._set(stored)
        return stored == new

    async def _wait_for_change(self) -> None:
        """Wait until another call has confirmed the hold, and read the new record."""
        for pause in PAUSES:
            await asyncio.sleep(pause)
            stored = await self.read(self.notes, self.hold_id)
            if stored is not None and stored.text != self.text:
                self._set(stored.text)
                return
        raise HoldBusy("another call is confirming this hold; send the call again")


class HeldUnits:
    """The units of a recorded hold, by the current rules of its limiter, so that any worker can settle them.

    If the rules have changed, the hold is settled by its rules that still exist. Nothing is given back or recorded in
    other rules, in shadow rules, or in a store that did not charge the hold.

    Args:
        limiter: The limiter.
        stored: The hold in the store.
    """

    def __init__(self, limiter: AsyncLimiter, stored: StoredHold) -> None:
        self._limiter = limiter
        self._stored = stored
        by_identity = {rule.identity: rule for rule in limiter.rules}
        self.has_same_rules = tuple(by_identity) == stored.record.rules
        self._rules = tuple(
            by_identity[identity] for identity in stored.record.rules if identity in by_identity
        )
        self._units = Units(limiter.name, self._rules)
        held = stored.record.cost
        if not isinstance(held, int):  # without units that no current rule counts
            held = {rule.unit: held.get(rule.unit, 0) for rule in self._rules} or 0
        self._cost = held

    def final_cost(self, cost: Cost) -> Cost:
        """Return the final cost if the hold is settled at this cost.

        Raises:
            ConfigError: The cost is not a whole number, or names a unit that the limiter does not count.
            CostTooHigh: The excess could not be recorded even in a fresh state.
        """
        held = self._units.costs(self._cost)
        final = self._units.settled(cost, held)
        _, more = self._units.difference(held, final)
        each = more if isinstance(more, tuple) else (more,) * len(self._rules)
        for rule, units in zip(self._rules, each, strict=True):
            if units:
                algorithm_for(rule, rule.quota_for(self._stored.record.tier)).record(None, 0, units, 0)
        return cost if isinstance(cost, int) else self._units.named(final)

    def hold(self, *, calls_hooks: bool = False, to_renew: bool = False) -> AsyncHold:
        """Return the library's hold of the units.

        Args:
            calls_hooks: Whether the limiter's hooks are called at its end.
            to_renew: Whether its leases are renewed; then receipts that may have been used are included.
        """
        limiter, record = self._limiter, self._stored.record
        may_refund = limiter.store.notes is self._stored.notes and (to_renew or not record.lost)
        receipts = (record.receipts or ()) if may_refund else ()
        live = tuple(receipt for receipt in receipts if _shadow_rule(receipt) is None)
        if self.has_same_rules:
            known = _shadow_rules(limiter)
            shadows = tuple(receipt for receipt in receipts if _shadow_rule(receipt) in known)
            gate, kept = limiter.settling(shadows), live + shadows
            quotas = quotas_of(limiter.rules, record.quota)
        else:
            own = AsyncLimiter(*self._rules, name=limiter.name, store=limiter.store)
            charged = dict(zip(record.rules, live, strict=False))
            gate = own.gate
            kept = tuple(charged[rule.identity] for rule in self._rules if rule.identity in charged)
            quotas = None
        new_hold: Callable[..., AsyncHold] = limiter.new_hold if calls_hooks else AsyncHold
        return new_hold(
            *(gate, UNLIMITED, kept or None, record.key, self._cost, record.tier),
            units=self._units,
            quotas=quotas,
        )

    async def settle(self, cost: Cost, *, calls_hooks: bool) -> bool:
        """Give units back or record more, after the outcome became final; return `AsyncHold.degraded`."""
        hold = self.hold(calls_hooks=calls_hooks)
        try:
            await hold.settle(cost)
        except (ConfigError, CostTooHigh) as error:  # too late to refuse the cost
            logger.warning(
                "units above a hold of %s could not be recorded, in limiter %r: %s",
                self._stored.record.cost,
                self._limiter.name,
                error,
            )
        return hold.degraded


def _shadow_rules(limiter: AsyncLimiter) -> set[str | None]:
    """Return the identities of a limiter's shadow rules."""
    return (
        {shadow.rule.identity for shadow in limiter.shadows} if isinstance(limiter, AsyncVersion) else set()
    )


def _shadow_rule(receipt: tuple[object, object]) -> str | None:
    """Return the identity of the shadow rule of a receipt; `None` for a live rule."""
    match receipt:
        case ((marked, str(identity), _), _) if marked == SHADOW:
            return identity
    return None
