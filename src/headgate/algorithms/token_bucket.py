"""The token bucket: a steady rate with bursts.

It is implemented as a leaky bucket: `level` is the taken amount, which drains, so a fresh bucket has level 0. All numbers
are whole: with limit/period reduced to n/d per tick, a unit is d small parts and n of them drain per tick, without division
or drift. A tick is 1 us, or 1 ms if the period exceeds an hour, which keeps d below 2^35.

State: birth, level, time in ticks, refunded, n, d, burst.

The last three are the *shape* of the level. A call with another shape (a changed limit, another tier) converts the level,
rounded up. The result may be above the caller's capacity, and is not reduced: otherwise callers could lower their level by
changing between tiers. But a state whose level drained to 0 in its own shape is fresh for every caller, because a store may
have deleted it. A level that is too large to be counted in the caller's shape stays above its capacity until that time.

So any interval admits at most the burst of its last call plus the highest rate of its calls: between two charges the level
drains at the rate of one of their quotas, and the last charge was within its burst.

`refunded` is the total of all refunds to this state. It separates overlapping holds: the refund of one hold must not be
mistaken for drainage during another. Before it exceeds the exact range, the state gets a new birth, so that older receipts
give back nothing.

A hold that is released before the state changes otherwise leaves no trace: the state is the same as before, with its old
time. Otherwise a clock that goes back later would find a bucket that drained further than without the hold. For the same
reason a refund never moves the time forward. But after another charge or refund the time stays. If it were moved before a
charge that still counts, a clock that goes back could give back an older hold as if none of it had drained.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.algorithms.base import Receipt, State, moved, refused_move
from headgate.decision import Verdict
from headgate.errors import CostTooHigh
from headgate.quota import MAX_UNITS


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """The token bucket of one quota.

    Attributes:
        name: The rule's name.
        burst: The highest number of units at once.
        n: Small parts that drain per tick; 0 for a limit of 0.
        d: Small parts in a unit.
        tick: Length of a tick in microseconds.
    """

    name: str
    burst: int
    n: int
    d: int
    tick: int

    @property
    def capacity(self) -> int:
        return self.burst

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        if not self.n:
            return state, Verdict(not cost, 0, 0, None, None)
        birth, level, time, refunded = self._drained(state, now // self.tick, birth)
        excess = level + cost * self.d - self.burst * self.d
        if cost and excess <= 0:
            level += cost * self.d
            reset_after = self._drained_at(level, time) - now
            after = (birth, level, time, refunded, self.n, self.d, self.burst)
            return after, Verdict(True, self.burst, self._remaining(level), None, reset_after)
        # Nothing is written, so the state keeps its shape. It is fresh as soon as it is fresh in one of the two shapes.
        fresh_at = now
        if state and level:
            fresh_at = self.fresh_at(state)
            if level <= MAX_UNITS:
                fresh_at = min(self._drained_at(level, time), fresh_at)
        retry_after = None
        if cost:
            free_at = self._drained_at(excess, time) if level <= MAX_UNITS else fresh_at
            retry_after = min(free_at, fresh_at) - now
        return state, Verdict(not cost, self.burst, self._remaining(level), retry_after, fresh_at - now)

    def move(
        self, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
    ) -> tuple[State | None, Verdict]:
        if receipt[5:8] != (self.n, self.d, self.burst):
            # Units of another shape stay charged and drain: the wait for both together cannot be computed.
            return self.decide(state, now, cost, birth)
        after, verdict = moved(self, state, receipt, now, cost, birth)
        if state is None or verdict.retry_after_us is None:
            return after, verdict
        # From a certain time on, the draining units are those that would be given back, so waiting for them gains nothing.
        # Then the wait is the same as without giving back.
        at = now + verdict.retry_after_us
        later = self.refund(state, receipt, receipt[-1], at)
        if self.decide(later, at, cost, birth)[1].allowed:
            return after, verdict
        return refused_move(self, state, now, self.decide(state, now, cost, birth)[1].retry_after_us)

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State | None:
        if not self.n:
            return state
        birth, level, time, refunded = self._drained(state, now // self.tick, birth)
        if level + cost * self.d > MAX_UNITS:
            raise CostTooHigh(cost, max(0, MAX_UNITS - level) // self.d, self.name)
        return birth, level + cost * self.d, time, refunded, self.n, self.d, self.burst

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        birth, level, time, refunded, n, d, burst = after
        time_before = before[2] if before and before[0] == birth else time
        return birth, level - cost * d, time, refunded, time_before, n, d, burst, cost

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        birth, level_before, at, refunded_before, time_before, *shape, held = receipt
        if state is None or state[0] != birth or list(state[4:]) != shape:
            return state
        n, d, burst = shape
        _, level, time, refunded, *_ = state
        now = max(now // self.tick, time)
        left = max(0, level - n * (now - time))
        cost = min(cost, held)
        # Order of drainage since the hold: first units from before the hold that were not refunded since, then units that
        # stay charged, and last the units to give back.
        gone = n * (now - at) - max(0, level_before - (refunded - refunded_before)) - (held - cost) * d
        back = min(left, max(0, cost * d - max(0, gone)))
        if left == back:
            return None
        if cost == held and (level, time, refunded) == (level_before + held * d, at, refunded_before):
            # The state has not changed since the hold: restore the state before it.
            return birth, level_before + n * (at - time_before), time_before, refunded, n, d, burst
        level, refunded = level - back, refunded + back
        if refunded > MAX_UNITS:
            birth, refunded = (birth + 1) % MAX_UNITS, 0
        return birth, level, time, refunded, n, d, burst

    def read(self, state: State, now: int) -> int:
        return max(now, state[2] * self.tick)

    def fresh_at(self, state: State) -> int:
        _, level, time, _, n, *_ = state
        return (time - level // -n) * self.tick

    def _drained(self, state: State | None, now: int, birth: int) -> tuple[int, int, int, int]:
        """Return current birth, level, time and total of refunds, in this shape."""
        if state is None:
            return birth, 0, now, 0
        old_birth, level, time, refunded, n, d, burst = state
        now = max(now, time)
        if level <= n * (now - time):
            return birth, 0, now, 0
        if (n, d, burst) != (self.n, self.d, self.burst):
            level = -(level * self.d // -d)
            if level > MAX_UNITS:
                return birth, MAX_UNITS + 1, now, 0
            # Receipts refer to the other shape: their units must not be given back in this one.
            old_birth, refunded = birth, 0
        level -= self.n * (now - time)
        if level <= 0:
            return birth, 0, now, 0
        return old_birth, level, now, refunded

    def _remaining(self, level: int) -> int:
        return max(0, self.burst * self.d - level) // self.d

    def _drained_at(self, parts: int, time: int) -> int:
        """Return the time in microseconds at which `parts` have drained, counted from a time in ticks."""
        return (time - parts // -self.n) * self.tick
