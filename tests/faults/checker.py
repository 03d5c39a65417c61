"""Check from a history alone that the limiter kept its promises, and report the calls that show a violation.

The moment of a decision is only known to lie between the start and the end of its call, and some calls have an unknown
outcome. The checker therefore computes two bounds of each count at the moment of a decision:

- **certain**: units counted in every possible order of events;
- **possible**: units counted in at least one possible order of events.

The true count lies between them. A decision is reported only if no count between the bounds explains it, so correct
behaviour is never reported. The bounds are tight where few calls overlap; therefore each worker also has private keys.

Every rule except the token bucket counts a unit from a moment t until an expiry that depends on t only, unless the unit is
returned earlier. These rules differ only in the expiry. The renewal of a live lease sets t to the moment of the renewal. A
token bucket is bounded by its outflow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from tests.faults.history import NEVER, SHARED, History, HistoryCall, RuleSpec, VerdictSeen

RETRIES_CHECKED = 8
"""The waiting time of one in this many refusals is checked, because the check is slow."""

CHARGING = ("hit", "hold", "confirm")

DEADLINES = {"settle": 2, "wait": 4}
"""The number of deadlines that an operation may take, if not one: a settlement above the held units makes two requests, and
`wait` makes several requests and sleeps between them."""

GRACE_US = 1_000_000
"""The longest grace period for replies after a process was stopped. The grace period lasts as long as the stop."""


class Violation(NamedTuple):
    """A promise that was broken.

    Attributes:
        kind: Kind of the violation.
        limiter: Name of the limiter.
        key: The key of the count; `*` if the rule counts all keys together.
        rule: Number of the rule.
        call: The call that shows the violation.
        detail: The figures that prove it.
    """

    kind: str
    limiter: str
    key: str
    rule: int
    call: HistoryCall
    detail: str

    def __str__(self) -> str:
        call = self.call
        return (
            f"{self.kind}: {self.limiter}/{self.key}, rule {self.rule}, {call.operation} {call.number} of worker "
            f"{call.worker}: {self.detail}"
        )


class Renewal(NamedTuple):
    """A call that renewed a lease, or may have done so.

    Attributes:
        call: The call.
        low: The earliest moment of the renewal.
        high: The latest moment; `NEVER` if it may still be carried out.
    """

    call: HistoryCall
    low: int
    high: int


@dataclass(slots=True, eq=False)
class Charge:
    """Units that were counted, or may have been counted.

    Attributes:
        low: The earliest moment of the charge.
        high: The latest moment.
        units: Number of units.
        certain: Whether the charge certainly happened.
        admits: Whether an admission charged the units, and not a record or a settlement above the held units.
        limit: The limit that the rule applied.
        gone_low: The earliest moment at which the units may have been returned, reset or lost.
        gone_high: The latest such moment; `NEVER` if the units may remain counted.
        renewals: Renewals of a lease, in their order.
    """

    low: int
    high: int
    units: int
    certain: bool
    admits: bool = True
    limit: int = 0
    gone_low: int = NEVER
    gone_high: int = NEVER
    renewals: list[Renewal] = field(default_factory=list)

    def last_low(self, before: int = NEVER) -> int:
        """Return the earliest start of the current period, given certain renewals that ended before `before`."""
        renewed = [r.low for r in self.renewals if r.call.outcome == "admitted" and r.high < before]
        return max(self.low, *renewed) if renewed else self.low

    def last_high(self, until: int = NEVER) -> int:
        """Return the latest start of the current period, given possible renewals that began until `until`."""
        renewed = [r.high for r in self.renewals if r.call.outcome != "refused" and r.low <= until]
        return max(self.high, *renewed) if renewed else self.high


class Reset(NamedTuple):
    """A call that deleted a count, or may have done so.

    Attributes:
        low: The earliest moment of the reset.
        high: The latest moment.
        certain: Whether the reset certainly happened.
    """

    low: int
    high: int
    certain: bool

    def apply(self, charge: Charge) -> None:
        """End a charge that was counted before the reset."""
        if charge.low <= self.high:
            charge.gone_low = min(charge.gone_low, max(self.low, charge.low))
        if self.certain and charge.high < self.low:
            charge.gone_high = min(charge.gone_high, self.high)


class ObservedDecision(NamedTuple):
    """A decision that the checker must explain.

    Attributes:
        call: The call.
        low: The earliest moment of the decision.
        high: The latest moment.
        verdict: The answer of the rule.
        charged: Units charged by the decision.
        shown: Units of the call that `verdict.remaining` excludes; a check excludes the units that a hit would take.
        replaced: Charges of the hold that a confirmation replaces.
    """

    call: HistoryCall
    low: int
    high: int
    verdict: VerdictSeen
    charged: int
    shown: int
    replaced: list[Charge]


def check(history: History) -> list[Violation]:
    """Return all violations."""
    found = list(check_durations(history))
    accounts: dict[tuple[str, int, str], list[HistoryCall]] = defaultdict(list)
    for call in history.calls:
        for number, rule in enumerate(history.limiters[call.limiter]):
            accounts[call.limiter, number, SHARED if rule.shared else call.key].append(call)
    for (limiter, number, key), calls in accounts.items():
        rule = history.limiters[limiter][number]
        charges, decisions, resets = Reader(history, rule, number).read(calls)
        if rule.kind == "token_bucket":
            violations = check_bucket(rule, charges, decisions, resets)
        else:
            violations = check_window(rule, charges, decisions)
        found += [Violation(kind, limiter, key, number, call, detail) for kind, call, detail in violations]
    return found


def check_durations(history: History) -> Iterator[Violation]:
    """Yield calls that exceeded their deadline or never ended."""
    for call in history.calls:
        if call.end is None:
            if call.worker not in history.killed:
                yield Violation("hung", call.limiter, call.key, 0, call, "the caller never got a reply")
        elif call.end - call.start > (longest := history.longest_us * DEADLINES.get(call.operation, 1)):
            stopped = sum(
                max(0, min(pause.end, call.end) - max(pause.start, call.start))
                for pause in history.pauses
                if pause.worker in (call.worker, -1)
            )
            took, allowed = call.end - call.start - stopped, longest + min(stopped, GRACE_US)
            if took > allowed:
                detail = f"it took {took} us; at most {allowed} are allowed"
                yield Violation("outlived its deadline", call.limiter, call.key, 0, call, detail)


# --- Charges ---------------------------------------------------------------------------------------------------------


class Reader:
    """Converts the calls of one count to charges, resets, and decisions to explain."""

    def __init__(self, history: History, rule: RuleSpec, number: int) -> None:
        self._history = history
        self._number = number
        self._places = rule.kind == "concurrent"
        self._charges: list[Charge] = []
        self._decisions: list[ObservedDecision] = []
        self._held: dict[tuple[int, int], list[Charge]] = {}
        self._resets: list[Reset] = []

    def read(self, calls: Iterable[HistoryCall]) -> tuple[list[Charge], list[ObservedDecision], list[Reset]]:
        """Return the charges, the decisions and the resets."""
        for call in sorted(calls, key=lambda call: (call.worker, call.number)):
            if call.outcome != "nothing":
                getattr(self, f"_{call.operation}")(call)
        for charge in self._charges:
            for reset in self._resets:
                reset.apply(charge)
            self._forget(charge)
        return self._charges, self._decisions, self._resets

    def _hit(self, call: HistoryCall) -> None:
        self._decide(call)
        self._charge(call, call.cost)

    def _hits(self, call: HistoryCall) -> None:
        self._charge(call, call.cost)

    _wait = _hits

    def _check(self, call: HistoryCall) -> None:
        self._decide(call)

    def _record(self, call: HistoryCall) -> None:
        self._charge(call, call.cost, admits=False)

    def _hold(self, call: HistoryCall) -> None:
        self._decide(call)
        charge = self._charge(call, call.cost)
        if charge is not None and call.outcome == "admitted":
            self._held[call.worker, call.number] = [charge]
        elif charge is not None and call.outcome == "cancelled":
            charge.gone_low, charge.gone_high = charge.low, charge.high

    def _settle(self, call: HistoryCall) -> None:
        held = self._held.pop((call.worker, call.hold or 0), [])
        stays = 0 if self._places else call.cost
        for charge in tuple(held):
            more, back = stays - charge.units, charge.units - stays
            if more > 0:
                self._charge(call, more, admits=False)
            elif back:
                self._split(held, charge, back)
                self._end(charge, call)

    def _confirm(self, call: HistoryCall) -> None:
        held = self._held.get((call.worker, call.hold or 0), [])
        self._decide(call, replaced=held)
        if call.outcome == "refused":
            return
        self._held.pop((call.worker, call.hold or 0), None)
        for charge in held:
            self._end(charge, call)
        if not self._places:
            self._charge(call, call.cost)

    def _reset(self, call: HistoryCall) -> None:
        low, high = self._interval(call)
        losses = self._history.losses
        is_lost = any(loss.since <= high and low <= loss.until for loss in losses)
        certain = call.outcome == "done" and not is_lost
        self._resets.append(Reset(low, high if certain else self._last_moment(call), certain))

    def _renew(self, call: HistoryCall) -> None:
        if not self._places:
            return
        low, high = self._interval(call)
        if call.outcome == "admitted":  # a renewal takes no units, so it needs no free capacity
            verdict = call.verdicts[self._number]
            self._decisions.append(ObservedDecision(call._replace(cost=0), low, high, verdict, 0, 0, []))
        elif call.outcome != "refused":
            high = self._last_moment(call)
        elif call.verdicts[self._number].allowed:  # the lease of another rule had ended
            return
        for charge in self._held.get((call.worker, call.hold or 0), []):
            charge.renewals.append(Renewal(call, low, high))

    def _decide(self, call: HistoryCall, replaced: list[Charge] | None = None) -> None:
        """Add the decision of a call, if it made one."""
        if call.end is None or call.outcome not in ("admitted", "refused") or not call.verdicts:
            return
        low, high = self._interval(call)
        charges = call.outcome == "admitted" and call.operation in CHARGING
        if call.operation == "confirm" and self._places:
            return  # a confirmation returns places and takes none
        verdict = call.verdicts[self._number]
        charged, shown = call.cost if charges else 0, call.cost if call.outcome == "admitted" else 0
        self._decisions.append(ObservedDecision(call, low, high, verdict, charged, shown, replaced or []))

    def _charge(self, call: HistoryCall, units: int, admits: bool = True) -> Charge | None:
        if call.outcome == "refused" or not units:
            return None
        low, high = self._interval(call)
        certain = call.outcome in ("admitted", "done") and call.end is not None
        limit = call.verdicts[self._number].limit if certain and call.verdicts else 0
        if not certain:
            high = self._last_moment(call)
        charge = Charge(low, high, units, certain, admits, limit)
        self._charges.append(charge)
        return charge

    def _split(self, held: list[Charge], charge: Charge, back: int) -> None:
        """Split a charge: `back` units end, the rest stays."""
        if back < charge.units:
            rest = Charge(
                charge.low, charge.high, charge.units - back, charge.certain, charge.admits, charge.limit
            )
            rest.gone_low, rest.gone_high = charge.gone_low, charge.gone_high
            self._charges.append(rest)
            held.append(rest)
            charge.units = back

    def _end(self, charge: Charge, call: HistoryCall) -> None:
        """Record that a call returned units, or may have returned them."""
        low, high = self._interval(call)
        if call.outcome == "cancelled" and call.operation == "settle":
            high = self._last_moment(call)  # the library completes it although the caller was cancelled
        elif call.outcome not in ("admitted", "done"):
            high = NEVER
        charge.gone_low = min(charge.gone_low, low)
        charge.gone_high = min(charge.gone_high, high if charge.certain else NEVER)

    def _last_moment(self, call: HistoryCall) -> int:
        """Return the latest moment at which a call without a reply is carried out or dropped.

        It is `NEVER`, except for a cancelled call without a fault during or soon after it.
        """
        within, end = self._history.released_within_us, call.end
        if (
            call.outcome != "cancelled"
            or within is None
            or end is None
            or call.worker in self._history.killed
        ):
            return NEVER
        due = end + within
        is_disturbed = any(start <= due and call.start <= stop for start, stop in self._history.faults)
        return NEVER if is_disturbed else due

    def _interval(self, call: HistoryCall) -> tuple[int, int]:
        slack = self._history.slack_us
        return call.start - slack, NEVER if call.end is None else call.end + slack

    def _forget(self, charge: Charge) -> None:
        """Apply declared losses of the store: lost charges, and lost refunds."""
        for loss in self._history.losses:
            if charge.low <= loss.until and charge.high >= loss.since:
                charge.gone_low = min(charge.gone_low, loss.at)
            if charge.gone_high < NEVER and charge.gone_low <= loss.until and charge.gone_high >= loss.since:
                charge.gone_high = NEVER


# --- Rules with a fixed lifetime of units -------------------------------------------------------------------------------

Finding = tuple[str, HistoryCall, str]
"""Kind of a violation, the call that shows it, and the figures."""


def expiry_of(rule: RuleSpec) -> Callable[[int], int]:
    """Return a function that maps the moment of a charge to its expiry."""
    period = rule.period_us
    if rule.kind == "fixed_window":
        return lambda t: (t // period + 1) * period
    if rule.kind == "sliding_window":
        width = -(-period // rule.buckets)
        return lambda t: (t // width + 1) * width + period
    return lambda t: t + period


class Sums:
    """Sums of units by time."""

    def __init__(self, entries: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(entries)
        self.times = [time for time, _ in ordered]
        self._sums = [0, *accumulate(units for _, units in ordered)]

    def before(self, time: int) -> int:
        """Return the sum of everything before a time."""
        return self._sums[bisect_left(self.times, time)]

    def until(self, time: int) -> int:
        """Return the sum of everything up to a time, and at it."""
        return self._sums[bisect_right(self.times, time)]


class WindowCount:
    """The bounds of a rule's count at a moment."""

    def __init__(self, charges: list[Charge], expiry: Callable[[int], int]) -> None:
        self._expiry = expiry
        # For each charge: it certainly counts before the first value, and certainly no longer counts from the second on.
        ends = [(self.end_low(charge), self.end_high(charge)) for charge in charges]
        sure = [
            (charge, low)
            for charge, (low, _) in zip(charges, ends, strict=True)
            if charge.certain and low > charge.high
        ]
        sure.sort(key=lambda entry: entry[0].high)
        self._sure = sure
        self._sure_begun = Sums((charge.high, charge.units) for charge, _ in sure)
        self._sure_ended = Sums((low, charge.units) for charge, low in sure)
        self._maybe_begun = Sums((charge.low, charge.units) for charge in charges)
        self._maybe_ended = Sums(
            (high, charge.units) for charge, (_, high) in zip(charges, ends, strict=True)
        )
        self._by_low = sorted(charges, key=lambda charge: charge.low)
        self._lows = [charge.low for charge in self._by_low]
        lasts = [(charge, charge.last_high()) for charge in charges]
        self._open_ended = [charge for charge, last in lasts if last == NEVER]
        self._longest = max(
            (expiry(last) - charge.low for charge, last in lasts if last < NEVER),
            default=0,
        )

    def end_low(self, charge: Charge) -> int:
        return min(self._expiry(charge.last_low()), charge.gone_low)

    def end_high(self, charge: Charge) -> int:
        return min(self._expiry(charge.last_high()), charge.gone_high + 1)

    def certain(self, low: int, high: int) -> int:
        """Return the lower bound of the count at an unknown moment of an interval."""
        total = self._sure_begun.before(low) - self._sure_ended.until(high)
        first, last = bisect_left(self._sure_begun.times, low), bisect_right(self._sure_begun.times, high)
        return total + sum(charge.units for charge, end in self._sure[first:last] if end <= high)

    def possible(self, low: int, high: int) -> int:
        """Return the upper bound of the count at an unknown moment of an interval."""
        return self._maybe_begun.until(high) - self._maybe_ended.until(low)

    def alive(self, moment: int) -> list[Charge]:
        """Return the admissions that are certainly counted at a moment."""
        near = self._sure[
            bisect_right(self._sure_begun.times, moment - self._longest - 1) : bisect_right(
                self._sure_begun.times, moment
            )
        ]
        return [charge for charge, end in near if end > moment and charge.admits]

    def near(self, low: int, high: int) -> Iterator[Charge]:
        """Yield all charges that may be counted during an interval, and some others."""
        first, last = bisect_left(self._lows, low - self._longest - 1), bisect_right(self._lows, high)
        yield from self._by_low[first:last]
        yield from (charge for charge in self._open_ended if charge.low < low - self._longest - 1)


