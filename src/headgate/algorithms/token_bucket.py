"""Admitting at a steady rate, with bursts.

The bucket is kept upside down: `level` is what has been taken and drains away, so a fresh bucket is at 0. To stay in
whole numbers, with limit/period reduced to n/d per tick, a unit is d small parts and n of them drain per tick: no
division, no drift. A tick is 1 us, or 1 ms when the period is over an hour, which keeps d below 2^35.

State: birth, level, time in ticks, refunded, n, d, burst.

The last three are the *shape* that the level was measured in. A call with another shape (a changed limit, another tier)
converts the level, rounding against the caller. It may then be above the caller's own capacity, and is kept so: cut off at
it, callers could get rid of what they owe by changing between tiers. But a state that has drained away in its own shape is
fresh for every caller: a store may have forgotten it by then, and no caller must be able to tell. A level that is more than
can be counted in the caller's shape stays above its capacity until then.

So in any span no more is admitted than the burst of its last call and the largest rate of its calls allow: between two
charges the level drains at the rate of one of their quotas, and the last of them was within its own burst.

`refunded` is the total ever given back to this state. It tells overlapping holds apart: what one hold gave back must not
be taken for what has drained away under another. Before it leaves the exact range the state is given a new birth, so that
receipts from before give back nothing.

A hold that is released before anything else happens to the state leaves no trace: the state is then what it was before,
with the time it had. Otherwise a clock that goes back later would find a bucket that has drained further than without the
hold. For the same reason giving back never moves the time forward. But once something else has been charged or given back,
the time stays. Put back below the time of a charge that still counts, it would let a clock that goes back give back an
older hold as if nothing of it had drained since.
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
        burst: The most units at once.
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
        # Nothing is written, so the state keeps its shape, and is fresh as soon as it is so in one of the two.
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
            # Units of another shape stay where they are, and drain away: no one could say how long to wait for both.
            return self.decide(state, now, cost, birth)
        after, verdict = moved(self, state, receipt, now, cost, birth)
        if state is None or verdict.retry_after_us is None:
            return after, verdict
        # From some time on what drains is what would be given back, so waiting for that gains nothing. Then the wait is as
        # long as if nothing were given back.
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
        # What has drained since came first out of what was there before the hold and has not been given back since, then
        # out of the units that stay charged, and only then out of those that are given back.
        gone = n * (now - at) - max(0, level_before - (refunded - refunded_before)) - (held - cost) * d
        back = min(left, max(0, cost * d - max(0, gone)))
        if left == back:
            return None
        if cost == held and (level, time, refunded) == (level_before + held * d, at, refunded_before):
            # Nothing has happened since the hold: back to the state before it.
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
        """Return birth, level, time and total refunded as they are now, in this shape."""
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
            # Receipts name units of the other shape: they must not be given back in this one.
            old_birth, refunded = birth, 0
        level -= self.n * (now - time)
        if level <= 0:
            return birth, 0, now, 0
        return old_birth, level, now, refunded

    def _remaining(self, level: int) -> int:
        return max(0, self.burst * self.d - level) // self.d

    def _drained_at(self, parts: int, time: int) -> int:
        """Return when so many small parts, counted from a time in ticks, will have drained away in this shape."""
        return (time - parts // -self.n) * self.tick
