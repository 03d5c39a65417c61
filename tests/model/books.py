"""A second opinion on what the rules should answer, by brute force.

This shares no code with `headgate` and does not count as it does. A book is the log of what was charged to one rule and
key; how much of it counts at an instant is worked out from the log with exact fractions, and every waiting time is found
by searching for the first instant at which the question would be answered otherwise. It is slow, and meant to be read.

What both sides go by:

- An instant before that of the newest charge in the book is read as that instant: time going back grants nothing.
- What is over when something is charged is over for good.
- A charge that was given back in full is out of the book, and so is what its instant did to the reading of time. Of a token
  bucket only the newest entry can be taken out: what came later has drained together with it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import cache
from math import ceil, floor
from typing import Protocol
from zoneinfo import ZoneInfo

HOUR = 3_600_000_000


@dataclass(frozen=True)
class Quota:
    """So many units in so many microseconds; `burst` is for token buckets only."""

    limit: int
    period: int
    burst: int | None = None

    @property
    def capacity(self) -> int:
        return self.limit if self.burst is None else self.burst

    @property
    def shape(self) -> tuple[int, int]:
        """What a level depends on: two quotas that differ only in how the burst is written are the same."""
        return self.limit, self.capacity


@dataclass(eq=False)
class Charge:
    """Units that were charged at an instant, as it was read; `units` shrinks when some are given back."""

    at: int
    units: Fraction
    quota: Quota
    level_before: Fraction = Fraction(0)
    held: Fraction = field(init=False)

    def __post_init__(self) -> None:
        self.held = self.units


class Book(Protocol):
    """The log of one rule and key."""

    def used(self, quota: Quota) -> Callable[[int], Fraction]:
        """Return a function from an instant to what counts then, for somebody with this quota."""

    def charge(self, now: int, units: int, quota: Quota) -> Charge | None:
        """Write down a charge; what is returned can be given back."""

    def give_back(self, charge: Charge, units: int, now: int) -> None:
        """Give back some of the units of a charge, as far as they still count."""

    def instant(self, now: int) -> int:
        """Return the instant that a time is read as."""

    def can_move(self, charge: Charge, quota: Quota) -> bool:
        """Return whether a charge can be given back and taken anew by somebody with this quota."""


def used_without(book: Book, charge: Charge | None, quota: Quota) -> Callable[[int], Fraction]:
    """Return a function from an instant to what would count if a charge were given back at that very instant."""

    def used(now: int) -> Fraction:
        other, own = deepcopy((book, charge))
        at = other.instant(now)
        if own is not None and other.can_move(own, quota):
            other.give_back(own, ceil(own.held), at)
        return other.used(quota)(at)

    return used


class WindowBook:
    """The log of a rule whose charges count whole until an instant of their own.

    Args:
        ends: The instant from which a charge made at a given instant no longer counts.
    """

    def __init__(self, ends: Callable[[int], int]) -> None:
        self.ends = ends
        self.charges: list[Charge] = []

    def read(self, now: int) -> int:
        return max([now, *(charge.at for charge in self.charges)])

    def instant(self, now: int) -> int:
        return self.read(now)

    def can_move(self, charge: Charge, quota: Quota) -> bool:
        return True

    def used(self, quota: Quota) -> Callable[[int], Fraction]:
        return lambda now: sum(
            (charge.units for charge in self.charges if self.ends(charge.at) > self.read(now)), Fraction(0)
        )

    def charge(self, now: int, units: int, quota: Quota) -> Charge | None:
        at = self.read(now)
        charge = Charge(at, Fraction(units), quota)
        self.charges = [old for old in self.charges if self.ends(old.at) > at] + [charge]
        return charge

    def give_back(self, charge: Charge, units: int, now: int) -> None:
        charge.units -= min(units, charge.units)
        self.charges = [charge for charge in self.charges if charge.units]


class LeaseBook:
    """The log of a rule whose charges count until their lease ends or they are given back.

    An instant is read as the latest at which a lease began or was renewed since the book was last empty, if it is before
    that. Renewing a lease moves its end, and never to an earlier instant.
    """

    def __init__(self) -> None:
        self.leases: list[tuple[int, Charge]] = []
        self.latest = 0

    def instant(self, now: int) -> int:
        return max(now, self.latest) if self.leases else now

    def can_move(self, charge: Charge, quota: Quota) -> bool:
        return True

    def used(self, quota: Quota) -> Callable[[int], Fraction]:
        return lambda now: sum(
            (charge.units for end, charge in self.leases if end > self.instant(now)), Fraction(0)
        )

    def charge(self, now: int, units: int, quota: Quota) -> Charge | None:
        at = self.instant(now)
        charge = Charge(at, Fraction(units), quota)
        self.leases = [(end, old) for end, old in self.leases if end > at] + [(at + quota.period, charge)]
        self.latest = at
        return charge

    def is_live(self, charge: Charge, now: int) -> bool:
        return any(end > self.instant(now) for end, old in self.leases if old is charge)

    def renew(self, charge: Charge, now: int, quota: Quota) -> None:
        at = self.instant(now)
        self.leases = [
            (max(end, at + quota.period) if old is charge else end, old)
            for end, old in self.leases
            if end > at
        ]
        self.latest = at

    def give_back(self, charge: Charge, units: int, now: int) -> None:
        charge.units -= min(units, charge.units)
        self.leases = [(end, charge) for end, charge in self.leases if charge.units]


def calendar_end(span: str, timezone: str) -> Callable[[int], int]:
    """Return a function from an instant to the end of its day, week, month or year, found by looking at local dates."""
    zone, epoch = ZoneInfo(timezone), datetime(1970, 1, 1, tzinfo=UTC)

    def window(now: int) -> object:
        day = (epoch + timedelta(microseconds=now)).astimezone(zone).date()
        year, week, _ = day.isocalendar()
        return {"day": day, "week": (year, week), "month": (day.year, day.month), "year": day.year}[span]

    @cache  # a book asks for the end of each of its charges again and again
    def end(now: int) -> int:
        return now + first_offset(lambda t: window(now + t) > window(now))  # type: ignore[operator]

    return end


@dataclass(frozen=True)
class GiveBack:
    """Units that were given back to a token bucket."""

    at: int
    units: Fraction
    quota: Quota


class TokenBook:
    """The log of a token bucket, since it was last empty: charges, and what was given back.

    The level is what is missing from the bucket, in units. It drains by limit/period per tick; instants are whole ticks of
    1 us, or of 1 ms if the period is over an hour. What is given back is written down at the instant of the entry before
    it: to give back is not to count, so it does nothing to the reading of time.
    """

    def __init__(self, period: int) -> None:
        self.tick = 1 if period <= HOUR else 1000
        self.events: list[Charge | GiveBack] = []

    def used(self, quota: Quota) -> Callable[[int], Fraction]:
        if not self.events:
            return lambda now: Fraction(0)
        level, last = self.level_after_last_event(), self.events[-1]
        return lambda now: self.drained(level, last.quota, quota, self.read(now) - last.at)

    def read(self, now: int) -> int:
        return max([now // self.tick, *(event.at for event in self.events)])

    def instant(self, now: int) -> int:
        return max(now, self.read(now) * self.tick)

    def can_move(self, charge: Charge, quota: Quota) -> bool:
        return charge.quota.shape == quota.shape

    def level_after_last_event(self) -> Fraction:
        level, last = Fraction(0), None
        for event in self.events:
            if last is not None:
                level = self.drained(level, last.quota, event.quota, event.at - last.at)
            level += event.units if isinstance(event, Charge) else -event.units
            last = event
        return level

    def drained(self, level: Fraction, written_as: Quota, seen_as: Quota, ticks: int) -> Fraction:
        """Return the level so many ticks later, for somebody whose quota may differ from that of the last event."""
        in_its_own_shape = level - self.rate(written_as) * ticks
        if in_its_own_shape <= 0:
            return Fraction(0)
        if seen_as.shape != written_as.shape:
            # Also beyond its capacity: what is owed is owed in every tier.
            level = self.rounded_up(level, seen_as)
        return max(Fraction(0), level - self.rate(seen_as) * ticks)

    def rate(self, quota: Quota) -> Fraction:
        return Fraction(quota.limit, quota.period // self.tick)

    def rounded_up(self, level: Fraction, quota: Quota) -> Fraction:
        """Return the level in the small parts that this quota is counted in: units drain a whole number of them per tick."""
        parts = self.rate(quota).denominator
        return Fraction(ceil(level * parts), parts)

    def charge(self, now: int, units: int, quota: Quota) -> Charge | None:
        if not quota.limit:
            return None  # no bucket: nothing is admitted, and nothing can be counted
        at, level = self.read(now), self.used(quota)(now)
        charge = Charge(at, Fraction(units), quota, level_before=level)
        self.events = [*self.events, charge] if level else [charge]
        return charge

    def give_back(self, charge: Charge, units: int, now: int) -> None:
        if charge not in self.events:
            return
        if any(event.quota.shape != charge.quota.shape for event in self.since(charge)):
            return  # once converted, the level no longer says what of it was whose
        level = self.used(charge.quota)(now)
        given = min(Fraction(units), charge.held)
        back = min(level, max(Fraction(0), given - self.drained_of(charge, given, self.read(now))))
        if level == back:
            self.events = []
        elif given == charge.held and self.is_newest(charge):
            self.events = self.events[:-1]
        elif back:
            self.events = [*self.events, GiveBack(self.events[-1].at, back, charge.quota)]

    def drained_of(self, charge: Charge, given: Fraction, at: int) -> Fraction:
        """Return how much of the units that are to be given back may have drained away by an instant.

        What was there before the charge drains first, as far as it was not given back itself; then what stays of the charge.
        """
        drained = self.rate(charge.quota) * (at - charge.at)
        given_since = sum(event.units for event in self.since(charge) if isinstance(event, GiveBack))
        first = max(Fraction(0), charge.level_before - given_since) + charge.held - given
        return max(Fraction(0), drained - first)

    def is_newest(self, charge: Charge) -> bool:
        """Return whether the book without the charge is that of before it: nothing came since, and nothing was converted."""
        *before, newest = self.events
        return newest is charge and bool(before) and before[-1].quota.shape == charge.quota.shape

    def since(self, charge: Charge) -> list[Charge | GiveBack]:
        return self.events[self.events.index(charge) + 1 :]


@dataclass(frozen=True)
class Figures:
    """What one rule says; times in microseconds."""

    allowed: bool
    limit: int
    remaining: int
    retry_after: int | None
    reset_after: int | None


def figures(
    book: Book,
    quota: Quota,
    now: int,
    cost: int,
    *,
    allowed: bool,
    is_bucket: bool,
    replaces: Charge | None = None,
) -> Figures:
    """Return what is to be said of a book as it stands, to somebody who wants units in place of a charge, or besides."""
    if is_bucket and not quota.limit:
        return Figures(allowed, 0, 0, None, None)
    used, capacity = book.used(quota), quota.capacity
    remaining = floor(max(Fraction(0), capacity - used(now)))
    retry_after = None
    if not allowed and capacity:
        used_then = used if replaces is None else used_without(book, replaces, quota)
        retry_after = first_offset(lambda t: used_then(now + t) + cost <= capacity)
    return Figures(allowed, capacity, remaining, retry_after, first_offset(lambda t: used(now + t) == 0))


def first_offset(holds: Callable[[int], bool]) -> int:
    """Return the first whole number from which on something holds that, once it does, holds for ever."""
    if holds(0):
        return 0
    no, yes = 0, 1
    while not holds(yes):
        no, yes = yes, yes * 2
    while yes - no > 1:
        middle = (no + yes) // 2
        no, yes = (no, middle) if holds(middle) else (middle, yes)
    return yes
