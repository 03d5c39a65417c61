"""Budgets inside clients that use httpx: `httpx.AsyncClient(transport=AsyncBudgetTransport(budget))`."""

from __future__ import annotations

from headgate._extras import needing
from headgate.llm.transports import (
    AsyncBudgetTransportBase,
    AsyncMeteredStream,
    BudgetTransportBase,
    MeteredStream,
)

with needing("headgate.llm.httpx", "llm"):
    import httpx

__all__ = ["AsyncBudgetTransport", "BudgetTransport"]


class HttpxStream(MeteredStream, httpx.SyncByteStream):
    """A metered stream of httpx."""


class AsyncHttpxStream(AsyncMeteredStream, httpx.AsyncByteStream):
    """A metered stream of httpx."""


class BudgetTransport(BudgetTransportBase, httpx.BaseTransport):
    """Hold the estimated usage of each model call of an `httpx.Client`, and settle it at its usage.

    Other requests pass unchanged. A call that the budget refuses is not sent: it is answered with 429, or with 400 if it
    can never be admitted, so that the client raises its usual exception. Responses are requested without compression,
    because their usage is read.

    Args:
        budget: The `Budget`.
        transport: The transport that sends the requests; by default `httpx.HTTPTransport()`.
    """

    httpx = httpx
    stream = HttpxStream


class AsyncBudgetTransport(AsyncBudgetTransportBase, httpx.AsyncBaseTransport):
    """Hold the estimated usage of each model call of an `httpx.AsyncClient`, and settle it at its usage.

    Other requests pass unchanged. A call that the budget refuses is not sent: it is answered with 429, or with 400 if it
    can never be admitted, so that the client raises its usual exception. Responses are requested without compression,
    because their usage is read.

    Args:
        budget: The `AsyncBudget`.
        transport: The transport that sends the requests; by default `httpx.AsyncHTTPTransport()`.
    """

    httpx = httpx
    stream = AsyncHttpxStream
