"""Holds of the HTTP API: they outlive the request that took them, and any worker can settle them.

A hold is one record in the store that counts its units, under its id (`HoldRecord`). Every change of its state is one
atomic step: a worker replaces the record that it has read (`AsyncNotes.note` with `replaces=`). Of all workers that try,
also after a restart, one succeeds.

    open -> final                 settle or release: only the worker that replaced the record gives back or records
    open -> confirming -> final   confirm, admitted
    open -> confirming -> open    confirm, refused

A confirmation without a result after `CONFIRMING_US` counts as open: its worker died.
Renewing extends the leases and the lifetime of the record; it can be repeated.

If a worker is killed between two steps, a store fails there or a reply is lost, units stay counted until they expire,
and are never given back twice. After a lost confirmation, the next one takes additional units, because it is unknown
whether the units of the hold were moved.

A hold that the failure policy admitted while the store was down has no record, and only the worker that took it can end
it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from headgate import AsyncHold, AsyncLimiter, ConfigError, CostTooHigh, Decision, HeadgateError, StoreError
from headgate.clock import Clock, SteadyClock, to_microseconds
from headgate.costs import Cost, total
from headgate.keys import Key
from headgate.quotas import QuotaValue
from headgate.stores import AsyncNotes
from headgate_server.hold_record import (
    HeldUnits,
    HoldRecord,
    HoldsUnsupported,
    StoredHold,
    is_id,
    kept_for,
    limiter_hint,
    new_id,
)

T = TypeVar("T")

MAX_PER_CALLER = 10_000
"""Open holds of one caller in one worker."""

MAX_OPEN = 20_000
"""Maximum number of open holds with a record that a worker watches, and of open holds without a record."""

CHECKED_AT_ONCE = 1_000
"""Maximum number of open holds that `tidy` checks at a time, because other workers may have settled them."""


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
    """The holds of a server: take, settle, confirm and renew them by id.

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
        cost can be recorded. The id is valid for `MARGIN` seconds longer than the units count. The id of a degraded
        decision is known only in this book. With `is_final=False` no penalty counts a refusal.

        Raises:
            UnknownLimiter: No limiter has this name.
            HoldsUnsupported: Its store cannot keep holds.
            TooManyHolds: The caller has too many open holds.
            StoreError: The record could not be written, so the hold was released.
            CostTooHigh: The cost exceeds the capacity of a rule.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        limiter = self._limiter(limiter_name).current  # rules, units and gate of one version
        notes = _notes_of(limiter)
        if self._watched.of_caller(caller) >= MAX_PER_CALLER:
            raise TooManyHolds(
                f"this caller has {MAX_PER_CALLER} open holds; settle or release some, or wait until they expire"
            )
        request = limiter.request("hold", key, cost, tier, quota, is_final=is_final)
        decision, receipts = await limiter.gate.decide(request)
        hold = limiter.new_hold(
            *(limiter.settling(receipts), decision, receipts, key, cost, tier),
            units=limiter.units,
            quotas=request.quotas,
        )
        if not hold or limiter.units.costs(cost) == 0:
            return HoldResult(decision)
        hold_id, expires_after = new_id(limiter_name), _expires_after(decision, hold)
        lifetime = kept_for(expires_after)
        if decision.degraded:
            self._local.add(hold_id, limiter_name, hold, self._due(lifetime))
            return HoldResult(decision, hold_id, expires_after)
        is_watched = hold.is_observed and len(self._watched) < MAX_OPEN
        record = HoldRecord(
            limiter=limiter_name,
            key=hold.key,
            cost=hold.cost,
            tier=hold.tier,
            rules=tuple(rule.identity for rule in limiter.rules),
            receipts=hold.receipts,
            kept_for=lifetime,
            watched_in=self._run if is_watched else None,
            quota=quota,
        )
        try:
            await StoredHold(notes, hold_id, record.text()).write()
        except BaseException:
            await self._run_to_end(_release(hold))
            raise
        if is_watched:
            self._watched.add(hold_id, limiter_name, hold, self._due(lifetime), caller)
        return HoldResult(decision, hold_id, expires_after)

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
        units = None if limiter is None else HeldUnits(limiter.current, stored)
        if units is not None:
            cost = units.final_cost(cost)
        is_first = await stored.claim(cost, self._clock.now_us())
        self._watched.disarm(stored.hold_id)
        record = stored.record
        degraded = False
        if is_first and units is not None:
            degraded = await units.settle(cost, calls_hooks=record.watched_in == self._run)
        assert record.final is not None
        return SettleResult(record.limiter, record.cost, record.final, is_first, degraded)

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
        units = self._unchanged(stored)
        final = stored.record.cost if cost is None else units.final_cost(cost)
        is_first = await stored.claim(final, self._clock.now_us(), to_confirm=True)
        record = stored.record
        if not is_first:
            decision = await self._limiter(record.limiter).check(record.key, 0, tier=record.tier)
            return decision if total(record.final or 0) else decision.as_refused()
        hold = units.hold(calls_hooks=record.watched_in == self._run)
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
        if len(self._watched) >= CHECKED_AT_ONCE:  # else their callers could take no more holds
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

        The other stores are for holds of limiters that were removed from the policy or moved to another store.
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
            raise UnknownLimiter(f"there is no limiter {name!r}") from None

    def _unchanged(self, stored: StoredHold) -> HeldUnits:
        """Return the units of a hold whose limiter still has its rules."""
        name = stored.record.limiter
        units = HeldUnits(self._limiter(name).current, stored)
        if units.has_same_rules:
            return units
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


