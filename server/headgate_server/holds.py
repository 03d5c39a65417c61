"""Holds that outlive the request they were taken in: what the server remembers of them, and where.

A hold is remembered in the store that counts its units: under its id a note says whose they are and how to give them back.
To settle it is to note the outcome first: of all who try, in whichever worker or after a restart, one is told that its own
outcome stands, and only that one gives back or records. The others return what stands.

To confirm or renew a hold is to note an outcome too, which may turn out to be refused: that is noted beside it, and then the
next outcome counts. A renewed hold has a new id, because a note is not changed: the old hold has ended then.

What goes wrong leaves units counted until they expire by themselves, and never gives back twice: a worker that dies between
the two steps, a store that fails there, a reply that nobody heard.

What a limiter's policy has decided because the store was down cannot be noted there. Such a hold is remembered by the
worker that took it, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from headgate import AsyncHold, AsyncLimiter, Decision, HeadgateError
from headgate.clock import Clock, SteadyClock, to_microseconds
from headgate.costs import Cost, Costs, Units
from headgate.decision import UNLIMITED
from headgate.errors import ConfigError, CostTooHigh, StoreError
from headgate.keys import Key
from headgate.policy import SHADOW, AsyncVersion
from headgate.quotas import QuotaValue, quotas_of
from headgate.rules import Rule
from headgate.stores.base import (
    LONGEST_NOTE,
    Answer,
    AsyncGate,
    AsyncNotes,
    Receipts,
    plain_tiers,
)
from headgate.stores.request import Request
from headgate_server.noted import (
    Entry,
    HoldsUnsupported,
    claim_end,
    cost_in,
    has_ended,
    hint_of,
    is_id,
    keep,
    look_up,
    new_claim,
    new_id,
    refused_of,
    start_of,
)

__all__ = ["Finished", "HoldBook", "HoldsUnsupported", "TooManyHolds", "UnknownHold", "UnknownLimiter"]

logger = logging.getLogger("headgate")

T = TypeVar("T")

MARGIN = 600.0
"""Seconds for which an id is remembered after its units have expired: until then a late settle is no mistake."""

MOST_OPEN = 20_000
"""How many open holds a process keeps an eye on, and how many it remembers itself while a store is down."""

MOST_PER_CALLER = 10_000
"""How many of them one caller may have open."""

_LOOKED_AT = 64


class UnknownLimiter(HeadgateError, LookupError):
    """There is no limiter of that name."""


class UnknownHold(HeadgateError, LookupError):
    """There is no hold of that id, or none any more."""


class TooManyHolds(HeadgateError):
    """The caller has too many holds open."""


class Finished(NamedTuple):
    """How a hold ended.

    Attributes:
        limiter: Name of the limiter that it was taken from.
        held: The units that it took.
        cost: The cost that stands: that of whoever settled or released first.
        first: Whether this call was that first one.
    """

    limiter: str
    held: Cost
    cost: Cost
    first: bool


class Taken(NamedTuple):
    """What came of asking for a hold.

    Attributes:
        decision: The answer.
        hold: The id of the hold; `None` if it was refused.
        expires_after: Seconds until its units expire; `None` if it was refused.
    """

    decision: Decision
    hold: str | None = None
    expires_after: float | None = None


class HoldBook:
    """What the server remembers of holds.

    Several books, in the workers of a server or in several servers, remember together if they use the same stores.

    Args:
        live: Limiters by name.
        clock: What tells when holds that this process keeps an eye on are over.
        run: What the books have in common whose hooks count open holds together; of holds of another run they are not told.
    """

    def __init__(
        self, live: Mapping[str, AsyncLimiter], *, clock: Clock | None = None, run: str = ""
    ) -> None:
        self._live = live
        self._run = run
        self._clock: Clock = SteadyClock() if clock is None else clock
        self._watched = _OpenHolds()  # taken here and noted in a store; for those who count open holds
        self._here = _OpenHolds()  # taken here while the store was down; nobody else knows of them
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

        Id and seconds are `None` if the units were refused, or if there are none: of a cost of 0 nothing is kept, and
        what it turns out to cost can be recorded. The id is good for `MARGIN` seconds longer than the units
        count. That of a degraded decision is known to this book alone.

        Raises:
            UnknownLimiter: There is no such limiter.
            HoldsUnsupported: Its store cannot remember holds.
            TooManyHolds: The caller has too many open, of which none was settled.
            StoreError: The hold could not be remembered, so it was released.
            CostTooHigh: The cost is above what a rule could ever admit at once.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        limiter = self._limiter(limiter_name)
        notes = _notes_of(limiter)
        rules = tuple(rule.identity for rule in limiter.rules)
        if self._watched.of_caller(caller) >= MOST_PER_CALLER:
            raise TooManyHolds(
                f"{MOST_PER_CALLER} holds are open that nobody has settled; settle or release some, or let them expire"
            )
        hold = await limiter.hold(key, cost, tier=tier, quota=quota)
        if not hold or limiter.units.costs(cost) == 0:
            return Taken(hold.decision)
        if hold.decision.degraded:
            hold_id, expires_after = new_id(limiter_name), _expires_after(hold.decision, hold)
            self._here.add(hold_id, limiter_name, hold, self._due(_kept_for(expires_after)))
            return Taken(hold.decision, hold_id, expires_after)
        entry = Entry(limiter_name, hold.key, hold.cost, hold.tier, rules, hold.receipts, 0.0, None, quota)
        return await self._remember(notes, hold, hold.decision, entry, caller)

    async def take_places(
        self, limiter_name: str, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None
    ) -> Taken:
        """Take the places of a hold alone, as `take`: what else it took has expired."""
        limiter = self._limiter(limiter_name).current
        notes = _notes_of(limiter)
        units, quotas = limiter.units, quotas_of(limiter.rules, quota)
        if not units.has_places:
            raise ConfigError(f"nothing to renew: no rule of limiter {limiter_name!r} is concurrent")
        request = Request("hold", key, units.only_places(units.costs(cost)), tier, None, quotas)
        decision, receipts = await limiter.gate.ask(request)
        gate = limiter.settling(receipts)
        hold = limiter.new_hold(gate, decision, receipts, key, cost, tier, units=units, quotas=quotas)
        if not hold:
            return Taken(decision)
        rules = tuple(rule.identity for rule in limiter.rules)
        entry = Entry(limiter_name, key, hold.cost, tier, rules, receipts, 0.0, None, quota)
        return await self._remember(notes, hold, decision, entry)

    async def _remember(
        self, notes: AsyncNotes, hold: AsyncHold, decision: Decision, entry: Entry, caller: str = ""
    ) -> Taken:
        """Note a hold under a new id, as of a decision; release it if that cannot be done."""
        hold_id, expires_after = new_id(entry.limiter), _expires_after(decision, hold)
        kept_for = _kept_for(expires_after)
        is_watched = hold.is_observed and not self._watched.is_full
        try:
            entry = replace(entry, kept_for=kept_for, watched_in=self._run if is_watched else None)
            await keep(notes, start_of(hold_id), entry.text(), kept_for)
        except BaseException:
            await self._to_the_end(_release(hold))
            raise
        if is_watched:
            self._watched.add(hold_id, entry.limiter, hold, self._due(kept_for), caller)
        return Taken(decision, hold_id, expires_after)

    def _due(self, seconds: float) -> int:
        return self._clock.now_us() + to_microseconds(seconds)

    async def finish(self, hold_id: str, cost: Cost) -> Finished:
        """Make a hold final at its true cost; a cost of 0 releases it.

        Only the first call counts, whoever makes it; later ones return its outcome. Units held beyond the cost are given
        back as far as they still count and the limiter still has the rules that counted them. Units above what was held
        are recorded, even beyond the limit.

        Raises:
            UnknownHold: There is none, or none any more, or another worker took it while the store was down.
            StoreError: The store could not be asked; or it failed in between, and then the hold is final.
            CostTooHigh: So many units can never be counted.
            ConfigError: The cost is not a whole number, or not of a unit that the limiter counts.
        """
        here = self._here.get(hold_id)
        if here is not None:
            is_first = here.hold.final is None
            return Finished(here.limiter, here.hold.cost, await here.hold.settle(cost), is_first)
        notes, entry = await self._find(hold_id)
        return await self._to_the_end(self._finish(hold_id, notes, entry, cost))

    async def confirm(self, hold_id: str, cost: Cost | None = None) -> Decision:
        """Make a hold final as of now, as `AsyncHold.confirm`; a refusal leaves it open.

        Raises:
            UnknownHold: There is none, or none any more, or another worker took it while the store was down.
            UnknownLimiter: The policy has its limiter no more.
            StoreError: The store could not be asked; or it failed in between, and then the hold is final.
            CostTooHigh: The cost is above what a rule could ever admit at once.
            ConfigError: The cost does not fit, or the limiter has other rules now.
        """
        here = self._here.get(hold_id)
        if here is not None:
            return await here.hold.confirm(cost)
        notes, entry = await self._find(hold_id)
        limiter = self._unchanged(entry)
        final = entry.cost if cost is None else _Held(limiter, notes, entry).standing(cost)

        async def move(hold: AsyncHold) -> Decision:
            return await hold.confirm(cost)

        decision, _ = await self._to_the_end(self._move(hold_id, notes, entry, final, move))
        return decision

    async def renew(self, hold_id: str) -> Taken:
        """Extend the lease of a hold's places, as `AsyncHold.renew`. The hold goes on under a new id, unless it is refused.

        Raises:
            UnknownHold: There is none, or none any more, or another worker took it while the store was down.
            UnknownLimiter: The policy has its limiter no more.
            StoreError: The store could not be asked; or it failed in between, and then the hold has ended.
            ConfigError: It has no places, or the limiter has other rules now.
        """
        here = self._here.get(hold_id)
        if here is not None:
            decision = await here.hold.renew()
            return (
                Taken(decision, hold_id, _expires_after(decision, here.hold)) if decision else Taken(decision)
            )
        notes, entry = await self._find(hold_id)
        if not self._unchanged(entry).units.has_places:
            raise ConfigError(f"nothing to renew: no rule of limiter {entry.limiter!r} is concurrent")
        return await self._to_the_end(self._renew(hold_id, notes, entry))

    async def _renew(self, hold_id: str, notes: AsyncNotes, entry: Entry) -> Taken:
        async def move(hold: AsyncHold) -> Decision:
            return await hold.renew()

        decision, hold = await self._move(hold_id, notes, entry, entry.cost, move)
        if hold is None:
            return Taken(decision.as_refused() if decision.allowed else decision)
        return await self._remember(notes, hold, decision, replace(entry, receipts=hold.receipts))

    async def _move(
        self,
        hold_id: str,
        notes: AsyncNotes,
        entry: Entry,
        final: Cost,
        move: Callable[[AsyncHold], Coroutine[Any, Any, Decision]],
    ) -> tuple[Decision, AsyncHold | None]:
        """Move the units of a hold, once; return the decision and, if it was admitted, the hold."""
        limiter = self._unchanged(entry)
        claim, kept_for = new_claim(final), _kept_for(entry.kept_for)
        end, stands = await claim_end(notes, hold_id, claim, kept_for)
        if stands != claim:
            now = await limiter.check(entry.key, 0, tier=entry.tier)
            return now if _is_anything(cost_in(stands)) else now.as_refused(), None
        hold = _Held(limiter, notes, entry).hold(is_told=entry.watched_in == self._run)
        try:
            decision = await move(hold)
        except (ConfigError, CostTooHigh):
            hold.forget()
            await keep(notes, refused_of(end), "", kept_for)
            raise
        if decision.allowed:
            self._watched.disarm(hold_id)
            return decision, hold
        hold.forget()
        await keep(notes, refused_of(end), "", kept_for)
        return decision, None

    def _unchanged(self, entry: Entry) -> AsyncLimiter:
        """Return the limiter of a hold, if it still has the rules that the hold was taken by."""
        limiter = self._limiter(entry.limiter).current
        if tuple(rule.identity for rule in limiter.rules) == entry.rules:
            return limiter
        raise ConfigError(
            f"limiter {entry.limiter!r} has other rules now than when the hold was taken; it can be settled or released"
        )

    async def tidy(self) -> None:
        """Forget holds that are over, and tell the limiters' hooks of those that nobody settled.

        Call it now and then, more often than every `MARGIN` seconds.
        A hold that was taken here may be settled by another worker, whose hooks hear of that; ours do not. So over all
        workers together the units of open holds add up.
        """
        now = self._clock.now_us()
        for hold_id in self._here.due(now):
            self._here.drop(hold_id)
        looked_at = self._watched.due(now)
        if self._watched.is_half_full:  # room is made by finding those that others have settled
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

    async def _finish(self, hold_id: str, notes: AsyncNotes, entry: Entry, cost: Cost) -> Finished:
        limiter = self._live.get(entry.limiter)
        held = None if limiter is None else _Held(limiter.current, notes, entry)
        if held is not None:
            held.check_excess(cost)
            cost = held.standing(cost)
        claim = new_claim(cost)
        # Longer than the hold itself: were it forgotten first, the next call would be the first again. And long enough for
        # whoever took the hold to see, when that is forgotten, that somebody has settled it.
        _, stands = await claim_end(notes, hold_id, claim, _kept_for(entry.kept_for))
        self._watched.disarm(hold_id)
        if stands != claim:
            return Finished(entry.limiter, entry.cost, cost_in(stands), first=False)
        if held is not None:
            await held.settle(cost, is_told=entry.watched_in == self._run)
        return Finished(entry.limiter, entry.cost, cost, first=True)

    async def _find(self, hold_id: str) -> tuple[AsyncNotes, Entry]:
        """Return where a hold is noted, and what."""
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
                    return notes, Entry.read(text)
        raise failure or UnknownHold(
            f"there is no hold {hold_id!r:.40}, or none any more: its units may have expired"
        )

    def _places(self, hold_id: str) -> Iterator[tuple[AsyncNotes, bool]]:
        """Yield the stores where a hold may be noted, each once; first, and marked so, the one that its id speaks of.

        The others are for holds of a limiter that the policy no longer has, or has in another store.
        """
        seen: set[int] = set()
        limiters = [(hint_of(name) == hold_id[-4:], limiter.store) for name, limiter in self._live.items()]
        for is_likely, store in sorted(limiters, key=lambda place: not place[0]):
            if id(store) not in seen and store.notes is not None:
                seen.add(id(store))
                yield store.notes, is_likely

    async def _was_settled(self, hold_id: str) -> bool | None:
        """Return whether somebody has settled a hold; `None` if its store cannot be asked just now."""
        for notes, is_likely in self._places(hold_id):
            if is_likely:
                try:
                    return await has_ended(notes, hold_id)
                except StoreError:
                    return None
        return False

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something even if whoever asked for it goes away meanwhile."""
        task = asyncio.ensure_future(work)
        self._running.add(task)  # an event loop alone does not keep its tasks
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has seen it; if nobody did, there is nobody to tell


