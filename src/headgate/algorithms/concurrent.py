"""A limit of units held at once.

State: birth, the latest time at which a lease began or was renewed, then end, number and units of each lease, in the order
of their ends. A lease counts until its end. Its number is the birth in the request that took it, which is unique, so a
receipt identifies the lease. All leases of a state end after its latest time: ended leases were removed then.

Renewing a lease moves its end, never to an earlier time, and changes nothing else: a receipt stays valid, and a repeated or
late renewal is harmless. It takes no units, so the limit does not matter. A lease cannot be renewed after its end, or after
it was given back.

If a clock goes back, a lease still begins at the latest time. Otherwise it would be too short once the clock is right again.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.algorithms.base import Limited, Receipt, State, check_countable, moved, refused_move
from headgate.decision import Verdict

_HEADER = 2


@dataclass(frozen=True, slots=True)
class Concurrent(Limited):
    """The places of one quota.

    Attributes:
        lease: Microseconds until a lease ends that is not renewed.
    """

    lease: int

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        live = self._live(state, now, birth)
        count = sum(live[4::3])
        if cost and count + cost > self.limit:
            retry_after = self.free_at(state, now, count + cost - self.limit) - now if self.limit else None
            return state, Verdict(
                False, self.limit, max(0, self.limit - count), retry_after, _reset_after(live, now)
            )
        after = self._taken(live, cost, birth) if cost else live
        verdict = Verdict(True, self.limit, max(0, self.limit - count - cost), None, _reset_after(after, now))
        return after if cost else state, verdict

    def move(
        self, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
    ) -> tuple[State | None, Verdict]:
        """Renew the lease of a receipt; with a cost of 0, give it back."""
        if not cost:
            return moved(self, state, receipt, now, 0, birth)
        live = self._live(state, now, 0)
        born, number, _ = receipt
        if live[0] != born or number not in live[3::3]:
            return refused_move(self, state, now, None)
        place = _HEADER + 3 * live[3::3].index(number)
        end = max(live[place], live[1] + self.lease)
        after = _with_lease((*live[:place], *live[place + 3 :]), end, number, live[place + 2])
        remaining = max(0, self.limit - sum(live[4::3]))
        return after, Verdict(True, self.limit, remaining, None, _reset_after(after, now))

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State:
        live = self._live(state, now, birth)
        check_countable(sum(live[4::3]), cost, self.name)
        return self._taken(live, cost, birth)

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        (number,) = set(after[3::3]).difference(() if before is None else before[3::3])
        return after[0], number, cost

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        birth, number, held = receipt
        if state is None or state[0] != birth or number not in state[3::3]:
            return state
        place = _HEADER + 3 * state[3::3].index(number)
        units = state[place + 2] - min(cost, held)
        lease = (state[place], number, units) if units > 0 else ()
        after = (*state[:place], *lease, *state[place + 3 :])
        return after if len(after) > _HEADER else None

    def read(self, state: State, now: int) -> int:
        return max(now, state[1])

    def fresh_at(self, state: State) -> int:
        return state[-3]

    def held(self, state: State | None, now: int) -> int:
        """Return the units of all live leases."""
        return sum(self._live(state, now, 0)[4::3])

    def free_at(self, state: State | None, now: int, units: int) -> int:
        """Return the time at which at least `units` are free again."""
        live = self._live(state, now, 0)
        for end, held in zip(live[2::3], live[4::3], strict=True):
            units -= held
            if units <= 0:
                return end
        raise AssertionError("more units to free than are held: a cost above the limit was not refused")

    def _live(self, state: State | None, now: int, birth: int) -> State:
        """Return the state without ended leases, at the effective time; a new state if no lease is left."""
        if state is None:
            return birth, now
        now = self.read(state, now)
        first = _HEADER
        while first < len(state) and state[first] <= now:
            first += 3
        if first == len(state):
            return birth, now
        return state[0], now, *state[first:]

    def _taken(self, live: State, cost: int, birth: int) -> State:
        return _with_lease(live, live[1] + self.lease, birth, cost)


def _with_lease(live: State, end: int, number: int, units: int) -> State:
    place = len(live)
    while place > _HEADER and live[place - 3] > end:  # only if the rule had a longer lease before
        place -= 3
    return *live[:place], end, number, units, *live[place:]


def _reset_after(live: State, now: int) -> int:
    return live[-3] - now if len(live) > _HEADER else 0
