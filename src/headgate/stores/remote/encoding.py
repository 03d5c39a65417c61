"""The interface between a gate and a network store's encoding of requests and replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from headgate.costs import Costs
from headgate.errors import HeadgateError, StoreConflict
from headgate.keys import Key
from headgate.stores.base import Answer, Receipts
from headgate.stores.remote.peer import FAILURES
from headgate.stores.request import Request

T = TypeVar("T")

EncodedRequest = tuple[Any, Callable[[Any], T]]
"""A request for the engine (`None`: there is nothing to refund), and a function that decodes the reply."""


class RequestEncoder(Protocol):
    """Encodes the operations of a limiter's gate."""

    def decide(self, request: Request) -> EncodedRequest[Answer]:
        """Encode a request for a decision."""

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        """Encode a refund."""

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        """Encode a reset of a key."""


def decode(name: str, decoder: Callable[[Any], T], reply: Any) -> T:
    """Decode a reply of the server `name`.

    Raises:
        HeadgateError: The error that the reply reports; StoreConflict if the reply is invalid.
    """
    try:
        return decoder(reply)
    except HeadgateError:  # some of which are a ValueError
        raise
    except FAILURES as error:
        raise StoreConflict(f"{name} sent an invalid reply: {reply!r:.80}") from error


def release_request(
    encoder: RequestEncoder, decoder: Callable[[Any], Answer], request: Request, reply: Any
) -> Any:
    """Return the request that releases a hold, given the reply to the hold; `None` if it took nothing."""
    try:
        receipts = decoder(reply)[1]
        return None if receipts is None else encoder.refund(receipts, request.cost, request.now)[0]
    except (HeadgateError, *FAILURES):
        return None  # nothing was taken, or the reply is invalid and its caller no longer waits