class _Open(NamedTuple):
    """A hold that is open as far as this process knows."""

    limiter: str
    hold: AsyncHold
    due: int
    caller: str


class _OpenHolds:
    """Holds by id, so many at most."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Open] = {}
        self._by_caller: Counter[str] = Counter()

    def of_caller(self, caller: str) -> int:
        """Return how many a caller has open."""
        return self._by_caller[caller]

    @property
    def is_full(self) -> bool:
        return len(self._by_id) >= MOST_OPEN

    @property
    def is_half_full(self) -> bool:
        return len(self._by_id) >= MOST_OPEN // 2

    def add(self, hold_id: str, limiter: str, hold: AsyncHold, due: int, caller: str = "") -> None:
        """Remember a hold until it is due; if there are too many, forget the oldest."""
        if self.is_full:
            self.drop(next(iter(self._by_id)))
        self._by_id[hold_id] = _Open(limiter, hold, due, caller)
        self._by_caller[caller] += 1

    def get(self, hold_id: str) -> _Open | None:
        return self._by_id.get(hold_id)

    def drop(self, hold_id: str) -> None:
        """Forget a hold. If it was not settled, it tells its hooks so."""
        self._pop(hold_id)

    def disarm(self, hold_id: str) -> None:
        """Forget a hold that was settled by its id; whoever did that has told the hooks."""
        found = self._pop(hold_id)
        if found is not None:
            found.hold.forget()

    def _pop(self, hold_id: str) -> _Open | None:
        found = self._by_id.pop(hold_id, None)
        if found is not None:
            self._by_caller[found.caller] -= 1
            if not self._by_caller[found.caller]:
                del self._by_caller[found.caller]
        return found

    def due(self, now: int) -> list[str]:
        """Return the ids of those that nobody can settle any more."""
        return [hold_id for hold_id, hold in self._by_id.items() if hold.due <= now]

    def is_due(self, hold_id: str, now: int) -> bool:
        return hold_id in self._by_id and self._by_id[hold_id].due <= now

    def next_few(self, most: int) -> list[str]:
        """Return the ids of those that were not looked at for longest."""
        few = list(islice(self._by_id, most))
        for hold_id in few:
            self._by_id[hold_id] = self._by_id.pop(hold_id)
        return few


class _Held:
    """A hold, made anew of what is noted of it, by the rules that its limiter has now.

    A rule that was not there when it was taken has nothing to give back, and neither has a store that did not charge it.
    """

    def __init__(self, limiter: AsyncLimiter, notes: AsyncNotes, entry: Entry) -> None:
        self._limiter = limiter
        self._entry = entry
        receipts = entry.receipts if entry.receipts is not None and limiter.store.notes is notes else ()
        charged = dict(zip(entry.rules, (r for r in receipts if _shadow_rule(r) is None), strict=False))
        self._gate, shadows = _shadowed(limiter, receipts)
        by_identity = {rule.identity: rule for rule in limiter.rules}
        rules = limiter.rules
        if entry.rules != tuple(by_identity):
            rules = tuple(by_identity[identity] for identity in entry.rules if identity in by_identity)
            charged = {identity: charged[identity] for identity in charged if identity in by_identity}
            self._gate = _Remainder(self._gate, limiter, rules, tuple(charged.values()), shadows)
        self._receipts: Receipts | None = (*charged.values(), *shadows) or None
        self._rules = rules
        self._units = Units(limiter.name, rules)
        self._cost = self._known(entry.cost)

    def standing(self, cost: Cost) -> Cost:
        """Return the cost that stands if the hold is settled at this one.

        Raises:
            ConfigError: It is not a whole number, or not of a unit that the limiter counts.
        """
        final = self._units.settled(cost, self._units.costs(self._cost))
        return cost if isinstance(cost, int) else self._units.named(final)

    def check_excess(self, cost: Cost) -> None:
        """Refuse, before it stands, a cost that could not even be recorded where nothing is counted yet.

        Raises:
            CostTooHigh: So many units can never be counted.
            ConfigError: It is not a whole number, or not of a unit that the limiter counts.
        """
        held = self._units.costs(self._cost)
        _, more = self._units.difference(held, self._units.settled(cost, held))
        each = more if isinstance(more, tuple) else (more,) * len(self._rules)
        for algorithm, units in zip(plain_tiers(self._rules).of(self._entry.tier), each, strict=True):
            if units:
                algorithm.record(None, 0, units, 0)

    def hold(self, *, is_told: bool) -> AsyncHold:
        """Return the hold; its limiter's hooks hear of its end if they are told."""
        limiter, entry = self._limiter, self._entry
        new_hold: Callable[..., AsyncHold] = limiter.new_hold if is_told else AsyncHold
        quotas = quotas_of(limiter.rules, entry.quota) if self._rules == limiter.rules else None
        return new_hold(
            self._gate,
            UNLIMITED,
            self._receipts,
            entry.key,
            self._cost,
            entry.tier,
            units=self._units,
            quotas=quotas,
        )

    async def settle(self, cost: Cost, *, is_told: bool) -> None:
        """Give back or record as the hold itself would have done, now that nobody else can."""
        try:
            await self.hold(is_told=is_told).settle(cost)
        except (ConfigError, CostTooHigh) as error:  # it stands already, so nobody may send another
            logger.warning(
                "units above a hold of %s could not be recorded, in limiter %r: %s",
                self._entry.cost,
                self._limiter.name,
                error,
            )

    def _known(self, cost: Cost) -> Cost:
        """Return a cost without units that no rule counts any more."""
        if isinstance(cost, int):
            return cost
        return {rule.unit: cost.get(rule.unit, 0) for rule in self._rules} or 0


