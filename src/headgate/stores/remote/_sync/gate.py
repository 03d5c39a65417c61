# Generated from src/headgate/stores/remote/_async/gate.py by tools/unasync.py. Do not edit.
"""A limiter's rules on a network store."""

from __future__ import annotations

from time import monotonic
from typing import Any

from headgate._checks import Unpicklable
from headgate.costs import Costs
from headgate.keys import Key
from headgate.stores.base import Answer, Receipts
from headgate.stores.remote.encoding import EncodedRequest, RequestEncoder, decode
from headgate.stores.request import Request


class RemoteGate(Unpicklable):
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

    def decide(self, request: Request) -> Answer:
        encoded, decoder = self._encoder.decide(request)
        reply = self._engine.call(
            encoded,
            monotonic() + self._deadline,
        )
        return decode(self._name, decoder, reply)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self._send(self._encoder.refund(receipts, cost, now))

    def reset(self, key: Key | None) -> None:
        self._send(self._encoder.reset(key))

    def _send(self, encoded: EncodedRequest[None]) -> None:
        """Send a request, if there is one, even if the caller is cancelled."""
        request, decoder = encoded
        if request is not None:
            reply = self._engine.call(
                request,
                monotonic() + self._deadline,
            )
            decode(self._name, decoder, reply)
