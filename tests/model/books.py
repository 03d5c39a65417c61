"""A brute-force model of the rules.

The model shares no code with `headgate` and counts in a different way. A book is the log of all charges to one rule and
key. The units that count at an instant are computed from the log with exact fractions. Waiting times are found by
searching for the first instant with a different answer. The model is slow; it is written to be easy to read.

Assumptions of both sides:

- An instant before the newest charge in the book is read as that instant: a clock set back admits nothing more.
- Charges that have expired when something is charged stay expired.
- A charge that was returned in full is removed from the book, with its effect on the reading of time. In a token bucket
  only the newest entry can be removed: later charges drained together with it.
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
    """Units per period in microseconds; `burst` is for token buckets only."""

    limit: int
    period: int
    burst: int | None = None

    @property
    def capacity(self) -> int:
        return self.limit if self.burst is None else self.burst

    @property
    def shape(self) -> tuple[int, int]:
        """The values that affect a level: quotas that differ only in the notation of the burst are equal."""
        return self.limit, self.capacity


@dataclass(eq=False)
class Charge:
    """Units charged at an instant, after correction; returned units are subtracted from `units`."""

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
        """Return a function from an instant to the units that count then, for a caller with this quota."""

    def charge(self, now: int, units: int, quota: Quota) -> Charge | None:
        """Log a charge; the result can be passed to `give_back`."""

    def give_back(self, charge: Charge, units: int, now: int) -> None:
        """Return some of the units of a charge, as far as they still count."""

    def instant(self, now: int) -> int:
        """Return the instant that is used for a time."""

    def can_move(self, charge: Charge, quota: Quota) -> bool:
        """Return whether a charge can be replaced by a new charge with this quota."""


def used_without(book: Book, charge: Charge | None, quota: Quota) -> Callable[[int], Fraction]:
    """Return a function from an instant to the units that would count if a charge were returned at that instant."""

    def used(now: int) -> Fraction:
        other, own = deepcopy((book, charge))
        at = other.instant(now)
        if own is not None and other.can_move(own, quota):
            other.give_back(own, ceil(own.held), at)
        return other.used(quota)(at)

    return used


class WindowBook:
    """The log of a rule whose charges count in full until their end.

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
    """The log of a rule whose charges count until their lease ends or they are returned.

    The latest instant at which a lease began or was renewed, since the book was last empty, replaces any earlier instant.
    A renewal moves the end of a lease, never to an earlier instant.
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

    @cache  # a book computes the end of each charge often
    def end(now: int) -> int:
        return now + first_offset(lambda t: window(now + t) > window(now))  # type: ignore[operator]

    return end


@dataclass(frozen=True)
class GiveBack:
    """Units that were returned to a token bucket."""

    at: int
    units: Fraction
    quota: Quota


class TokenBook:
    """The log of charges and returned units of a token bucket, since it was last empty.

    The level is the number of units missing from the bucket. It drains by limit/period per tick; instants are whole ticks
    of 1 us, or of 1 ms if the period is over an hour. Returned units are logged at the instant of the previous entry,
    because returning units does not affect the reading of time.
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
        """Return the level after some ticks, for a caller whose quota may differ from the last event."""
        level_as_written = level - self.rate(written_as) * ticks
        if level_as_written <= 0:
            return Fraction(0)
        if seen_as.shape != written_as.shape:
            # It may exceed the capacity of this quota: all tiers share one debt.
            level = self.rounded_up(level, seen_as)
        return max(Fraction(0), level - self.rate(seen_as) * ticks)

    def rate(self, quota: Quota) -> Fraction:
        return Fraction(quota.limit, quota.period // self.tick)

    def rounded_up(self, level: Fraction, quota: Quota) -> Fraction:
        """Return the level in parts of a unit: a whole number of parts drains per tick with this quota."""
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
            return  # after a conversion of the level, the separate charges are unknown
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
        """Return how many of the units to be returned may have drained before an instant.

        Earlier units drain first, unless they were returned, then the kept part of the charge.
        """
        drained = self.rate(charge.quota) * (at - charge.at)
        given_since = sum(event.units for event in self.since(charge) if isinstance(event, GiveBack))
        first = max(Fraction(0), charge.level_before - given_since) + charge.held - given
        return max(Fraction(0), drained - first)

    def is_newest(self, charge: Charge) -> bool:
        """Return whether the charge is the last entry of the book, and it did not convert the level."""
        *before, newest = self.events
        return newest is charge and bool(before) and before[-1].quota.shape == charge.quota.shape

    def since(self, charge: Charge) -> list[Charge | GiveBack]:
        return self.events[self.events.index(charge) + 1 :]


@dataclass(frozen=True)
class Figures:
    """The verdict of one rule; times in microseconds."""

    allowed: bool
    limit: int
    remaining: int
    retry_after: int | None
    reset_after: int | None


MOST = 2**53 - 1
"""The remaining units of an inactive penalty without counted refusals."""


class PenaltyBook:
    """The log of refusals by other rules of a scope, which determines the penalties.

    Refusals are counted for `duration`, from the first refusal on. When they reach the limit, a penalty begins. It is longer
    than the previous penalty, unless that is forgotten.
    """

    def __init__(self, duration: int, growth: int, longest: int) -> None:
        self.duration = duration
        self.growth = growth
        self.longest = longest
        self.refusals: list[tuple[int, int]] = []

    def refuse(self, now: int, limit: int) -> None:
        """Log a refusal, with the number of refusals that begins a penalty."""
        self.refusals = [*self.refusals, (now, limit)]

    def penalties(self) -> tuple[int, int, int, int]:
        """Return the start of counting, the refusals since then, and the end and length of the last penalty."""
        began, counted, ended, length = -self.duration, 0, 0, 0
        for at, limit in self.refusals:
            if at - began >= self.duration:
                began, counted = at, 0
            if self.is_forgotten(ended, at):
                length = 0
            counted += 1
            if counted >= limit:
                began = max(at, began)
                length = min(self.longest, length * self.growth) or self.duration
                ended, counted = began + length, 0
        return began, counted, ended, length

    def is_forgotten(self, ended: int, now: int) -> bool:
        """Return whether a penalty no longer makes the next one longer."""
        return now >= ended + (self.longest if self.growth > 1 else 0)

    def is_fresh(self, now: int) -> bool:
        """Return whether earlier refusals and penalties have no effect at an instant."""
        began, counted, ended, _ = self.penalties()
        return self.is_forgotten(ended, now) and (not counted or now - began >= self.duration)

    def figures(self, limit: int, now: int, cost: int, *, admitted: bool) -> Figures:
        """Return the verdict on a cost of 0 or 1, after a call that was `admitted` by all rules or not."""
        began, counted, ended, _ = self.penalties()
        reset_after = first_offset(lambda t: self.is_fresh(now + t))
        if ended > now:
            return Figures(not cost, limit, 0, ended - now if cost else None, reset_after)
        counted = counted if now - began < self.duration else 0
        return Figures(True, limit, MOST - counted - (cost if admitted else 0), None, reset_after)


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
    """Return the verdict of a book on a cost; a charge that the call `replaces` does not count for the wait."""
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
    """Return the smallest whole number for which a monotonic condition is true."""
    if holds(0):
        return 0
    no, yes = 0, 1
    while not holds(yes):
        no, yes = yes, yes * 2
    while yes - no > 1:
        middle = (no + yes) // 2
        no, yes = (no, middle) if holds(middle) else (middle, yes)
    return yes