def check_window(
    rule: RuleSpec, charges: list[Charge], decisions: list[ObservedDecision]
) -> Iterator[Finding]:
    """Yield the violations of a rule that counts each unit for a fixed time."""
    expiry = expiry_of(rule)
    count = WindowCount(charges, expiry)
    admissions = WindowCount([charge for charge in charges if charge.admits and charge.certain], expiry)
    smallest = min(rule.limits)
    for charge in charges:
        yield from check_renewals(charge, count, expiry)
    for decision in decisions:
        call, _, high, verdict, charged, _, _ = decision
        if verdict.limit not in rule.limits:
            yield "unknown limit", call, f"{verdict.limit} is none of {rule.limits}"
        elif found := explain(decision, *bounds(count, decision)):
            yield found
        elif not verdict.allowed and call.number % RETRIES_CHECKED == 0:
            yield from check_retry(decision, count, expiry)
        if charged and admissions.certain(high + 1, high) > smallest:
            together = admissions.alive(high)
            units = sum(charge.units for charge in together)
            if units > max((charge.limit for charge in together), default=0):
                yield (
                    "too many",
                    call,
                    f"{units} units are counted at once, admitted by a limit of {verdict.limit}",
                )


def check_renewals(charge: Charge, count: WindowCount, expiry: Callable[[int], int]) -> Iterator[Finding]:
    """Yield renewals that were refused although the lease was live, or admitted after it had ended."""
    for call, low, high in charge.renewals:
        if (
            call.outcome == "refused"
            and charge.certain
            and charge.high < low
            and count.end_low(charge) > high
        ):
            yield "lost place", call, "the renewal was refused, though nothing had ended the lease"
        if call.outcome == "admitted" and expiry(charge.last_high(low - 1)) <= low:
            yield "renewed too late", call, "the lease had already ended"


