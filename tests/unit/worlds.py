"""Random scripts of calls, played on a memory store with its own clock or with explicit times.

A script is data, so that the same one can be played in several worlds and the answers compared. Its times are whole
microseconds of a *true* time that never goes back; the clock that a world reads may have been set back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

from hypothesis import strategies as st

from headgate import (
    CostTooHigh,
    Decision,
    Hold,
    Limiter,
    MemoryStore,
    Quota,
    Rule,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.algorithms import State
from headgate.testing import FakeClock

START_US = 1_700_000_000_123_457
"""An ordinary instant: at the edge of no window, bucket or millisecond."""

KEYS = ("ada", "bob", b"ada", "cyd", "dan")

OpKind = Literal["hit", "record", "hold", "settle", "check"]


class Op(NamedTuple):
    """One call of a script."""

    kind: OpKind
    advance_us: int
    back_us: int
    key: int
    cost: int
    tier: str | None
    variant: int
    """Selects the variant whose limits apply, if there are several."""
    pick: int
    """Selects the open hold to settle."""


class Outcome(NamedTuple):
    """The result of an op: the decision of a hit, check or hold, or the final cost of a settle."""

    op: Op
    at_us: int
    decision: Decision | None = None
    hold: int | None = None
    """The number of the hold that was taken or settled."""
    final: int | None = None


@dataclass
class World:
    """A limiter on a store, with the time from its clock or from the argument `now=`.

    Attributes:
        variants: Limiters that share their states and differ in their limits.
        explicit: Whether every call has the argument `now=`.
        clock: The clock of the store; it does not move if every call has the argument `now=`.
        true_us: The true time.
        behind_us: How far the world's clock has been set back.
    """

    variants: Sequence[Limiter]
    store: MemoryStore
    explicit: bool
    clock: FakeClock
    true_us: int = START_US
    behind_us: int = 0
    holds: list[Hold] = field(default_factory=list)

    @property
    def now_us(self) -> int:
        """The current time of the clock, which may have been set back."""
        return self.true_us - self.behind_us

    def move(self, advance_us: int, back_us: int = 0) -> None:
        """Advance the true time, then set the clock back."""
        self.true_us += advance_us
        self.behind_us += back_us
        if not self.explicit:
            self.clock.advance_us(advance_us - back_us)

    def now(self) -> float | None:
        """Return the argument `now=` of a call; `None` if the store reads its clock."""
        return self.now_us / 1_000_000 if self.explicit else None

    def play(self, op: Op) -> Outcome:
        """Do one op; a cost above the capacity and a settle without an open hold have no effect."""
        self.move(op.advance_us, op.back_us)
        limiter, key = self.variants[op.variant % len(self.variants)], KEYS[op.key]
        try:
            return self._call(limiter, key, op)
        except CostTooHigh:
            return Outcome(op, self.true_us)

    def _call(self, limiter: Limiter, key: str | bytes, op: Op) -> Outcome:
        now, at = self.now(), self.true_us
        if op.kind == "hit":
            return Outcome(op, at, limiter.hit(key, op.cost, tier=op.tier, now=now))
        if op.kind == "check":
            return Outcome(op, at, limiter.check(key, op.cost, tier=op.tier, now=now))
        if op.kind == "record":
            limiter.record(key, op.cost, tier=op.tier, now=now)
            return Outcome(op, at)
        if op.kind == "hold":
            hold = limiter.hold(key, op.cost, tier=op.tier, now=now)
            self.holds.append(hold)
            return Outcome(op, at, hold.decision, hold=len(self.holds) - 1)
        return self._settle(op)

    def _settle(self, op: Op) -> Outcome:
        open_holds = [
            number for number, hold in enumerate(self.holds) if hold.allowed and hold._final is None
        ]
        if not open_holds:
            return Outcome(op, self.true_us)
        number = open_holds[op.pick % len(open_holds)]
        final = self.holds[number].settle(op.cost - 1, now=self.now())
        return Outcome(op, self.true_us, hold=number, final=final)

    def states(self) -> dict[object, State]:
        """Return all states of the store."""
        return dict(self.store._counters.states())

    def state(self, key: str | bytes) -> State | None:
        """Return the state of a key under the first rule."""
        limiter = self.variants[0]
        return self.states().get(((limiter.name, limiter.rules[0].identity), key))


@contextmanager
def world(
    variants: Sequence[Rule | Sequence[Rule]],
    *,
    explicit: bool = True,
    max_keys: int = 100,
) -> Iterator[World]:
    """Make a world with these rules; several variants share the same states."""
    clock = FakeClock(START_US / 1_000_000)
    with MemoryStore(max_keys=max_keys, clock=clock) as opened:
        limiters = [
            Limiter(*([rules] if isinstance(rules, Rule) else rules), name="world", store=opened)
            for rules in variants
        ]
        yield World(limiters, opened, explicit, clock)


# --- Strategies ------------------------------------------------------------------------------------------------------

PERIODS_US = (10_000, 1_000_000, 60_000_000, 7 * 3_600_000_000)
"""Short, ordinary, long, and past the hour from which token buckets count in milliseconds."""

TIER = "pro"


def quotas(period_us: int, least: int = 1) -> st.SearchStrategy[Quota]:
    return st.builds(Quota, st.integers(least, 8), st.just(period_us))


@st.composite
def rule_sets(
    draw: st.DrawFn, kinds: Sequence[str], *, tiers: bool = True, most_variants: int = 2
) -> list[Rule]:
    """Draw one rule, with a tier or not, in one or two variants that differ in their limits."""
    kind = draw(st.sampled_from(kinds))
    period_us = draw(st.sampled_from(PERIODS_US))
    buckets = draw(st.sampled_from((1, 2, 3, 10, 60)))
    with_tier = tiers and draw(st.booleans())
    return [
        _rule(
            kind,
            draw(quotas(period_us)),
            buckets,
            {TIER: draw(quotas(period_us))} if with_tier else {},
            draw(st.integers(1, 8)) if kind == "token_bucket" else None,
        )
        for _ in range(draw(st.integers(1, most_variants)))
    ]


def _rule(kind: str, quota: Quota, buckets: int, tiers: dict[str, Quota], burst: int | None) -> Rule:
    if kind == "token_bucket":
        return token_bucket(quota, burst=burst, tiers=tiers)
    if kind == "fixed_window":
        return fixed_window(quota, tiers=tiers)
    if kind == "sliding_log":
        return sliding_log(quota, tiers=tiers)
    return sliding_window(quota, tiers=tiers, buckets=buckets, strict=kind == "sliding_window")


def scripts(
    period_us: int,
    *,
    kinds: Sequence[OpKind] = ("hit", "hit", "record", "hold", "settle", "settle", "check"),
    keys: int = 2,
    back: bool = False,
) -> st.SearchStrategy[list[Op]]:
    """Draw scripts whose steps often end exactly at an edge, or one microsecond before or after it."""
    edges = [period_us, period_us // 60, period_us // 10, period_us // 3, 1000]
    near = [max(0, edge + around) for edge in edges for around in (-1, 0, 1)]
    steps = st.one_of(
        st.sampled_from([0, 0, 0, 1, *near]), st.integers(0, period_us // 4), st.integers(0, 3 * period_us)
    )
    backs = st.one_of(st.just(0), st.just(0), steps) if back else st.just(0)
    # One draw for everything except time: scripts are long, and every draw takes time.
    calls = st.sampled_from(
        [*product(range(keys), range(1, 6), (None, TIER), range(2), range(4))],
    )
    ops = st.builds(
        lambda kind, call, step, back: Op(kind, step, back, *call),
        st.sampled_from(kinds),
        calls,
        steps,
        backs,
    )
    return st.lists(ops, min_size=10, max_size=24)


@st.composite
def rules_and_scripts(
    draw: st.DrawFn,
    kinds: Sequence[str],
    *,
    ops: Sequence[OpKind] = ("hit", "hit", "record", "hold", "settle", "settle", "check"),
    keys: int = 2,
    back: bool = False,
    tiers: bool = True,
    most_variants: int = 2,
) -> tuple[list[Rule], list[Op]]:
    """Draw rules and a script for them."""
    rules = draw(rule_sets(kinds, tiers=tiers, most_variants=most_variants))
    return rules, draw(scripts(rules[0].quota.period_us, kinds=ops, keys=keys, back=back))