def _expires_after(decision: Decision, hold: AsyncHold) -> float:
    """Return the seconds until all units of a hold have expired."""
    if hold.receipts is None:
        return 0.0
    return max((result.reset_after or 0.0 for result in decision.results), default=0.0)


class OpenHold(NamedTuple):
    """A hold that no call in this process has ended; after `due` (microseconds) it can no longer be settled."""

    limiter: str
    hold: AsyncHold
    due: int
    caller: str


class OpenHolds:
    """Open holds by id, at most `MAX_OPEN`."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenHold] = {}
        self._by_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def of_caller(self, caller: str) -> int:
        """Return the number of open holds of a caller."""
        return self._by_caller[caller]

    def add(self, hold_id: str, limiter: str, hold: AsyncHold, due: int, caller: str = "") -> None:
        """Remember a hold until it is due; drop the oldest if there are too many."""
        if len(self._by_id) >= MAX_OPEN:
            self.drop(next(iter(self._by_id)))
        self._by_id[hold_id] = OpenHold(limiter, hold, due, caller)
        self._by_caller[caller] += 1

    def get(self, hold_id: str) -> OpenHold | None:
        return self._by_id.get(hold_id)

    def extend(self, hold_id: str, due: int) -> None:
        """Remember a hold for longer, if it is remembered."""
        found = self._by_id.get(hold_id)
        if found is not None and found.due < due:
            self._by_id[hold_id] = found._replace(due=due)

    def disarm(self, hold_id: str) -> None:
        """Drop a hold whose hooks were called by the code that settled it."""
        found = self.drop(hold_id)
        if found is not None:
            found.hold.forget()

    def drop(self, hold_id: str) -> OpenHold | None:
        """Drop a hold, and return it. If it was not settled, its hooks are called when it is garbage-collected."""
        found = self._by_id.pop(hold_id, None)
        if found is not None:
            self._by_caller[found.caller] -= 1
            if not self._by_caller[found.caller]:
                del self._by_caller[found.caller]
        return found

    def due(self, now: int) -> list[str]:
        """Return the ids of the holds that can no longer be settled."""
        return [hold_id for hold_id, hold in self._by_id.items() if hold.due <= now]

    def next_few(self, number: int) -> list[str]:
        """Return the ids that this method has not returned for longest."""
        few = list(islice(self._by_id, number))
        for hold_id in few:
            self._by_id[hold_id] = self._by_id.pop(hold_id)
        return few
