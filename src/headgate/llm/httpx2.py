"""Budgets inside clients that use httpx2: `httpx2.AsyncClient(transport=AsyncBudgetTransport(budget))`."""

from __future__ import annotations

from headgate._extras import needing
from headgate.llm.transports import (
    AsyncBudgetTransportBase,
    AsyncMeteredStream,
    BudgetTransportBase,
    MeteredStream,
)

with needing("headgate.llm.httpx2", "llm-httpx2"):
    import httpx2

__all__ = ["AsyncBudgetTransport", "BudgetTransport"]


class Httpx2Stream(MeteredStream, httpx2.SyncByteStream):  # type: ignore[misc]
    """A metered stream of httpx2."""


class AsyncHttpx2Stream(AsyncMeteredStream, httpx2.AsyncByteStream):  # type: ignore[misc]
    """A metered stream of httpx2."""


class BudgetTransport(BudgetTransportBase, httpx2.BaseTransport):  # type: ignore[misc]
    """Hold the estimated usage of each model call of an `httpx2.Client`, and settle it at its usage.

    Other requests pass unchanged. A call that the budget refuses is not sent: it is answered with 429, or with 400 if it
    can never be admitted, so that the client raises its usual exception. Responses are requested without compression,
    because their usage is read.

    Args:
        budget: The `Budget`.
        transport: The transport that sends the requests; by default `httpx2.HTTPTransport()`.
    """

    httpx = httpx2
    stream = Httpx2Stream


class AsyncBudgetTransport(AsyncBudgetTransportBase, httpx2.AsyncBaseTransport):  # type: ignore[misc]
    """Hold the estimated usage of each model call of an `httpx2.AsyncClient`, and settle it at its usage.

    Other requests pass unchanged. A call that the budget refuses is not sent: it is answered with 429, or with 400 if it
    can never be admitted, so that the client raises its usual exception. Responses are requested without compression,
    because their usage is read.

    Args:
        budget: The `AsyncBudget`.
        transport: The transport that sends the requests; by default `httpx2.AsyncHTTPTransport()`.
    """

    httpx = httpx2
    stream = AsyncHttpx2Stream