def bounds(count: WindowCount, decision: ObservedDecision) -> tuple[int, int]:
    """Return the lowest and highest possible count before a decision, without the hold that it replaced."""
    _, low, high, _, charged, _, replaced = decision
    least, most = count.certain(low, high), count.possible(low, high) - charged
    for charge in replaced:
        end_low, end_high = count.end_low(charge), count.end_high(charge)
        if end_high > low and charge.low <= high:
            most -= charge.units
        if charge.certain and charge.high < low and end_low > high:
            least -= charge.units
    return least, most


def explain(decision: ObservedDecision, least: int, most: int) -> Finding | None:
    """Return the violation that a decision shows, or None if a count between the bounds explains it."""
    call, _, _, verdict, _, shown, replaced = decision
    limit, cost = verdict.limit, call.cost
    if verdict.allowed and cost and least + cost > limit:
        return "too many", call, f"{cost} admitted, though at least {least} of {limit} were counted"
    if not verdict.allowed and most + cost <= limit:
        return "refused with room", call, f"{cost} refused, though at most {most} of {limit} were counted"
    if replaced and not shown:
        return None  # after a refusal the old hold stays, so the remaining units include it
    if verdict.remaining > max(0, limit - least - shown):
        detail = f"{verdict.remaining} of {limit} left, though at least {least + shown} were counted"
        return "forgotten units", call, detail
    if verdict.remaining < max(0, limit - most - shown):
        detail = f"{verdict.remaining} of {limit} left, though at most {most + shown} were counted"
        return "unexplained units", call, detail
    return None


