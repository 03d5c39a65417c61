# Generated from src/headgate/leases/_async/gate.py by tools/unasync.py. Do not edit.
"""A gate that decides calls for hot keys from chunks of units."""

from __future__ import annotations

import logging

from headgate._concurrency import call_later
from headgate.costs import Costs
from headgate.errors import HeadgateError
from headgate.keys import Key
from headgate.leases.chunks import ChunkBook, Identity
from headgate.stores.base import Answer, Gate, Receipts
from headgate.stores.request import Request

logger = logging.getLogger("headgate")


class LeasedGate:
    """A gate that takes chunks from another gate.

    Args:
        gate: The gate of the limiter's rules, which allow for the lease.
        book: The chunks of this process.
    """

    _call_later = staticmethod(call_later)

    def __init__(self, gate: Gate, book: ChunkBook) -> None:
        self._gate = gate
        self._book = book

    def decide(self, request: Request) -> Answer:
        identity = self._book.identity_of(request)
        if identity is None:
            return self._gate.decide(request)
        cost: int = request.cost if type(request.cost) is int else request.cost[0]
        answer = self._book.take(identity, cost)
        return self._decide_at_store(request, identity, cost) if answer is None else answer

    def _decide_at_store(self, request: Request, identity: Identity, cost: int) -> Answer:
        """Take a chunk that includes the call, or only the call."""
        units = self._book.request_units(identity, cost)
        if units:
            granted = self._take_chunk(request, identity, cost, units)
            if granted is not None:
                return granted
        answer = self._gate.decide(request)
        self._book.decided(identity, cost, answer[0])
        return answer

    def _take_chunk(self, request: Request, identity: Identity, cost: int, units: int) -> Answer | None:
        book = self._book
        costs = (units,) * len(request.quotas) if request.quotas else units
        wanted = Request("hold", request.key, costs, request.tier, None, request.quotas)
        sent, granted = book.now(), None
        try:
            decision, receipts = self._gate.decide(wanted)
            if receipts is not None and not decision.degraded:
                granted = book.granted(identity, cost, units, sent, decision, receipts)
        finally:
            book.answered(identity)
        if granted is not None:
            self._start_timer()
        elif decision.degraded and receipts is not None:
            self._gate.refund(receipts, units, None)  # the failure policy took it; it decides call by call
        elif receipts is not None:
            self.return_ended()  # late
        return granted

    def _start_timer(self, fired: int = 0) -> None:
        """Start a timer that returns the rests of chunks when they end; one serves all chunks."""
        timer = self._book.timer(fired)
        if timer is not None:
            pause, time = timer
            # With this object as an argument, the rests are returned even if the limiter is gone.
            self._call_later(pause, self._on_timer, time, self)

    def _on_timer(self, time: int, _: LeasedGate) -> None:
        self.return_ended()
        self._start_timer(time)

    def return_ended(self) -> None:
        """Return the rests of all chunks that are over to the store."""
        for receipts, rest in self._book.collect():
            try:
                self._gate.refund(receipts, rest, None)
            except HeadgateError as error:  # as after a crash, they count until they expire
                logger.warning("the rest of a lease, %d units, could not be returned: %s", rest, error)

    def close(self) -> None:
        """Return the rests of all chunks, and take no more."""
        self._book.stop()
        self.return_ended()

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self._gate.refund(receipts, cost, now)

    def reset(self, key: Key | None) -> None:
        # A chunk of this process must not outlive its charge, whether it was granted before or during the reset.
        self._book.stop()
        try:
            self.return_ended()
            self._gate.reset(key)
        finally:
            self._book.resume()