class _Remainder:
    """The gate for a hold of which some rules are no longer there."""

    def __init__(
        self,
        gate: AsyncGate,
        limiter: AsyncLimiter,
        rules: tuple[Rule, ...],
        kept: Receipts,
        shadows: Receipts,
    ) -> None:
        self._gate = gate
        self._bound = limiter.store.bind_async(limiter.name, rules)
        self._kept = kept
        self._shadows = shadows
        self._places = [rules.index(rule) if rule in rules else None for rule in limiter.rules]

    async def ask(self, request: Request) -> Answer:
        costs = self._of_all(request.cost)
        return await self._gate.ask(Request(request.operation, request.key, costs, request.tier, request.now))

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        if self._kept:
            try:
                await self._bound.refund(self._kept, cost, now)
            except StoreError as error:
                logger.warning("a hold could not be given back, so it counts until it expires: %s", error)
        if self._shadows:
            await self._gate.refund(self._shadows, self._of_all(cost), now)

    async def reset(self, key: Key | None) -> None:
        await self._gate.reset(key)

    def _of_all(self, cost: Costs) -> Costs:
        """Return costs of the rules that are left as costs of all rules that there are now."""
        if isinstance(cost, int):
            return cost
        return tuple(0 if place is None else cost[place] for place in self._places)


