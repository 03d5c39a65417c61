"""The holds of a server: take, settle, confirm and renew them by id."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from headgate import (
    AsyncHold,
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Decision,
    HeadgateError,
    StoreError,
)
from headgate.clock import Clock, SteadyClock, to_microseconds
from headgate.costs import Cost, total
from headgate.keys import Key
from headgate.quotas import QuotaValue
from headgate.stores import AsyncNotes
from headgate_server.holds import open_holds
from headgate_server.holds.open_holds import OpenHolds
from headgate_server.holds.record import (
    HoldRecord,
    HoldsUnsupported,
    SettleClaim,
    StoredHold,
    is_id,
    kept_for,
    limiter_hint,
    new_id,
)
from headgate_server.holds.restore import RestoredHold

T = TypeVar("T")

MAX_PER_CALLER = 10_000
"""Open holds of one caller in one worker."""

CHECKED_AT_ONCE = 1_000
"""Open holds that `tidy` checks at a time if there are as many: other workers may have settled them."""


class UnknownLimiter(HeadgateError, LookupError):
    """No limiter has this name."""


class UnknownHold(HeadgateError, LookupError):
    """No hold has this id, or it has expired."""


class TooManyHolds(HeadgateError):
    """The caller has too many open holds."""


class HoldResult(NamedTuple):
    """The answer to a hold or a renewal.

    Attributes:
        decision: The decision.
        hold: The id of the hold; `None` if it was refused.
        expires_after: Seconds until its units expire; `None` if it was refused.
    """

    decision: Decision
    hold: str | None = None
    expires_after: float | None = None


class SettleResult(NamedTuple):
    """The outcome of a hold.

    Attributes:
        limiter: Name of the limiter.
        held: The held units.
        cost: The final cost: that of the first call that settled or released the hold.
        first: Whether this call was the first.
        degraded: Whether the store could not be reached, so that units above the held cost may not be counted. It is
            not stored, so only the first call reports it, except for a hold that has no record.
    """

    limiter: str
    held: Cost
    cost: Cost
    first: bool
    degraded: bool = False


class HoldBook:
    """The holds of a server.

    Books in several workers or servers on the same stores share their holds.

    Args:
        live: Limiters by name.
        clock: The clock for the expiry of holds that this process took, and for lost confirmations.
        run: The same text in all books whose hooks count open holds together. Hooks are not called for holds of
            another run.
    """

    def __init__(
        self, live: Mapping[str, AsyncLimiter], *, clock: Clock | None = None, run: str = ""
    ) -> None:
        self._live = live
        self._run = run
        self._clock: Clock = SteadyClock() if clock is None else clock
        self._watched = OpenHolds()  # taken here, with a record; for hooks that count open holds
        self._local = OpenHolds()  # taken here while the store was down, without a record
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
        is_final: bool = True,
    ) -> HoldResult:
        """Take units that are not final yet.

        The result has no id if the units were refused, or if the cost is 0: then there is nothing to settle, and the true
        cost can be recorded. The id is valid for `MARGIN` seconds longer than the units count. Only this book knows the id
        of a degraded decision. With `is_final=False` no penalty counts a refusal.

        Raises:
            UnknownLimiter: No limiter has this name.
            HoldsUnsupported: Its store cannot keep holds.
            TooManyHolds: The caller has too many open holds.
            StoreError: The record could not be written, so the hold was released.
            CostTooHigh: The cost exceeds the capacity of a rule.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        limiter = self._limiter(limiter_name)
        notes = _notes_of(limiter)
        rules = tuple(rule.identity for rule in limiter.rules)
        if self._watched.of_caller(caller) >= MAX_PER_CALLER:
            raise TooManyHolds(
                f"this caller has {MAX_PER_CALLER} open holds; settle or release some, or wait until they expire"
            )
        if is_final:
            hold = await limiter.hold(key, cost, tier=tier, quota=quota)
        else:
            hold = await _attempt(limiter.current, key, cost, tier, quota)
        if not hold or limiter.units.costs(cost) == 0:
            return HoldResult(hold.decision)
        hold_id, expires_after = new_id(limiter_name), _expires_after(hold.decision, hold)
        lifetime = kept_for(expires_after)
        if hold.decision.degraded:
            self._local.add(hold_id, limiter_name, hold, self._due(lifetime))
        else:
            is_watched = hold.is_observed and len(self._watched) < open_holds.MAX_OPEN
            watched_in = self._run if is_watched else None
            units = (hold.key, hold.cost, hold.tier, rules, hold.receipts)
            record = HoldRecord(limiter_name, *units, lifetime, watched_in, quota)
            await self._write_new(StoredHold(notes, hold_id, record), hold)
            if is_watched:
                self._watched.add(hold_id, limiter_name, hold, self._due(lifetime), caller)
        return HoldResult(hold.decision, hold_id, expires_after)

    async def _write_new(self, stored: StoredHold, hold: AsyncHold) -> None:
        """Write the record of a new hold; release the hold if that fails."""
        try:
            await stored.write()
        except BaseException:
            await self._run_to_end(_release(hold))
            raise

    async def finish(self, hold_id: str, cost: Cost) -> SettleResult:
        """Settle a hold at its true cost; a cost of 0 releases it.

        Only the first call has an effect; later ones return its outcome. Units held beyond the cost are given back as far
        as they still count and the limiter still has the rules that counted them. Units above the held cost are recorded,
        even beyond the limit.

        Raises:
            UnknownHold: No hold has this id, it has expired, or another worker took it while the store was down.
            HoldBusy: Another call is confirming it.
            StoreError: The store cannot be reached; or it failed after the hold became final.
            CostTooHigh: The cost exceeds the range of a rule.
            ConfigError: The cost is not a whole number, or names a unit that the limiter does not count.
        """
        local = self._local.get(hold_id)
        if local is not None:
            is_first = local.hold.final is None
            final = await local.hold.settle(cost)
            return SettleResult(local.limiter, local.hold.cost, final, is_first, local.hold.degraded)
        return await self._run_to_end(self._finish(await self._find(hold_id), cost))

    async def _finish(self, stored: StoredHold, cost: Cost) -> SettleResult:
        limiter = self._live.get(stored.record.limiter)
        restored = None if limiter is None else RestoredHold(limiter.current, stored)
        if restored is not None:
            cost = restored.final_cost(cost)
        claim = SettleClaim.new(cost)
        final = await stored.claim(claim, self._clock.now_us())
        self._watched.disarm(stored.hold_id)
        record = stored.record
        if final != claim:
            return SettleResult(record.limiter, record.cost, final.cost, first=False)
        degraded = restored is not None and await restored.settle(
            cost, calls_hooks=record.watched_in == self._run
        )
        return SettleResult(record.limiter, record.cost, cost, first=True, degraded=degraded)

    async def confirm(self, hold_id: str, cost: Cost | None = None) -> Decision:
        """Make a hold final as of now, like `AsyncHold.confirm`; a refusal leaves it open.

        Raises:
            UnknownHold: No hold has this id, it has expired, or another worker took it while the store was down.
            UnknownLimiter: The policy no longer has its limiter.
            HoldBusy: Another call is confirming it.
            StoreError: The store cannot be reached; or it failed in between, and the units may have been moved.
            CostTooHigh: The cost exceeds the capacity of a rule.
            ConfigError: The cost does not fit, or the limiter has other rules now.
        """
        local = self._local.get(hold_id)
        if local is not None:
            return await local.hold.confirm(cost)
        return await self._run_to_end(self._confirm(await self._find(hold_id), cost))

    async def _confirm(self, stored: StoredHold, cost: Cost | None) -> Decision:
        restored, record = self._unchanged(stored), stored.record
        final = record.cost if cost is None else restored.final_cost(cost)
        now = self._clock.now_us()
        claim = SettleClaim.new(final, now)
        outcome = await stored.claim(claim, now)
        if outcome != claim:
            decision = await self._limiter(record.limiter).check(record.key, 0, tier=record.tier)
            return decision if total(outcome.cost) else decision.as_refused()
        hold = restored.hold(calls_hooks=record.watched_in == self._run)
        try:
            decision = await hold.confirm(cost)
        except (ConfigError, CostTooHigh):
            hold.forget()
            await stored.end_confirmation(is_final=False)
            raise
        if decision.allowed:
            self._watched.disarm(stored.hold_id)
        else:
            hold.forget()
        await stored.end_confirmation(is_final=decision.allowed)
        return decision

    async def renew(self, hold_id: str) -> HoldResult:
        """Extend the lease of a hold's places, like `AsyncHold.renew`. The id stays the same, and the call may be repeated.

        Raises:
            UnknownHold: The id is unknown or expired, or another worker took the hold while the store was down.
            UnknownLimiter: The policy no longer has its limiter.
            StoreError: The store cannot be reached.
            ConfigError: The hold has no places, or the limiter has other rules now.
        """
        local = self._local.get(hold_id)
        if local is None:
            return await self._run_to_end(self._renew(await self._find(hold_id)))
        decision = await local.hold.renew()
        if not decision:
            return HoldResult(decision)
        expires_after = _expires_after(decision, local.hold)
        self._local.extend(hold_id, self._due(kept_for(expires_after)))
        return HoldResult(decision, hold_id, expires_after)

    async def _renew(self, stored: StoredHold) -> HoldResult:
        hold = self._unchanged(stored).hold(to_renew=True)
        decision = await hold.renew()
        if not decision:
            return HoldResult(decision)
        await stored.write()
        self._watched.extend(stored.hold_id, self._due(stored.record.kept_for))
        return HoldResult(decision, stored.hold_id, _expires_after(decision, hold))

    async def tidy(self) -> None:
        """Drop expired holds, and call the limiters' hooks for holds that were never settled.

        Call it more often than every `MARGIN` seconds. A worker that settles a hold of another worker calls its own hooks,
        and the worker that took the hold calls none. So the units of open holds add up over all workers.
        """
        now = self._clock.now_us()
        for hold_id in self._local.due(now):
            self._local.drop(hold_id)
        due = self._watched.due(now)
        checked = list(due)
        if len(self._watched) >= CHECKED_AT_ONCE:  # or they would fill the room of their callers
            checked += self._watched.next_few(CHECKED_AT_ONCE)
        settled = await asyncio.gather(*map(self._was_settled, checked))
        for hold_id, was_settled in zip(checked, settled, strict=True):
            if was_settled:
                self._watched.disarm(hold_id)
            elif was_settled is False and hold_id in due:
                self._watched.drop(hold_id)

    async def _was_settled(self, hold_id: str) -> bool | None:
        """Return whether a hold was settled, false if its record has expired; `None` if it is open or the store is down."""
        for notes, is_likely in self._stores(hold_id):
            if is_likely:
                try:
                    stored = await StoredHold.read(notes, hold_id)
                except StoreError:
                    return None
                return False if stored is None else (stored.record.is_final or None)
        return False

    async def _find(self, hold_id: str) -> StoredHold:
        failure: StoreError | None = None
        for notes, is_likely in self._stores(hold_id) if is_id(hold_id) else ():
            try:
                stored = await StoredHold.read(notes, hold_id)
            except StoreError as error:
                if is_likely:
                    raise
                failure = error
            else:
                if stored is not None:
                    return stored
        raise failure or UnknownHold(
            f"there is no hold {hold_id!r:.40}; if there was one, its units have expired"
        )

    def _stores(self, hold_id: str) -> Iterator[tuple[AsyncNotes, bool]]:
        """Yield the stores that may have a record, each once; the one that the id names is first and likely.

        The others are for holds of a limiter that the policy no longer has, or has in another store.
        """
        seen: set[int] = set()
        hints = [(limiter_hint(name) == hold_id[-4:], limiter.store) for name, limiter in self._live.items()]
        for is_likely, store in sorted(hints, key=lambda hint: not hint[0]):
            if id(store) not in seen and store.notes is not None:
                seen.add(id(store))
                yield store.notes, is_likely

    def _limiter(self, name: str) -> AsyncLimiter:
        try:
            return self._live[name]
        except KeyError:
            raise UnknownLimiter(f"there is no limiter called {name!r}") from None

    def _unchanged(self, stored: StoredHold) -> RestoredHold:
        """Return a hold whose limiter still has its rules."""
        name = stored.record.limiter
        restored = RestoredHold(self._limiter(name).current, stored)
        if restored.has_same_rules:
            return restored
        raise ConfigError(
            f"limiter {name!r} has other rules now than when the hold was taken; it can be settled or released"
        )

    def _due(self, seconds: float) -> int:
        return self._clock.now_us() + to_microseconds(seconds)

    async def _run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Complete some work even if the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._running.add(task)  # the event loop has only a weak reference
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, if the caller was cancelled


async def _release(hold: AsyncHold) -> None:
    with suppress(StoreError):  # the units count until they expire; the caller gets the first error
        await hold.release()


def _notes_of(limiter: AsyncLimiter) -> AsyncNotes:
    notes = limiter.store.notes
    if notes is not None:
        return notes
    raise HoldsUnsupported(
        f"limiter {limiter.name!r} counts in a {type(limiter.store).__name__}, which cannot keep holds; "
        f"use memory, SQLite, Redis or PostgreSQL"
    )


async def _attempt(
    limiter: AsyncLimiter, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None
) -> AsyncHold:
    """Return a hold like `limiter.hold`, but without counting a refusal for penalties."""
    request = limiter.request("hold", key, cost, tier, quota, is_final=False)
    decision, receipts = await limiter.gate.decide(request)
    gate = limiter.settling(receipts)
    return limiter.new_hold(
        gate, decision, receipts, key, cost, tier, units=limiter.units, quotas=request.quotas
    )


def _expires_after(decision: Decision, hold: AsyncHold) -> float:
    """Return the seconds until all units of a hold have expired."""
    if hold.receipts is None:
        return 0.0
    return max((result.reset_after or 0.0 for result in decision.results), default=0.0)
