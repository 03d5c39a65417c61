"""The sliding window: counts in small buckets over the last period. The log has buckets of one microsecond.

State: birth, then index and units of each live bucket, oldest first. Bucket i covers [i*width, (i+1)*width) and counts
while now < i*width + lifetime, where the lifetime is

- period + width in a strict window: the last instant of the bucket may be inside the period until then, so no interval of
  the length of the period ever contains more than the limit;
- the period in a lenient window: a unit may expire up to one width early;
- the period in a log, with a width of 1: units expire exactly on time. Its state is as large as its limit. Only `record`
  can make it larger, up to `MAX_ENTRIES`: in a full log the newest bucket moves to the current time and takes the new
  units.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.algorithms.base import Limited, Receipt, State, check_countable
from headgate.decision import Verdict

MAX_ENTRIES = 1000
"""The largest number of buckets in the state of a log with a smaller limit; also the maximum of shared stores."""


@dataclass(frozen=True, slots=True)
class SlidingWindow(Limited):
    """The sliding window of one quota.

    Attributes:
        width: Length of a bucket in microseconds.
        lifetime: Microseconds after its start during which a bucket counts.
    """

    width: int
    lifetime: int

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        live = self._live(state, now, birth)
        count = sum(live[2::2])
        if cost and count + cost > self.limit:
            retry_after = self._free_at(live, count + cost - self.limit) - now if self.limit else None
            return state, Verdict(
                False, self.limit, max(0, self.limit - count), retry_after, self._reset_after(live, now)
            )
        after = self._charged(live, now, cost) if cost else live
        verdict = Verdict(
            True, self.limit, max(0, self.limit - count - cost), None, self._reset_after(after, now)
        )
        return after if cost else state, verdict

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State | None:
        live = self._live(state, now, birth)
        check_countable(sum(live[2::2]), cost, self.name)
        return self._charged(live, now, cost)

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        return after[0], after[-2], cost

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        birth, index, held = receipt
        if state is None or state[0] != birth:
            return state
        after: list[int] = []
        for i, units in zip(state[1::2], state[2::2], strict=True):
            kept = units - min(cost, held) if i == index else units
            if kept > 0:
                after += i, kept
        return (birth, *after) if after else None

    def read(self, state: State, now: int) -> int:
        return max(now, state[-2] * self.width)

    def fresh_at(self, state: State) -> int:
        return state[-2] * self.width + self.lifetime

    def _live(self, state: State | None, now: int, birth: int) -> State:
        """Return the state without expired buckets; a new state if no bucket is left."""
        if state is None:
            return (birth,)
        now = self.read(state, now)
        first = 1
        while first < len(state) and state[first] * self.width + self.lifetime <= now:
            first += 2
        if first == len(state):
            return (birth,)
        return state if first == 1 else (state[0], *state[first:])

    def _charged(self, live: State, now: int, cost: int) -> State:
        index = now // self.width
        if len(live) > 1 and index <= live[-2]:
            return (*live[:-1], live[-1] + cost)
        if self.width == 1 and len(live) > 2 * max(MAX_ENTRIES, self.limit):  # full, so this is a record
            return (*live[:-2], index, live[-1] + cost)
        return (*live, index, cost)

    def _free_at(self, live: State, units: int) -> int:
        """Return the time at which `units` are free."""
        for index, count in zip(live[1::2], live[2::2], strict=True):
            units -= count
            if units <= 0:
                return index * self.width + self.lifetime
        raise AssertionError("more units to free than are counted: a cost above the limit was not refused")

    def _reset_after(self, live: State, now: int) -> int:
        return live[-2] * self.width + self.lifetime - now if len(live) > 1 else 0