def _shadowed(limiter: AsyncLimiter, receipts: Receipts) -> tuple[AsyncGate, Receipts]:
    """Return what a hold is settled on, and the receipts of the shadow rules that the limiter still has."""
    known = (
        {shadow.rule.identity for shadow in limiter.shadows} if isinstance(limiter, AsyncVersion) else set()
    )
    shadows = tuple(receipt for receipt in receipts if _shadow_rule(receipt) in known)
    return limiter.settling(shadows), shadows


def _shadow_rule(receipt: tuple[object, object]) -> str | None:
    """Return the identity of the shadow rule that a receipt is of, or `None`."""
    match receipt:
        case ((marked, str(identity), _), _) if marked == SHADOW:
            return identity
    return None


async def _release(hold: AsyncHold) -> None:
    # What cannot be given back counts until it expires; the caller hears why soon enough.
    with suppress(StoreError):
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
    """Return after how many seconds nothing of a hold counts any more."""
    if hold.receipts is None:
        return 0.0
    return max((result.reset_after or 0.0 for result in decision.results), default=0.0)


def _kept_for(seconds: float) -> float:
    """Return for how long something is noted that is over after so many seconds."""
    return min(seconds + MARGIN, LONGEST_NOTE)


def _is_anything(cost: Cost) -> bool:
    return cost > 0 if isinstance(cost, int) else any(cost.values())
