"""Random traces: rules whose limits change, and calls at chosen instants.

Most instants are chosen relative to the times in the last decision, a microsecond before, at or after them, where mistakes
are most likely. A trace is a value, so that Hypothesis can show the shortest failing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from hypothesis import strategies as st

from headgate import Decision, Hold, Limiter, Quota, Rule
from headgate.costs import Cost
from headgate.errors import CostTooHigh
from headgate.keys import Key
from headgate.quota import MAX_PERIOD_US, SPANS_US, Span
from headgate.rules import RATES, SHARED, Kind, make_rule

Operation = Literal["hit", "check", "hold", "settle", "release", "confirm", "renew", "record", "reset"]

Feature = Literal["several_rules", "units", "moves", "quotas", "concurrent", "calendar", "penalty"]
"""Store features besides counting rates: several rules per limiter, a cost for each rule, holds that are confirmed or
renewed, quotas of single calls, places, calendar windows, penalties."""

ALL_FEATURES: frozenset[Feature] = frozenset(
    ("several_rules", "units", "moves", "quotas", "concurrent", "calendar", "penalty")
)

START_US = 1_700_000_000_000_000
# Stays within the exact range of doubles after all additions in a trace.
LATEST_US = 8_000_000_000_000_000

ALL_KINDS = RATES

_MS, _SECOND, _HOUR, _DAY = 1_000, 1_000_000, 3_600_000_000, 86_400_000_000
# Strategies are created once, because creating one costs more than drawing from it.
_PERIOD = st.sampled_from((_MS, 7 * _MS, _SECOND, 60 * _SECOND, _HOUR, _HOUR + _MS, 30 * _DAY))
_LIMIT = st.sampled_from((1, 2, 3, 5, 8, 12, 1_000, 0))
_PENALTY = st.sampled_from(tuple(product((1, 1, 2, 3, 7), (1, 1, 2, 5), (1, 3, 40))))
_BURST = st.none() | st.integers(1, 12)
_BUCKETS = st.sampled_from(tuple(product((60, 7, 2, 1), (False, True))))
_SCOPES = st.sampled_from((st.sampled_from((None, SHARED)), st.sampled_from(("user", "realm", SHARED))))
_CALENDARS: st.SearchStrategy[tuple[Span, str]] = st.sampled_from(
    (("day", "Europe/Berlin"), ("week", "UTC"), ("month", "Pacific/Apia"))
)


@dataclass(frozen=True)
class Move:
    """The time before a step: in microseconds, in sixtieths of the period, or until a time in the last decision."""

    unit: Literal["us", "sixtieth", "retry", "reset"]
    amount: int
    nudge: int = 0

    def target(self, now: int, period_us: int, last: Decision | None) -> int:
        """Return the resulting instant, given the last decision."""
        if self.unit == "us":
            moved = self.amount
        elif self.unit == "sixtieth":
            moved = period_us * self.amount // 60 + self.nudge
        else:
            named = last and (last.retry_after_us if self.unit == "retry" else last.reset_after_us)
            moved = max(0, (named or 0) + self.nudge)
        return min(now + moved, LATEST_US)


@dataclass(frozen=True)
class Step:
    """One call.

    `hold` selects the open hold to settle, confirm, renew or release, `version` the limits in force. If used, `tokens` is
    the cost in the other unit, and `limit` the limit of a quota for the first rule.
    """

    op: Operation
    move: Move
    cost: int
    hold: int
    who: int
    tier: str | None
    version: int
    tokens: int
    limit: int | None


@dataclass(frozen=True)
class Trace:
    """Rules in two versions that share their states, and the steps."""

    versions: tuple[tuple[Rule, ...], ...]
    steps: tuple[Step, ...]
    features: frozenset[Feature] = frozenset()

    @property
    def has_places(self) -> bool:
        """Whether it supports only holds."""
        return any(rule.kind == "concurrent" for rule in self.versions[0])

    def cost(self, step: Step) -> Cost:
        """Return the cost of a step; by unit, if there is another unit besides requests."""
        units = {rule.unit for rule in self.versions[0]}
        return step.cost if units <= {"requests"} else {"requests": step.cost, "tokens": step.tokens}

    def quota(self, step: Step) -> dict[str, Quota] | None:
        """Return the quota that a step passes for the first rule."""
        first = self.versions[step.version][0]
        if "quotas" not in self.features or step.limit is None:
            return None
        return {first.name: Quota(step.limit, first.quota.period_us)}

    def key(self, who: int) -> Key:
        """Return the key of one of a few callers; some keys have a scope in common."""
        scopes = {rule.scope for rule in self.versions[0]} - {None, SHARED}
        if not scopes:
            return ("a", "b", b"a")[who]
        callers = ({"user": "a", "realm": "x"}, {"user": "b", "realm": "x"}, {"user": "a", "realm": "y"})
        return {scope: name for scope, name in callers[who].items() if scope in scopes}

    @property
    def period_us(self) -> int:
        return self.versions[0][0].quota.period_us


def traces(
    kinds: Sequence[Kind] = ALL_KINDS,
    *,
    most_rules: int = 3,
    backwards: bool = True,
    most_steps: int = 40,
    features: frozenset[Feature] = frozenset(),
) -> st.SearchStrategy[Trace]:
    """Return traces over rules of these kinds and of the kinds among the features."""
    steps = st.lists(_steps(backwards, features), min_size=1, max_size=most_steps).map(tuple)
    return st.builds(Trace, _versions(kinds, most_rules, features), steps, st.just(features))


@st.composite
def _versions(
    draw: st.DrawFn, kinds: Sequence[Kind], most_rules: int, features: frozenset[Feature]
) -> tuple[tuple[Rule, ...], ...]:
    more: tuple[Kind, ...] = ("concurrent", "calendar")
    kind = st.sampled_from((*kinds, *(kind for kind in more if kind in features)))
    unit = st.sampled_from(("requests", "tokens") if "units" in features else ("requests",))
    count = draw(st.integers(1, most_rules))
    scope = draw(_SCOPES)
    rules = [draw(_rule_versions(draw(kind), scope, f"rule{i}", draw(unit))) for i in range(count)]
    scopes = [rule.scope for rule, _ in rules if rule.is_rate]
    is_punished = features == {"penalty"} or ("penalty" in features and draw(st.booleans()))
    if is_punished and most_rules > 1 and scopes:
        rules.append(draw(_penalty_versions(st.sampled_from(scopes))))
    first, second = zip(*rules, strict=True)
    return first, second


@st.composite
def _penalty_versions(draw: st.DrawFn, scopes: st.SearchStrategy[str | None]) -> tuple[Rule, Rule]:
    period, scope = draw(_PERIOD), draw(scopes)
    after, growth, times = draw(_PENALTY)
    longest = min(period * times, MAX_PERIOD_US) if growth > 1 else None
    return tuple(  # type: ignore[return-value]  # two rules
        make_rule("penalty", Quota(limit, period), scope, name="penalty", growth=growth, longest_us=longest)
        for limit in (after, max(1, after - 1))
    )


@st.composite
def _rule_versions(
    draw: st.DrawFn, kind: Kind, scopes: st.SearchStrategy[str | None], name: str, unit: str
) -> tuple[Rule, Rule]:
    period = draw(_PERIOD)
    buckets, strict = draw(_BUCKETS) if kind == "sliding_window" else (60, True)
    scope = draw(scopes)
    span, zone = draw(_CALENDARS) if kind == "calendar" else (None, None)

    def quota() -> Quota:
        limit = draw(_LIMIT)
        burst = draw(_BURST) if kind == "token_bucket" and limit else None
        return Quota(limit, period if span is None else SPANS_US[span], burst)

    def rule() -> Rule:
        own, tiers = quota(), {"pro": quota()}
        return make_rule(kind, own, scope, tiers, name, buckets, strict, unit=unit, span=span, timezone=zone)

    first = rule()
    if kind == "concurrent":
        period = draw(_PERIOD)  # a lease may change; held places stay held
    return first, rule()


def _steps(backwards: bool, features: frozenset[Feature]) -> st.SearchStrategy[Step]:
    # Few draws, from prepared values: the overhead of Hypothesis per draw is larger than the cost of the tested call.
    named: tuple[Literal["retry", "reset"], ...] = ("retry", "reset")
    nudges = (0, -1, 1)
    moves = (
        *(Move("us", amount) for amount in (0,) * 28 + (1, 2, 999, 1_000, 10_000_000) * 4),
        *(Move("sixtieth", amount, nudge) for amount in (1, 5, 20, 30, 59, 60, 61, 90) for nudge in nudges),
        *(Move(unit, 0, nudge) for unit in named for nudge in nudges * 4),
    )
    if backwards:
        moves += tuple(
            Move("sixtieth", amount, nudge) for amount in (-1, -10, -59, -61) for nudge in nudges * 2
        )
    ops: tuple[Operation, ...] = (
        *("hit", "hit", "hit", "hit", "hit", "hit", "hold", "hold", "hold"),
        *("check", "settle", "settle", "release", "record", "record", "reset"),
        *(("hold", "confirm", "confirm", "renew") if "moves" in features else ()),
    )
    callers = product((0, 0, 0, 1, 2), (None, None, "pro", "unknown"), (0, 0, 0, 1))
    others = product((1, 2, 3, 0, 12), (None, None, 1, 4, 12, 0)) if features else ((0, None),)
    return st.builds(
        lambda op, move, cost, hold, caller, others: Step(op, move, cost, hold, *caller, *others),
        st.sampled_from(ops),
        st.sampled_from(moves),
        st.sampled_from((1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 5, 0, 12, 13, 1_000)),
        st.integers(0, 3),
        st.sampled_from(tuple(callers)),
        st.sampled_from(tuple(others)),
    )


class Actor:
    """Plays a trace's calls on limiters that share a store, one per version of the rules."""

    def __init__(self, trace: Trace, limiters: Sequence[Limiter]) -> None:
        self._trace = trace
        self._limiters = limiters
        self._holds: list[Hold] = []

    def play(self, step: Step) -> tuple[Decision | type[CostTooHigh], ...]:
        """Make the call, and return its answer or its visible effect."""
        limiter, key = self._limiters[step.version], self._trace.key(step.who)
        try:
            answer = self._call(limiter, key, step)
        except CostTooHigh:
            return (CostTooHigh,)
        seen = limiter.check(key, 0, tier=step.tier)
        return (seen,) if answer is None else (answer, seen)

    def _call(self, limiter: Limiter, key: Key, step: Step) -> Decision | None:
        cost, quota = self._trace.cost(step), self._trace.quota(step)
        if step.op == "check":
            return limiter.check(key, cost, tier=step.tier, quota=quota)
        if step.op == "hold" or (step.op in ("hit", "record") and self._trace.has_places):
            hold = limiter.hold(key, cost, tier=step.tier, quota=quota)
            self._holds.append(hold)
            return hold.decision
        if step.op == "hit":
            return limiter.hit(key, cost, tier=step.tier, quota=quota)
        if step.op == "record":
            limiter.record(key, cost, tier=step.tier, quota=quota)
        elif step.op == "reset":
            limiter.reset(key)
        elif self._holds:
            return self._end(step, cost)
        return None

    def _end(self, step: Step, cost: Cost) -> Decision | None:
        """Settle, release, confirm or renew one of the open holds."""
        hold = self._holds[step.hold % len(self._holds)]
        if step.op in ("confirm", "renew") and hold.final is not None:
            return None  # it was refused and stays refused
        if step.op == "renew":
            return (
                hold.renew() if self._trace.has_places and hold.receipts else None
            )  # nothing of a cost of 0
        if step.op != "confirm":
            self._holds.remove(hold)
            hold.settle(cost if step.op == "settle" else 0)
            return None
        answer = hold.confirm(cost if step.tokens % 2 else None)
        if hold.final is not None:
            self._holds.remove(hold)
        return answer
