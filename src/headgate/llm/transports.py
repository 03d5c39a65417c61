"""The part of the transports that is the same for httpx and httpx2."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from headgate._checks import check_kind
from headgate.errors import CostTooHigh, RateLimited
from headgate.llm.calls import AsyncBudget, AsyncBudgetCall, Budget, BudgetCall
from headgate.llm.wire import ResponseReader, refusal, request_of


class MeteredStream:
    """A response's stream that settles the call when it was read or closed."""

    def __init__(self, stream: Any, call: BudgetCall, reader: ResponseReader) -> None:
        self._stream, self._call, self._reader = stream, call, reader

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._reader.feed(chunk)
            yield chunk
        self._reader.end()
        self._call.__exit__(None, None, None)

    def close(self) -> None:
        """Close the stream and settle the call at its usage so far."""
        try:
            self._stream.close()
        finally:
            self._call.__exit__(None, None, None)


class AsyncMeteredStream:
    """Like `MeteredStream`, but for tasks."""

    def __init__(self, stream: Any, call: AsyncBudgetCall, reader: ResponseReader) -> None:
        self._stream, self._call, self._reader = stream, call, reader

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._reader.feed(chunk)
            yield chunk
        self._reader.end()
        await self._call.__aexit__(None, None, None)

    async def aclose(self) -> None:
        """Close the stream and settle the call at its usage so far."""
        try:
            await self._stream.aclose()
        finally:
            await self._call.__aexit__(None, None, None)


class BudgetTransportBase:
    """The transport for threads; see `headgate.llm.httpx.BudgetTransport`."""

    httpx: Any
    stream: Any

    def __init__(self, budget: Budget, transport: Any = None) -> None:
        self._budget = check_kind("budget", budget, Budget, "a Budget")
        self._transport = transport or self.httpx.HTTPTransport()

    def handle_request(self, request: Any) -> Any:
        """Send a request, within the budget if it calls a model."""
        body = _body(request, self.httpx)
        if body is None:
            return self._transport.handle_request(request)
        call = self._budget.call(body["model"], body)
        try:
            call.__enter__()
        except (RateLimited, CostTooHigh) as error:
            return _refused(self.httpx, error, request)
        try:
            response = self._transport.handle_request(request)
        except BaseException as error:
            _fail(self.httpx, call, error)
            call.__exit__(None, None, None)
            raise
        call.report(response.headers)
        reader = ResponseReader(call, response.status_code, response.headers.get("content-type", ""))
        response.stream = self.stream(response.stream, call, reader)
        return response

    def close(self) -> None:
        """Close the underlying transport."""
        self._transport.close()


class AsyncBudgetTransportBase:
    """The transport for tasks; see `headgate.llm.httpx.AsyncBudgetTransport`."""

    httpx: Any
    stream: Any

    def __init__(self, budget: AsyncBudget, transport: Any = None) -> None:
        self._budget = check_kind("budget", budget, AsyncBudget, "an AsyncBudget")
        self._transport = transport or self.httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request, within the budget if it calls a model."""
        body = _body(request, self.httpx)
        if body is None:
            return await self._transport.handle_async_request(request)
        call = self._budget.call(body["model"], body)
        try:
            await call.__aenter__()
        except (RateLimited, CostTooHigh) as error:
            return _refused(self.httpx, error, request)
        try:
            response = await self._transport.handle_async_request(request)
        except BaseException as error:
            _fail(self.httpx, call, error)
            await call.__aexit__(None, None if isinstance(error, Exception) else error, None)
            raise
        await call.report(response.headers)
        reader = ResponseReader(call, response.status_code, response.headers.get("content-type", ""))
        response.stream = self.stream(response.stream, call, reader)
        return response

    async def aclose(self) -> None:
        """Close the underlying transport."""
        await self._transport.aclose()


def _body(request: Any, httpx: Any) -> dict[str, Any] | None:
    """Return the body of a request that calls a model, and ask for a response that can be read."""
    if not isinstance(request.stream, httpx.ByteStream):
        return None
    body = request_of(request.method, request.read())
    if body is not None:
        request.headers["accept-encoding"] = "identity"
    return body


def _fail(httpx: Any, call: BudgetCall | AsyncBudgetCall, error: BaseException) -> None:
    """Release a call that was not sent. After any other failure the provider may have charged it: it keeps its estimate."""
    if isinstance(
        error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.UnsupportedProtocol
    ):
        call.release()


def _refused(httpx: Any, error: RateLimited | CostTooHigh, request: Any) -> Any:
    status, headers, body = refusal(error)
    return httpx.Response(status, headers=headers, content=body, request=request)