def check_retry(
    decision: ObservedDecision, count: WindowCount, expiry: Callable[[int], int]
) -> Iterator[Finding]:
    """Yield a waiting time that is too short or too long in every possible order of events."""
    call, low, high, verdict, _, _, replaced = decision
    wait, limit = verdict.retry_us, verdict.limit
    if wait is None:
        if call.cost <= limit:
            yield "never admitted", call, f"a cost of {call.cost} fits into {limit}"
        return
    still, perhaps = call.cost, call.cost
    for charge in count.near(low, high):
        if charge in replaced:
            continue
        if (
            charge.certain
            and charge.high < low
            and charge.gone_low > high
            and expiry(charge.last_low(low)) > high + wait
        ):
            still += charge.units
        if charge.gone_high >= low and expiry(charge.last_high(high)) > low + wait - 1:
            perhaps += charge.units
    if still > limit:
        yield "waiting too short", call, f"after {wait} us still {still} of {limit}"
    elif perhaps <= limit:
        yield "waiting too long", call, f"1 us before {wait} us at most {perhaps} of {limit}"


# --- Token buckets ----------------------------------------------------------------------------------------------------


class Level:
    """The lower bound of a token bucket's level over time.

    It assumes that each charge came as early as possible and flowed out at the highest rate.
    """

    def __init__(self, rule: RuleSpec, charges: list[Charge]) -> None:
        self._period, self._rate = rule.period_us, max(rule.limits)
        # Only charges that were never returned or lost are certain.
        sure = [charge for charge in charges if charge.certain and charge.gone_low == NEVER]
        self._coming = sorted(sure, key=lambda charge: charge.high, reverse=True)
        self._level, self._at = 0, 0

    def at(self, known_by: int, moment: int) -> int:
        """Return the level at `moment` from charges made before `known_by`; neither argument may decrease between calls."""
        while self._coming and self._coming[-1].high < known_by:
            charge = self._coming.pop()
            parts, late = charge.units * self._period, self._at - charge.low
            if late > 0:  # it is older than the level, so part of it has flowed out
                self._level += max(0, parts - self._rate * late)
            else:
                self._level = max(0, self._level + self._rate * late) + parts
                self._at = charge.low
        return max(0, self._level - self._rate * (moment - self._at))


