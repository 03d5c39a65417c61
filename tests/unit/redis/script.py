"""`gate.lua` in Python: a fake server with slots, for tests of operations."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from redis.crc import key_slot

from headgate.algorithms import (
    Algorithm,
    Calendar,
    Concurrent,
    FixedWindow,
    Receipt,
    SlidingWindow,
    State,
    TokenBucket,
    decide_all,
)
from headgate.decision import Verdict
from headgate.errors import CostTooHigh, StoreUnavailable
from headgate.quota import MAX_UNITS
from headgate.stores.redis.codec import Operation, Reply, ScriptCall


class FakeServer:
    """Answers calls like the script; fails for `broken_slots`."""

    def __init__(self, now: int = 1_700_000_000_000_000, *, in_cluster: bool = True) -> None:
        self.now = now
        self.in_cluster = in_cluster
        self.states: dict[bytes, State] = {}
        self.requests: list[ScriptCall] = []
        self.broken_slots: set[int] = set()

    def call(self, request: ScriptCall) -> Reply:
        slot, *others = {key_slot(key) for key in request.keys}
        assert not (others and self.in_cluster), "a call must not reach for several slots"
        self.requests.append(request)
        if slot in self.broken_slots:
            raise StoreUnavailable(f"slot {slot} is gone")
        operation, size, at, cost, birth = map(int, struct.unpack_from("<BHddd", request.body))
        assert size == len(request.keys)
        now = self.now if at < 0 else at
        if operation == Operation.RESET:
            for key in request.keys:
                self.states.pop(key, None)
            return 0
        algorithms = list(_algorithms(request.body, size))
        states = [self.states.get(key) for key in request.keys]
        costs, receipts = [cost] * size, [()] * size
        if cost < 0:
            costs, receipts = _own(request.body, size)
        if operation == Operation.REFUND:
            return self._refund(request, algorithms, costs, receipts, now)
        if operation == Operation.RECORD:
            return self._record(request, algorithms, costs, now, birth)
        after, verdicts = decide_all(algorithms, states, now, costs, birth, [own or None for own in receipts])
        reply = b"".join(pack_verdict(a, v) for a, v in zip(algorithms, verdicts, strict=True))
        if operation == Operation.PEEK or not all(verdict.allowed for verdict in verdicts):
            return reply
        self._save(request, after)
        if operation == Operation.HOLD:
            for algorithm, before, state, units in zip(algorithms, states, after, costs, strict=True):
                if units:
                    assert state is not None
                    receipt = algorithm.receipt(before, state, units)
                    own = receipt[: 5 if isinstance(algorithm, TokenBucket) else 2]
                    reply += struct.pack(f"<{len(own)}q", *own)
        return reply

    def _record(
        self, request: ScriptCall, algorithms: list[Algorithm], costs: list[int], now: int, birth: int
    ) -> Reply:
        after = []
        for number, (key, algorithm, cost) in enumerate(zip(request.keys, algorithms, costs, strict=True), 1):
            state = self.states.get(key)
            try:
                after.append(algorithm.record(state, now, cost, birth) if cost else state)
            except CostTooHigh as error:
                parts = algorithm.d if isinstance(algorithm, TokenBucket) else 1
                return [number, MAX_UNITS - error.capacity * parts]
        self._save(request, after)
        return 0

    def _refund(
        self,
        request: ScriptCall,
        algorithms: list[Algorithm],
        costs: list[int],
        receipts: list[Receipt],
        now: int,
    ) -> Reply:
        after = [
            algorithm.refund(self.states.get(key), receipt, cost, now)
            for key, algorithm, receipt, cost in zip(request.keys, algorithms, receipts, costs, strict=True)
        ]
        self._save(request, after)
        return 0

    def _save(self, request: ScriptCall, states: Any) -> None:
        for key, state in zip(request.keys, states, strict=True):
            if state is None:
                self.states.pop(key, None)
            else:
                self.states[key] = state


def _algorithms(body: bytes, size: int) -> Iterator[Algorithm]:
    for i in range(size):
        kind, a, b, c, d = map(int, struct.unpack_from("<Bdddd", body, 27 + 33 * i))
        if kind == 1:
            yield FixedWindow(str(i), a, b)
        elif kind == 2:
            yield SlidingWindow(str(i), a, b, c)
        elif kind == 3:
            yield TokenBucket(str(i), a, b, c, d)
        elif kind == 4:
            yield Concurrent(str(i), a, b)
        else:
            assert c - b > 20 * 3_600_000_000, "the windows of these tests are days"
            yield Calendar(str(i), a, "day", "UTC")


def _own(body: bytes, size: int) -> tuple[list[int], list[Receipt]]:
    """Return cost and receipt of each rule."""
    costs: list[int] = []
    receipts: list[Receipt] = []
    place = struct.calcsize("<BHddd") + size * struct.calcsize("<Bdddd")
    for _ in range(size):
        cost, numbers = struct.unpack_from("<dB", body, place)
        costs.append(int(cost))
        receipts.append(tuple(map(int, struct.unpack_from(f"<{numbers}d", body, place + 9))))
        place += 9 + 8 * numbers
    assert place == len(body)
    return costs, receipts


def pack_verdict(algorithm: Algorithm, verdict: Verdict) -> bytes:
    """Return a verdict in the format of the script; times of a bucket are counted in ticks from a little before now."""
    tick = algorithm.tick if isinstance(algorithm, TokenBucket) else 1
    times = (verdict.retry_after_us, verdict.reset_after_us)
    lag = next((time % tick for time in times if time), 0) - (tick if tick > 1 else 0)
    flags = verdict.allowed + 2 * (times[0] is not None) + 4 * (times[1] is not None)
    packed = [(time - lag) // tick if time else 0 for time in times]
    return struct.pack("<Bqqqq", flags, verdict.remaining, *packed, lag)
