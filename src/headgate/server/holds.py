"""Holds that outlive the request they were taken in: what the server remembers of them, and where.

A hold is remembered in the store that counts its units: under its id a note says whose they are and how to give them back.
To settle it is to note the outcome first: of all who try, in whichever worker or after a restart, one is told that its own
outcome stands, and only that one gives back or records. The others return what stands.

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
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from headgate import AsyncHold, AsyncLimiter, Decision, HeadgateError
from headgate.clock import Clock, SteadyClock, to_microseconds
from headgate.costs import Costs, total
from headgate.decision import UNLIMITED
from headgate.errors import ConfigError, CostTooHigh, StoreError
from headgate.keys import Key
from headgate.policy import SHADOW, AsyncVersion
from headgate.server.noted import (
    Entry,
    HoldsUnsupported,
    cost_in,
    end_of,
    hint_of,
    is_id,
    keep,
    look_up,
    new_claim,
    new_id,
    start_of,
)
from headgate.stores.base import (
    LONGEST_NOTE,
    Answer,
    AsyncGate,
    AsyncNotes,
    Receipts,
    check_whole,
    plain_cost,
    plain_tiers,
)
from headgate.stores.request import Request

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
    held: int
    cost: int
    first: bool


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
        cost: int = 1,
        tier: str | None = None,
        *,
        caller: str = "",
    ) -> tuple[Decision, str | None, float | None]:
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
        hold = await limiter.hold(key, cost, tier=tier)
        if not hold or cost == 0:
            return hold.decision, None, None
        hold_id, expires_after = new_id(limiter_name), _expires_after(hold)
        kept_for = min(expires_after + MARGIN, LONGEST_NOTE)
        due = self._clock.now_us() + to_microseconds(kept_for)
        if hold.decision.degraded:
            self._here.add(hold_id, limiter_name, hold, due)
            return hold.decision, hold_id, expires_after
        is_watched = hold.is_observed and not self._watched.is_full
        watched_in = self._run if is_watched else None
        try:
            entry = Entry(limiter_name, hold.key, cost, hold.tier, rules, hold.receipts, kept_for, watched_in)
            await keep(notes, start_of(hold_id), entry.text(), kept_for)
        except BaseException:
            await self._to_the_end(_release(hold))
            raise
        if is_watched:
            self._watched.add(hold_id, limiter_name, hold, due, caller)
        return hold.decision, hold_id, expires_after

    async def finish(self, hold_id: str, cost: int) -> Finished:
        """Make a hold final at its true cost; a cost of 0 releases it.

        Only the first call counts, whoever makes it; later ones return its outcome. Units held beyond the cost are given
        back as far as they still count and the limiter still has the rules that counted them. Units above what was held
        are recorded, even beyond the limit.

        Raises:
            UnknownHold: There is none, or none any more, or another worker took it while the store was down.
            StoreError: The store could not be asked; or it failed in between, and then the hold is final.
            CostTooHigh: So many units can never be counted.
            ConfigError: The cost is not a whole number.
        """
        check_whole(cost)
        here = self._here.get(hold_id)
        if here is not None:
            is_first = here.hold.final is None
            return Finished(here.limiter, total(here.hold.cost), await here.hold.settle(cost), is_first)
        notes, entry = await self._find(hold_id)
        return await self._to_the_end(self._finish(hold_id, notes, entry, cost))

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

    async def _finish(self, hold_id: str, notes: AsyncNotes, entry: Entry, cost: int) -> Finished:
        limiter = self._live.get(entry.limiter)
        if limiter is not None:
            _check_excess(limiter, entry, cost)
        claim = new_claim(cost)
        # Longer than the hold itself: were it forgotten first, the next call would be the first again. And long enough for
        # whoever took the hold to see, when that is forgotten, that somebody has settled it.
        kept_for = min(entry.kept_for + MARGIN, LONGEST_NOTE)
        stands = await keep(notes, end_of(hold_id), claim, kept_for)
        self._watched.disarm(hold_id)
        if stands != claim:
            return Finished(entry.limiter, entry.cost, cost_in(stands), first=False)
        if limiter is not None:
            await _settle(limiter.current, notes, entry, cost, is_told=entry.watched_in == self._run)
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
                    return await look_up(notes, end_of(hold_id)) is not None
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


def _check_excess(limiter: AsyncLimiter, entry: Entry, cost: int) -> None:
    """Refuse, before it stands, a cost that could not even be recorded where nothing is counted yet.

    Raises:
        CostTooHigh: So many units can never be counted.
    """
    if cost > entry.cost:
        for algorithm in plain_tiers(limiter.rules).of(entry.tier):
            algorithm.record(None, 0, cost - entry.cost, 0)


async def _settle(
    limiter: AsyncLimiter, notes: AsyncNotes, entry: Entry, cost: int, *, is_told: bool
) -> None:
    """Give back or record as the hold itself would have done, now that nobody else can."""
    gate, receipts = _belonging(limiter, notes, entry)
    new_hold: Callable[..., AsyncHold] = limiter.new_hold if is_told else AsyncHold
    hold = new_hold(gate, UNLIMITED, receipts, entry.key, entry.cost, entry.tier, units=limiter.units)
    try:
        await hold.settle(cost)
    except (ConfigError, CostTooHigh) as error:  # it stands already, so nobody may send another
        logger.warning(
            "%d units above a hold could not be recorded, in limiter %r: %s",
            cost - entry.cost,
            limiter.name,
            error,
        )


def _belonging(limiter: AsyncLimiter, notes: object, entry: Entry) -> tuple[AsyncGate, Receipts | None]:
    """Return what a hold is settled on, and those of its receipts that still belong there.

    A store that did not charge it has nothing to give back, and neither has a rule that was not there.
    """
    receipts = entry.receipts if entry.receipts is not None and limiter.store.notes is notes else ()
    charged = dict(zip(entry.rules, (r for r in receipts if _shadow_rule(r) is None), strict=False))
    gate, shadows = _shadowed(limiter, receipts)
    rules = {rule.identity: rule for rule in limiter.rules}
    if entry.rules == tuple(rules):
        return gate, (*charged.values(), *shadows) or None
    kept = {identity: receipt for identity, receipt in charged.items() if identity in rules}
    bound = limiter.store.bind_async(limiter.name, tuple(rules[identity] for identity in kept))
    return _Remainder(gate, bound, tuple(kept.values()), shadows), (*kept.values(), *shadows) or None


class _Remainder:
    """The gate for a hold of which some rules are no longer there."""

    def __init__(self, gate: AsyncGate, bound: AsyncGate, kept: Receipts, shadows: Receipts) -> None:
        self._gate = gate
        self._bound = bound
        self._kept = kept
        self._shadows = shadows

    async def ask(self, request: Request) -> Answer:
        return await self._gate.ask(request)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        cost = plain_cost(cost)
        if self._kept:
            try:
                await self._bound.refund(self._kept, cost, now)
            except StoreError as error:
                logger.warning("a hold could not be given back, so it counts until it expires: %s", error)
        if self._shadows:
            await self._gate.refund(self._shadows, cost, now)

    async def reset(self, key: Key | None) -> None:
        await self._gate.reset(key)


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
    with suppress(
        StoreError
    ):  # what cannot be given back counts until it expires; the caller hears why soon enough
        await hold.release()


def _notes_of(limiter: AsyncLimiter) -> AsyncNotes:
    notes = limiter.store.notes
    if notes is not None:
        return notes
    raise HoldsUnsupported(
        f"limiter {limiter.name!r} counts in a {type(limiter.store).__name__}, which cannot remember holds; "
        f"stores in memory, SQLite, Redis and PostgreSQL can"
    )


def _expires_after(hold: AsyncHold) -> float:
    """Return after how many seconds nothing of a hold counts any more."""
    if hold.receipts is None:
        return 0.0
    return max((result.reset_after or 0.0 for result in hold.decision.results), default=0.0)