def check_bucket(
    rule: RuleSpec, charges: list[Charge], decisions: list[ObservedDecision], resets: list[Reset]
) -> Iterator[Finding]:
    """Yield the violations of a token bucket.

    Levels are counted in parts: a unit is `period_us` parts, and `limit` parts flow out per microsecond.
    """
    yield from too_many(rule, charges, decisions)
    by_reset: dict[int, list[ObservedDecision]] = defaultdict(list)
    for decision in decisions:
        last = max((reset.low for reset in resets if reset.certain and reset.high < decision.low), default=0)
        by_reset[last].append(decision)
    for last, some in by_reset.items():
        yield from too_few(rule, [charge for charge in charges if charge.high >= last], some)


def too_many(rule: RuleSpec, charges: list[Charge], decisions: list[ObservedDecision]) -> Iterator[Finding]:
    """Yield admissions and remaining units that are too high in every possible order of events."""
    period, rate = rule.period_us, max(rule.limits)
    level = Level(rule, charges)
    for decision in sorted(decisions, key=lambda decision: decision.low):
        call, low, high, verdict, _, shown, replaced = decision
        least = level.at(low, high) - rate  # a tick may be rounded
        if replaced:
            continue
        room = (verdict.limit * period - least) // period
        if verdict.allowed and call.cost > max(0, room):
            yield "too many", call, f"at least {least / period:.3f} of {verdict.limit} were counted"
        elif verdict.remaining > max(0, room - shown):
            yield (
                "forgotten units",
                call,
                f"{verdict.remaining} left, at least {least / period:.3f} were counted",
            )
    admitted = Level(rule, [charge for charge in charges if charge.admits])
    for decision in sorted(decisions, key=lambda decision: decision.high):
        if decision.charged:
            over = admitted.at(decision.high + 1, decision.high) - rate - max(rule.bursts) * period
            if over > 0:
                yield (
                    "too many",
                    decision.call,
                    f"{over / period:.3f} more than the burst are counted at once",
                )


