"""A limiter's rules on a network store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from headgate._checks import Unpicklable
from headgate.costs import Costs
from headgate.keys import Key
from headgate.stores.base import Answer, Receipts
from headgate.stores.remote.encoding import EncodedRequest, RequestEncoder, decode, release_request
from headgate.stores.request import Request


class AsyncRemoteGate(Unpicklable):
    """A limiter's rules on a network store.

    A caller may be cancelled or interrupted at any time. Its request then counts as charged if it was sent. If a task is
    cancelled, its hold is released when the reply arrives, and settlements and refunds are sent in any case.

    Args:
        name: The server's name in messages.
        encoder: Encodes requests and decodes replies.
        engine: Sends them.
        deadline: Seconds after which a call fails.
    """

    def __init__(self, name: str, encoder: RequestEncoder, engine: Any, deadline: float) -> None:
        self._name = name
        self._encoder = encoder
        self._engine = engine
        self._deadline = deadline

    async def decide(self, request: Request) -> Answer:
        encoded, decoder = self._encoder.decide(request)
        reply = await self._engine.call(
            encoded,
            monotonic() + self._deadline,
            # begin async only
            request.is_completed,
            partial(self._release, decoder, request) if request.is_given_up else None,
            # end async only
        )
        return decode(self._name, decoder, reply)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._send(self._encoder.refund(receipts, cost, now))

    async def reset(self, key: Key | None) -> None:
        await self._send(self._encoder.reset(key))

    async def _send(self, encoded: EncodedRequest[None]) -> None:
        """Send a request, if there is one, even if the caller is cancelled."""
        request, decoder = encoded
        if request is not None:
            reply = await self._engine.call(
                request,
                monotonic() + self._deadline,
                # begin async only
                True,
                # end async only
            )
            decode(self._name, decoder, reply)

    # begin async only
    def _release(self, decoder: Callable[[Any], Answer], request: Request, reply: Any) -> None:
        """Release a hold whose caller was cancelled or interrupted."""
        refund = release_request(self._encoder, decoder, request, reply)
        if refund is not None:
            self._engine.tell(refund, monotonic() + self._deadline)

    # end async only
