"""A gate that decides calls for hot keys from chunks of units."""

from __future__ import annotations

import logging

from headgate._concurrency import call_later_async
from headgate.costs import Costs
from headgate.errors import HeadgateError
from headgate.keys import Key
from headgate.leases.chunks import ChunkBook, Identity
from headgate.stores.base import Answer, AsyncGate, Receipts
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

_SLACK = 0.001
"""Seconds after the end of a chunk until its rest is returned, so that the timer does not come early."""


class AsyncLeasedGate:
    """A gate that takes chunks from another gate.

    Args:
        gate: The gate of the limiter's rules, which allow for the lease.
        book: The chunks of this process.
    """

    _call_later = staticmethod(call_later_async)

    def __init__(self, gate: AsyncGate, book: ChunkBook) -> None:
        self._gate = gate
        self._book = book
        self._timer_ends = 0

    async def decide(self, request: Request) -> Answer:
        identity = self._book.identity_of(request)
        if identity is None:
            return await self._gate.decide(request)
        cost = single_cost(request)
        if not cost:
            return await self._gate.decide(request)
        answer = self._book.take(identity, cost)
        return await self._decide_at_store(request, identity, cost) if answer is None else answer

    async def _decide_at_store(self, request: Request, identity: Identity, cost: int) -> Answer:
        """Take a chunk that includes the call, or only the call."""
        units = self._book.request_units(identity, cost)
        if units:
            granted = await self._take_chunk(request, identity, cost, units)
            if granted is not None:
                return granted
        answer = await self._gate.decide(request)
        self._book.decided(identity, cost, answer[0])
        return answer

    async def _take_chunk(self, request: Request, identity: Identity, cost: int, units: int) -> Answer | None:
        sent = self._book.now()
        decision = receipts = None
        try:
            costs = (units,) * len(request.quotas) if request.quotas else units
            decision, receipts = await self._gate.decide(
                Request("hold", request.key, costs, request.tier, None, request.quotas)
            )
        finally:
            if receipts is None:
                self._book.not_granted(identity)
        if decision.degraded or receipts is None:
            return None
        answer = self._book.granted(identity, cost, units, sent, decision, receipts)
        self._start_timer()
        return answer

    def _start_timer(self) -> None:
        """Let the rests of chunks be returned when they end; one timer serves all chunks."""
        pause, now = self._book.next_end(), self._book.now()
        if pause is None or now < self._timer_ends:
            return
        # If the timer is lost with its event loop, the next chunk starts another one.
        self._timer_ends = now + int((pause + 2 * _SLACK) * 1e9)
        _timed.add(self)
        self._call_later(pause + _SLACK, self._return_ended)

    async def _return_ended(self) -> None:
        _timed.discard(self)
        self._timer_ends = 0
        await self.return_chunks(everything=False)
        self._start_timer()

    async def return_chunks(self, *, everything: bool = True) -> None:
        """End all chunks, or those that are over, and return their rests to the store."""
        for receipts, rest in self._book.collect(everything=everything):
            try:
                await self._gate.refund(receipts, rest, None)
            except HeadgateError as error:  # as after a crash, they count until they expire
                logger.warning("the rest of a lease, %d units, could not be returned: %s", rest, error)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._gate.refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        await self.return_chunks()  # its own chunks must not outlive their charge
        await self._gate.reset(key)


def single_cost(request: Request) -> int:
    """Return the cost of a call if it is one positive number for all rules; 0 otherwise."""
    cost = request.cost
    if isinstance(cost, tuple):
        cost = cost[0] if len(set(cost)) == 1 else 0
    return cost if type(cost) is int and cost > 0 else 0


_timed: set[AsyncLeasedGate] = set()
"""Gates with a timer. A timer refers weakly to its gate, but the rests must be returned after the limiter is gone."""