def too_few(rule: RuleSpec, charges: list[Charge], decisions: list[ObservedDecision]) -> Iterator[Finding]:
    """Yield refusals and remaining units that are too low in every possible order of events."""
    period, limit = rule.period_us, min(rule.limits)
    begun = Sums((charge.low, charge.units * period) for charge in charges)
    ended = Sums((charge.high, charge.units * period) for charge in charges)
    arrivals = sorted(((charge.high, charge.units * period) for charge in charges), reverse=True)
    level, at = 0, 0
    for decision in sorted(decisions, key=lambda decision: decision.low):
        call, low, high, verdict, charged, shown, _ = decision
        while arrivals and arrivals[-1][0] < low:
            time, parts = arrivals.pop()
            level = max(0, level - limit * (time - at)) + parts
            at = time
        most = max(0, level - limit * (low - at)) + begun.until(high) - ended.before(low)
        most -= charged * period
        full = verdict.limit * period
        if not verdict.allowed and most + call.cost * period <= full:
            yield "refused with room", call, f"at most {most / period:.3f} of {verdict.limit} were counted"
        elif verdict.remaining < (full - most - shown * period) // period - 1:
            yield (
                "unexplained units",
                call,
                f"{verdict.remaining} left, at most {most / period:.3f} were counted",
            )
        elif not verdict.allowed and verdict.retry_us is not None:
            longest = -(-(most + call.cost * period - full) // limit) + 2
            if verdict.retry_us > longest:
                yield "waiting too long", call, f"{verdict.retry_us} us, where {longest} are enough"
