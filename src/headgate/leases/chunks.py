"""The chunks of a limiter in this process: their time, size and remaining units. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from headgate._fork import watch
from headgate.algorithms import algorithm_for
from headgate.algorithms.base import Receipts
from headgate.clock import WallClock
from headgate.decision import Decision
from headgate.errors import ConfigError
from headgate.keys import key_picker
from headgate.quota import MILLISECOND, Quotas, format_period, period_from
from headgate.rules import Rule, leased
from headgate.stores.base import Answer, AnyStore, Guarantees, while_locked
from headgate.stores.request import Request

Identity = tuple[Hashable, str | None, Quotas | None]
"""The key, tier and quotas of a call: the calls that one chunk may decide."""

SHORTEST_PERIODS = 20
"""A lease is at most the shortest period of the rules, divided by this."""

HOT_UNITS = 10
"""A key is hot if this process expects to need at least this many units of it during a lease."""

MAX_HOT_KEYS = 1_000
"""The largest number of keys whose use is measured at a time. Further keys are decided at the store."""

LEASE_LOSSES = (
    "with a lease, the chunks of a crashed process count until they expire; after a reset, or if the store loses writes, "
    "its clock is set forward or a virtual machine is stopped, the units of open chunks may be admitted in addition"
)

DRIFT = 1_000
"""The clocks of this process and of the store may differ in speed by one part in this many."""


SLACK_NS = 1_000_000
"""Delay between the end of a chunk and the return of its rest, so that the timer does not fire early."""


# Nanoseconds since the machine was started; including the time of suspension, if the system supports this.
elapsed_ns: Callable[[], int] = time.monotonic_ns
if hasattr(time, "CLOCK_BOOTTIME"):
    elapsed_ns = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


@dataclass(slots=True, eq=False)
class Chunk:
    """Units of one identity that the store has charged and this process may admit.

    Attributes:
        left: The units that were not used yet; 0 when it has ended.
        ends: The time after which they must not be used, on the clock of the book.
        answer: The answer for the calls that it decides.
        receipts: Receipts to return the rest.
        counted: The units that were left when its use was last added to the demand.
    """

    left: int
    ends: int
    answer: Answer
    receipts: Receipts
    counted: int


@dataclass(slots=True, eq=False)
class Demand:
    """The use of one identity in this process.

    Attributes:
        since: Start of the current measurement.
        units: Units admitted since then.
        expected: Units per lease, from the measurement before.
        remaining: The units that the store had left at its last answer.
        asks_until: While the time is before this one, a requested chunk has not been granted or refused yet. It ends
            automatically, because a signal handler may raise in the request.
    """

    since: int
    units: int = 0
    expected: int = 0
    remaining: int = 0
    asks_until: int = 0


class ChunkBook:
    """All chunks of a limiter in this process, and the demand for each key.

    Checking the time and taking units from a chunk is one step under one lock. The reading of the clock in this step is the
    instant of admission, whatever pauses follow.

    Args:
        rules: The limiter's rules, at least one; all have the same lease.
        now: The clock, in nanoseconds; it must not stop while the machine is suspended.
    """

    def __init__(self, rules: tuple[Rule, ...], now: Callable[[], int] = elapsed_ns) -> None:
        self.lease_ns = min(rule.lease_us for rule in rules) * 1_000
        self.now = now
        self._pick = key_picker(rules)
        self._window_rules = [i for i, rule in enumerate(rules) if rule.kind in ("fixed_window", "calendar")]
        self.after_fork_in_child()
        watch(self)

    def after_fork_in_child(self) -> None:
        """Forget all chunks: they belong to the parent."""
        self._lock = threading.RLock()
        self._open: dict[Identity, Chunk] = {}
        self._ended: list[tuple[Receipts, int]] = []
        self._demand: dict[Identity, Demand] = {}
        self._forgets_at = 0
        self._stops = 0
        self._resumed = 0
        self._timer_at = 0

    def identity_of(self, request: Request) -> Identity | None:
        """Return the identity of a call that a chunk may decide; `None` for any other, as with a cost by unit.

        Raises:
            ConfigError: The key does not fit the rules.
        """
        if request.operation != "hit" or request.now is not None or request.replaces is not None:
            return None
        key, cost = request.key, request.cost
        if type(cost) is tuple:
            cost = cost[0] if len(set(cost)) == 1 else 0
        if type(cost) is not int or cost <= 0:
            return None
        return key if type(key) is str else self._pick(key), request.tier, request.quotas

    def take(self, identity: Identity, cost: int) -> Answer | None:
        """Take units from the open chunk, and return the answer; `None` if it is missing, over or too small."""
        chunk = self._open.get(identity)
        return None if chunk is None else while_locked(self._lock, self._take, chunk, cost)

    def _take(self, chunk: Chunk, cost: int) -> Answer | None:
        if cost > chunk.left or self.now() >= chunk.ends:
            return None
        chunk.left -= cost
        return chunk.answer

    def request_units(self, identity: Identity, cost: int) -> int:
        """Return the size of the chunk to request for a call, after which `answered` must be called; 0 for no chunk."""
        return while_locked(self._lock, self._request_units, identity, cost)

    def _request_units(self, identity: Identity, cost: int) -> int:
        now = self.now()
        demand = self._demand_for(identity, now)
        if demand is None or self._stops or now < demand.asks_until:
            return 0
        self._measure(identity, demand, now)
        units = chunk_size(max(demand.expected, demand.units + cost), demand.remaining)
        if units < max(HOT_UNITS, 2 * cost):
            return 0  # if a cost is too large for any chunk, the open chunk stays for smaller calls
        self._end(identity)
        demand.asks_until = now + self.lease_ns
        return units

    def _demand_for(self, identity: Identity, now: int) -> Demand | None:
        """Return the demand for an identity; `None` if too many other keys are in use."""
        if identity not in self._demand:
            if len(self._demand) >= MAX_HOT_KEYS and now >= self._forgets_at:
                self._forget_cold(now)
                self._forgets_at = now + self.lease_ns
            if len(self._demand) >= MAX_HOT_KEYS:
                return None
            self._demand[identity] = Demand(now)
        return self._demand[identity]

    def _measure(self, identity: Identity, demand: Demand, now: int) -> None:
        """Add the use of the open chunk to the demand; begin a new measurement once per lease."""
        chunk = self._open.get(identity)
        if chunk is not None:
            demand.units += chunk.counted - chunk.left
            chunk.counted = chunk.left
        elapsed = now - demand.since
        if elapsed >= self.lease_ns:
            demand.expected = demand.units * self.lease_ns // elapsed
            demand.since, demand.units = now, 0

    def _forget_cold(self, now: int) -> None:
        """Forget identities that were not used for two leases."""
        for identity, demand in list(self._demand.items()):
            is_used = identity in self._open or now < demand.asks_until
            if not is_used and now - demand.since > 2 * self.lease_ns:
                del self._demand[identity]

    def granted(
        self, identity: Identity, cost: int, units: int, sent: int, decision: Decision, receipts: Receipts
    ) -> Answer | None:
        """Open the chunk that was requested at the time `sent`, and take a call's cost from it.

        Returns `None` if the grant came too late to be used; then it is to be returned as a whole.
        """
        return while_locked(self._lock, self._granted, identity, cost, units, sent, decision, receipts)

    def _granted(
        self, identity: Identity, cost: int, units: int, sent: int, decision: Decision, receipts: Receipts
    ) -> Answer | None:
        chunk = Chunk(units, self.end_of(sent, decision), (decision.as_leased(), None), receipts, units)
        demand = self._demand.get(identity)
        if demand is None:  # forked since the request, so the chunk is the parent's
            return None
        demand.remaining = decision.remaining or 0
        if self._stops or sent <= self._resumed or self.now() >= chunk.ends:
            self._ended.append((receipts, units))
            demand.expected = demand.units = 0  # if the store is this slow, chunks do not help
            return None
        self._end(identity)
        chunk.left -= cost
        self._open[identity] = chunk
        return chunk.answer

    def end_of(self, sent: int, decision: Decision) -> int:
        """Return the end of a chunk: one lease after the request was sent, or at the end of a window of its rules."""
        fields = decision.fields
        windows = [1_000 * (fields[index][4] or 0) for index in self._window_rules]
        length = min(self.lease_ns, *windows) if windows else self.lease_ns
        return sent + length * DRIFT // (DRIFT + 1)

    def answered(self, identity: Identity) -> None:
        """Record the end of the request for a chunk, whatever its result."""
        demand = self._demand.get(identity)
        if demand is not None:
            demand.asks_until = 0

    def decided(self, identity: Identity, cost: int, decision: Decision) -> None:
        """Record the answer of the store to a call."""
        demand = self._demand.get(identity)
        if demand is not None:
            # While the store is down, no chunks are requested.
            demand.remaining = 0 if decision.degraded else decision.remaining or 0
            if decision.allowed:
                demand.units += cost

    def stop(self) -> None:
        """End all chunks, and open no others until `resume`; a chunk that was requested before is not used either."""
        while_locked(self._lock, self._stop)

    def _stop(self) -> None:
        self._stops += 1
        for identity in list(self._open):
            self._end(identity)

    def resume(self) -> None:
        """Open chunks again that are requested from now on."""
        while_locked(self._lock, self._resume)

    def _resume(self) -> None:
        self._stops = max(0, self._stops - 1)
        self._resumed = self.now()

    def collect(self) -> list[tuple[Receipts, int]]:
        """End the chunks that are over; return the receipts and the rest of each ended chunk.

        Each rest is returned by exactly one call.
        """
        return while_locked(self._lock, self._collect)

    def _collect(self) -> list[tuple[Receipts, int]]:
        now = self.now()
        for identity in [identity for identity, chunk in self._open.items() if now >= chunk.ends]:
            self._end(identity)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, identity: Identity) -> None:
        """End the open chunk of an identity, if there is one."""
        chunk = self._open.pop(identity, None)
        if chunk is not None:
            self._demand[identity].units += chunk.counted - chunk.left
            if chunk.left:
                self._ended.append((chunk.receipts, chunk.left))
                chunk.left = 0

    def timer(self, fired: int = 0) -> tuple[float, int] | None:
        """Return the seconds until `collect` is due, and its time, if a timer must be started for it.

        Args:
            fired: The time of the timer that has fired, if one has.
        """
        return while_locked(self._lock, self._timer, fired)

    def _timer(self, fired: int) -> tuple[float, int] | None:
        if fired == self._timer_at:
            self._timer_at = 0
        now = self.now()
        due = now if self._ended else min((chunk.ends for chunk in self._open.values()), default=None)
        # A timer that is overdue was lost with its event loop.
        if due is None or now - SLACK_NS < self._timer_at <= due + SLACK_NS:
            return None
        self._timer_at = max(now, due) + SLACK_NS
        return (self._timer_at - now) / 1e9, self._timer_at


def leased_rules(
    rules: tuple[Rule, ...], lease: str | float | timedelta, store: AnyStore
) -> tuple[Rule, ...]:
    """Return the rules of a limiter with a lease.

    Raises:
        ConfigError: The rules or the store do not support leases, or the lease is too long for the rules.
    """
    lease_us = period_from(lease, "lease")
    if store.has_rules or not (store.guarantees.shared and store.guarantees.exact):
        raise ConfigError(
            f"lease= is for exact stores that several processes share, like Redis, and {type(store).__name__} is not one"
        )
    if not isinstance(store.clock, WallClock | None):
        raise ConfigError(
            f"a lease is measured by the machine's clock, and this store has a {type(store.clock).__name__}"
        )
    for rule in rules:
        if rule.kind == "concurrent":
            raise ConfigError(
                f"rule {rule.name!r} is concurrent: its places are held one by one and cannot be leased"
            )
        if rule.kind == "penalty":
            raise ConfigError(
                f"rule {rule.name!r} is a penalty: it counts every refusal, so calls cannot be leased"
            )
        if lease_us * SHORTEST_PERIODS > rule.quota.period_us:
            longest = format_period(rule.quota.period_us // SHORTEST_PERIODS // MILLISECOND * MILLISECOND)
            raise ConfigError(
                f"lease={lease!r} is more than 1/{SHORTEST_PERIODS} of the period of rule {rule.name!r}: "
                f"use at most {longest!r}"
            )
    found = leased(rules, lease_us)
    for rule in found:
        for quota in (rule.quota, *rule.tiers.values()):
            algorithm_for(rule, quota)
    return found


def chunk_size(expected: int, remaining: int) -> int:
    """Return the size of a chunk: the units expected to be used, and at most half of what the store has left.

    So all processes together reserve the remaining units only if they use them, and near the limit chunks shrink until
    every call is decided at the store.
    """
    return min(expected, remaining // 2)


def with_lease(guarantees: Guarantees) -> Guarantees:
    """Return the guarantees of a store for a limiter with a lease."""
    losses = "; ".join(filter(None, (guarantees.may_lose, LEASE_LOSSES)))
    return replace(guarantees, may_lose=losses)
