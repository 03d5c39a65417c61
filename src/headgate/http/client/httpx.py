"""Rate-limited transports for httpx."""

from __future__ import annotations

from typing import Unpack

from headgate import AsyncLimiter, Limiter, Rule
from headgate._checks import check_kind
from headgate._extras import needing
from headgate._steps import run, run_async
from headgate.http.client.options import OutboundArguments, OutboundOptions

with needing("headgate.http.client", "httpx"):
    import httpx


class RateLimitTransport(httpx.BaseTransport):
    """A transport that delays requests to stay within limits: `httpx.Client(transport=RateLimitTransport("10/s"))`.

    For the other options see `OutboundOptions`.

    Args:
        limit: The caller's own limit, a `Limiter` or a rule.
        transport: The transport that sends the requests; by default `httpx.HTTPTransport()`.
    """

    def __init__(
        self,
        limit: Limiter | Rule | str | None = None,
        transport: httpx.BaseTransport | None = None,
        **options: Unpack[OutboundArguments],
    ) -> None:
        self._options = OutboundOptions(Limiter, limit, **options)
        check_kind("transport=", transport, httpx.BaseTransport | None, "an httpx.BaseTransport")
        self._transport = transport or httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; see `OutboundOptions.exchange`."""
        key = self._options.key(request) if self._options.key else request.url.host
        response: httpx.Response = run(
            self._options.exchange(
                key,
                request.method,
                isinstance(request.stream, httpx.ByteStream),
                lambda: self._transport.handle_request(request),
                self._options.clock.sleep,
                _read,
            )
        )
        return response

    def close(self) -> None:
        """Close the underlying transport."""
        self._transport.close()


class AsyncRateLimitTransport(httpx.AsyncBaseTransport):
    """Like `RateLimitTransport`, but for `httpx.AsyncClient`."""

    def __init__(
        self,
        limit: AsyncLimiter | Rule | str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[OutboundArguments],
    ) -> None:
        self._options = OutboundOptions(AsyncLimiter, limit, **options)
        check_kind("transport=", transport, httpx.AsyncBaseTransport | None, "an httpx.AsyncBaseTransport")
        self._transport = transport or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; see `OutboundOptions.exchange`."""
        key = self._options.key(request) if self._options.key else request.url.host
        response: httpx.Response = await run_async(
            self._options.exchange(
                key,
                request.method,
                isinstance(request.stream, httpx.ByteStream),
                lambda: self._transport.handle_async_request(request),
                self._options.clock.asleep,
                _aread,
            )
        )
        return response

    async def aclose(self) -> None:
        """Close the underlying transport."""
        await self._transport.aclose()


def _read(response: httpx.Response) -> None:
    stream = response.stream
    assert isinstance(stream, httpx.SyncByteStream)
    try:
        response.stream = httpx.ByteStream(b"".join(stream))
    finally:
        stream.close()


async def _aread(response: httpx.Response) -> None:
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    try:
        response.stream = httpx.ByteStream(b"".join([part async for part in stream]))
    finally:
        await stream.aclose()
