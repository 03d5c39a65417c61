"""Holds that outlive the request that took them: what the server remembers of them, and where.

A hold is remembered in the store that counts its units: a note under its id says whose they are and how to give them back.
To settle a hold, a worker first notes the outcome. Of all workers that try, also after a restart, one finds its own outcome
noted, and only that one gives back or records. The others return what stands.

To confirm a hold is to note an outcome that may still be refused; the result is noted beside it. After a refusal the hold
is open again. To renew a hold extends its leases and the time for which its note is kept; it can be repeated.

A failure leaves units counted until they expire, and never gives back twice: a worker that is killed between the two
steps, a store that fails there, a response that gets lost. After a confirmation that was lost like this, the next one takes
units in addition, because no one knows whether those of the hold were moved.

A hold that the failure policy admitted while the store was down cannot be noted there. Only the worker that took it
remembers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from headgate import AsyncHold, AsyncLimiter, ConfigError, CostTooHigh, Decision, HeadgateError, StoreError
from headgate.clock import Clock, SteadyClock, to_microseconds
from headgate.costs import Cost, total
from headgate.keys import Key
from headgate.quotas import QuotaValue
from headgate.stores import LONGEST_NOTE, AsyncNotes
from headgate_server.hold_notes import (
    ADMITTED,
    REFUSED,
    Claim,
    HoldBusy,
    HoldEnd,
    HoldNote,
    HoldsUnsupported,
    claim_end,
    has_ended,
    hint_of,
    is_id,
    keep,
    look_up,
    new_id,
    result_of,
    start_of,
)
from headgate_server.open_holds import OpenHolds
from headgate_server.restored_holds import RestoredHold

__all__ = [
    "Finished",
    "HoldBook",
    "HoldBusy",
    "HoldsUnsupported",
    "TooManyHolds",
    "UnknownHold",
    "UnknownLimiter",
]

T = TypeVar("T")

MARGIN = 600.0
"""Seconds for which an id is remembered after its units have expired: until then a late settle is no mistake."""

MOST_PER_CALLER = 10_000
"""How many holds one caller may have open in a worker."""

_LOOKED_AT = 64


class UnknownLimiter(HeadgateError, LookupError):
    """There is no limiter of that name."""


class UnknownHold(HeadgateError, LookupError):
    """There is no hold with that id, or it has expired."""


class TooManyHolds(HeadgateError):
    """The caller has too many holds open."""


class Finished(NamedTuple):
    """How a hold ended.

    Attributes:
        limiter: Name of the limiter that it was taken from.
        held: The units that it took.
        cost: The cost that stands: that of the first call that settled or released it.
        first: Whether this call was the first.
        degraded: Whether the store could not be asked, so that units above what was held may not be counted. No note says
            it, so of a hold that a store remembers only the first call does.
    """

    limiter: str
    held: Cost
    cost: Cost
    first: bool
    degraded: bool = False


class Taken(NamedTuple):
    """The answer to a hold.

    Attributes:
        decision: The decision.
        hold: The id of the hold; `None` if it was refused.
        expires_after: Seconds until its units expire; `None` if it was refused.
    """

    decision: Decision
    hold: str | None = None
    expires_after: float | None = None


class HoldBook:
    """The holds of a server.

    Books in several workers or servers that use the same stores know each other's holds.

    Args:
        live: Limiters by name.
        clock: Tells when the holds that this process watches expire.
        run: The same text in all books whose hooks count open holds together. Hooks are not called for holds of another run.
    """

    def __init__(
        self, live: Mapping[str, AsyncLimiter], *, clock: Clock | None = None, run: str = ""
    ) -> None:
        self._live = live
        self._run = run
        self._clock: Clock = SteadyClock() if clock is None else clock
        self._watched = OpenHolds()  # taken here and noted in a store; for hooks that count open holds
        self._here = OpenHolds()  # taken here while the store was down, and known only here
        self._running: set[asyncio.Task[Any]] = set()

    async def take(
        self,
        limiter_name: str,
        key: Key | None = None,
        cost: Cost = 1,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        *,
        caller: str = "",
    ) -> Taken:
        """Take units that are not final yet; return the decision, the id of the hold, and after how long its units expire.

        Id and seconds are `None` if the units were refused, or if the cost is 0: then there is nothing to settle, and the
        true cost can be recorded. The id is good for `MARGIN` seconds longer than the units count. Only this book knows the
        id of a degraded decision.

        Raises:
            UnknownLimiter: There is no such limiter.
            HoldsUnsupported: Its store cannot remember holds.
            TooManyHolds: The caller has too many open.
            StoreError: The hold could not be remembered, so it was released.
            CostTooHigh: The cost is above what a rule could ever admit at once.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        limiter = self._limiter(limiter_name)
        notes = _notes_of(limiter)
        rules = tuple(rule.identity for rule in limiter.rules)
        if self._watched.of_caller(caller) >= MOST_PER_CALLER:
            raise TooManyHolds(
                f"{MOST_PER_CALLER} holds of this caller are open; settle or release some, or let them expire"
            )
        hold = await limiter.hold(key, cost, tier=tier, quota=quota)
        if not hold or limiter.units.costs(cost) == 0:
            return Taken(hold.decision)
        if hold.decision.degraded:
            hold_id, expires_after = new_id(limiter_name), _expires_after(hold.decision, hold)
            self._here.add(hold_id, limiter_name, hold, self._due(_kept_for(expires_after)))
            return Taken(hold.decision, hold_id, expires_after)
        note = HoldNote(limiter_name, hold.key, hold.cost, hold.tier, rules, hold.receipts, 0.0, None, quota)
        return await self._remember(notes, hold, hold.decision, note, caller)

    async def _remember(
        self, notes: AsyncNotes, hold: AsyncHold, decision: Decision, note: HoldNote, caller: str = ""
    ) -> Taken:
        """Note a hold under a new id; release it if that fails."""
        hold_id, expires_after = new_id(note.limiter), _expires_after(decision, hold)
        kept_for = _kept_for(expires_after)
        is_watched = hold.is_observed and not self._watched.is_full
        try:
            note = replace(note, kept_for=kept_for, watched_in=self._run if is_watched else None)
            await keep(notes, start_of(hold_id), note.text(), kept_for)
        except BaseException:
            await self._to_the_end(_release(hold))
            raise
        if is_watched:
            self._watched.add(hold_id, note.limiter, hold, self._due(kept_for), caller)
        return Taken(decision, hold_id, expires_after)

    def _due(self, seconds: float) -> int:
        return self._clock.now_us() + to_microseconds(seconds)

    async def finish(self, hold_id: str, cost: Cost) -> Finished:
        """Make a hold final at its true cost; a cost of 0 releases it.

        Only the first call counts; later ones return its outcome. Units held beyond the cost are given back as far as they
        still count and the limiter still has the rules that counted them. Units above what was held are recorded, even
        beyond the limit.

        Raises:
            UnknownHold: There is no such hold, it has expired, or another worker took it while the store was down.
            HoldBusy: Another call is confirming it.
            StoreError: The store cannot be asked; or it failed after the outcome was noted, and then the hold is final.
            CostTooHigh: So many units can never be counted.
            ConfigError: The cost is not a whole number, or of a unit that the limiter does not count.
        """
        here = self._here.get(hold_id)
        if here is not None:
            is_first = here.hold.final is None
            final = await here.hold.settle(cost)
            return Finished(here.limiter, here.hold.cost, final, is_first, here.hold.degraded)
        notes, note = await self._find(hold_id)
        return await self._to_the_end(self._finish(hold_id, notes, note, cost))

    async def confirm(self, hold_id: str, cost: Cost | None = None) -> Decision:
        """Make a hold final as of now, as `AsyncHold.confirm`; a refusal leaves it open.

        Raises:
            UnknownHold: There is no such hold, it has expired, or another worker took it while the store was down.
            UnknownLimiter: The policy no longer has its limiter.
            HoldBusy: Another call is confirming it.
            StoreError: The store cannot be asked; or it failed in between, and its units may have been moved.
            CostTooHigh: The cost is above what a rule could ever admit at once.
            ConfigError: The cost does not fit, or the limiter has other rules now.
        """
        here = self._here.get(hold_id)
        if here is not None:
            return await here.hold.confirm(cost)

        notes, note = await self._find(hold_id)
        return await self._to_the_end(self._confirm(hold_id, notes, note, cost))

    async def _confirm(self, hold_id: str, notes: AsyncNotes, note: HoldNote, cost: Cost | None) -> Decision:
        limiter = self._unchanged(note)
        final = note.cost if cost is None else RestoredHold(limiter, notes, note).standing(cost)
        end = await self._claim(hold_id, notes, note, Claim.new(final, self._clock.now_us()))
        if not end.is_ours:
            now = await limiter.check(note.key, 0, tier=note.tier)
            return now if total(end.claim.cost) else now.as_refused()
        restored = RestoredHold(limiter, notes, _kept_receipts(note, end))
        hold = restored.hold(calls_hooks=note.watched_in == self._run)
        try:
            decision = await hold.confirm(cost)
        except (ConfigError, CostTooHigh):
            await self._refuse(hold, notes, note, end)
            raise
        if not decision.allowed:
            await self._refuse(hold, notes, note, end)
            return decision
        self._watched.disarm(hold_id)
        await keep(notes, result_of(end.name), ADMITTED, _kept_for(note.kept_for))
        return decision

    async def renew(self, hold_id: str) -> Taken:
        """Extend the lease of a hold's places, like `AsyncHold.renew`. The id stays the same, and the call may be repeated.

        Raises:
            UnknownHold: The id is unknown or expired, or another worker took the hold while the store was down.
            UnknownLimiter: The policy no longer has its limiter.
            StoreError: The store cannot be asked.
            ConfigError: It has no places, or the limiter has other rules now.
        """
        here = self._here.get(hold_id)
        if here is None:
            notes, note = await self._find(hold_id)
            return await self._to_the_end(self._renew(hold_id, notes, note))
        decision = await here.hold.renew()
        if not decision:
            return Taken(decision)
        expires_after = _expires_after(decision, here.hold)
        self._here.extend(hold_id, self._due(_kept_for(expires_after)))
        return Taken(decision, hold_id, expires_after)

    async def _renew(self, hold_id: str, notes: AsyncNotes, note: HoldNote) -> Taken:
        hold = RestoredHold(self._unchanged(note), notes, note).hold(calls_hooks=False)
        decision = await hold.renew()
        if not decision:
            return Taken(decision)
        await keep(notes, start_of(hold_id), note.text(), note.kept_for)  # the same text is kept for longer
        self._watched.extend(hold_id, self._due(note.kept_for))
        return Taken(decision, hold_id, _expires_after(decision, hold))

    async def _refuse(self, hold: AsyncHold, notes: AsyncNotes, note: HoldNote, end: HoldEnd) -> None:
        hold.forget()
        await keep(notes, result_of(end.name), REFUSED, _kept_for(note.kept_for))

    async def _claim(self, hold_id: str, notes: AsyncNotes, note: HoldNote, claim: Claim) -> HoldEnd:
        """Note the outcome of a hold, unless there is one.

        The outcome is kept for longer than the hold: were it forgotten first, the next call would be the first again. And
        the worker that took the hold still finds the outcome when the hold has expired.
        """
        return await claim_end(notes, hold_id, claim, _kept_for(note.kept_for), self._clock.now_us())

    def _unchanged(self, note: HoldNote) -> AsyncLimiter:
        """Return the limiter of a hold, if it still has the rules that the hold was taken by."""
        limiter = self._limiter(note.limiter).current
        if tuple(rule.identity for rule in limiter.rules) == note.rules:
            return limiter
        raise ConfigError(
            f"limiter {note.limiter!r} has other rules now than when the hold was taken; it can be settled or released"
        )

    async def tidy(self) -> None:
        """Forget holds that have expired, and call the limiters' hooks for those that were never settled.

        Call it more often than every `MARGIN` seconds. If another worker settles a hold that was taken here, it calls its
        own hooks, not ours. So the units of open holds add up over all workers.
        """
        now = self._clock.now_us()
        for hold_id in self._here.due(now):
            self._here.drop(hold_id)
        looked_at = self._watched.due(now)
        if self._watched.is_half_full:  # find those that other workers have settled
            looked_at += self._watched.next_few(_LOOKED_AT)
        settled = await asyncio.gather(*map(self._was_settled, looked_at))
        for hold_id, was_settled in zip(looked_at, settled, strict=True):
            if was_settled:
                self._watched.disarm(hold_id)
            elif was_settled is False and self._watched.is_due(hold_id, now):
                self._watched.drop(hold_id)

    def _limiter(self, name: str) -> AsyncLimiter:
        try:
            return self._live[name]
        except KeyError:
            raise UnknownLimiter(f"there is no limiter called {name!r}") from None

    async def _finish(self, hold_id: str, notes: AsyncNotes, note: HoldNote, cost: Cost) -> Finished:
        limiter = self._live.get(note.limiter)
        held = None if limiter is None else RestoredHold(limiter.current, notes, note)
        if held is not None:
            held.check_excess(cost)
            cost = held.standing(cost)
        end = await self._claim(hold_id, notes, note, Claim.new(cost))
        self._watched.disarm(hold_id)
        if not end.is_ours:
            return Finished(note.limiter, note.cost, end.claim.cost, first=False)
        if end.is_lost and limiter is not None:
            held = RestoredHold(limiter.current, notes, _kept_receipts(note, end))
        is_watched_here = note.watched_in == self._run
        degraded = held is not None and await held.settle(cost, calls_hooks=is_watched_here)
        return Finished(note.limiter, note.cost, cost, first=True, degraded=degraded)

    async def _find(self, hold_id: str) -> tuple[AsyncNotes, HoldNote]:
        """Return the store that has the note of a hold, and the note."""
        failure: StoreError | None = None
        for notes, is_likely in self._places(hold_id) if is_id(hold_id) else ():
            try:
                text = await look_up(notes, start_of(hold_id))
            except StoreError as error:
                if is_likely:
                    raise
                failure = error
            else:
                if text is not None:
                    return notes, HoldNote.read(text)
        raise failure or UnknownHold(
            f"there is no hold {hold_id!r:.40}; if there was one, its units have expired"
        )

    def _places(self, hold_id: str) -> Iterator[tuple[AsyncNotes, bool]]:
        """Yield the stores where a hold may be noted, each once; first, and marked as likely, the one that the id hints at.

        The others are for holds of a limiter that the policy no longer has, or has in another store.
        """
        seen: set[int] = set()
        limiters = [(hint_of(name) == hold_id[-4:], limiter.store) for name, limiter in self._live.items()]
        for is_likely, store in sorted(limiters, key=lambda place: not place[0]):
            if id(store) not in seen and store.notes is not None:
                seen.add(id(store))
                yield store.notes, is_likely

    async def _was_settled(self, hold_id: str) -> bool | None:
        """Return whether a hold was settled; `None` if that cannot be known just now, or another worker has renewed it."""
        for notes, is_likely in self._places(hold_id):
            if is_likely:
                try:
                    ended = await has_ended(notes, hold_id)
                    is_kept = ended is False and await look_up(notes, start_of(hold_id)) is not None
                except StoreError:
                    return None
                return None if is_kept else ended
        return False

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Complete some work even if the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._running.add(task)  # the event loop holds only a weak reference
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen, if the caller was cancelled


async def _release(hold: AsyncHold) -> None:
    with suppress(StoreError):  # the units count until they expire; the caller gets the error that led here
        await hold.release()


def _notes_of(limiter: AsyncLimiter) -> AsyncNotes:
    notes = limiter.store.notes
    if notes is not None:
        return notes
    raise HoldsUnsupported(
        f"limiter {limiter.name!r} counts in a {type(limiter.store).__name__}, which cannot remember holds; "
        f"stores in memory, SQLite, Redis and PostgreSQL can"
    )


def _expires_after(decision: Decision, hold: AsyncHold) -> float:
    """Return the seconds until all units of a hold have expired."""
    if hold.receipts is None:
        return 0.0
    return max((result.reset_after or 0.0 for result in decision.results), default=0.0)


def _kept_for(seconds: float) -> float:
    """Return the seconds for which a note is kept of something that expires after so many seconds."""
    return min(seconds + MARGIN, LONGEST_NOTE)


def _kept_receipts(note: HoldNote, end: HoldEnd) -> HoldNote:
    """Return a note without its receipts if they may have been used already."""
    return replace(note, receipts=None) if end.is_lost else note
