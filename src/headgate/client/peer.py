"""Send requests to a server, one by one or in batches, and distribute the answers.

Batches reduce the cost of HTTP: 64 tasks that send separate requests make about 400 calls per second, and ten thousand in
batches (httpx 0.28, two cores shared with the server).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import httpx

from headgate._concurrency import Event
from headgate.client.endpoint import ServerEndpoint, is_lost, unpacked
from headgate.client.wire import HttpRequest, Response, batch_answers, batch_request, failure, read_events
from headgate.errors import StoreConflict, StoreError
from headgate.stores.remote.batching import RemoteCall
from headgate.stores.remote.peer import ALONE, PENDING, Conversation, Receiver, abandon_task

MOST_BYTES = 32_768
"""The largest batch, small enough that no call waits long for others and that the server accepts it."""

TOO_LARGE = 413


class ServerPeer:
    """A Headgate server; see `Peer`."""

    follows = False
    failures = (httpx.HTTPError,)

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self.name = endpoint.name
        self._endpoint = endpoint

    def share(self, request: HttpRequest) -> float:
        return ALONE if request.entry is None else len(request.entry) / MOST_BYTES

    def connect(self, seconds: float) -> HttpWire:
        return HttpWire(self._endpoint, seconds)

    async def connect_async(self, seconds: float, receiver: Receiver) -> AsyncHttpWire:
        return AsyncHttpWire(self._endpoint, receiver)

    def failure(self, cause: BaseException) -> StoreError:
        error = self._endpoint.error(cause)
        error.__cause__ = cause
        return error

    def may_repeat(self, request: HttpRequest, cause: BaseException) -> bool:
        return request.may_repeat and is_lost(cause)

    def converse(self, calls: Sequence[RemoteCall]) -> Conversation:
        if len(calls) == 1:
            calls[0].answer((yield calls[0].request))
            return ()
        answer = yield batch_request([call.request.entry for call in calls])
        if answer.status == TOO_LARGE:
            return calls  # the batch was too large for the server, which has processed nothing
        try:
            answers = batch_answers(answer, len(calls))
        except ValueError as error:
            for call in calls:
                call.fail(StoreConflict(f"{self.name} did not answer as a Headgate server does: {error}"))
            return ()
        for call, own in zip(calls, answers, strict=True):
            call.answer(own)
        return ()


class HttpWire:
    """A connection for threads. A dedicated thread waits for the answers, because httpx waits for each part of one."""

    def __init__(self, endpoint: ServerEndpoint, seconds: float) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._transport = endpoint.transport()
        self._requests: SimpleQueue[HttpRequest | None] = SimpleQueue()
        self._outcome: Any = PENDING
        self._news = Event()
        threading.Thread(target=self._serve, daemon=True, name="headgate asks a server").start()

    def is_over(self) -> bool:
        return False  # httpx handles this

    def send(self, message: HttpRequest) -> None:
        self._outcome = PENDING
        self._requests.put(message)

    def wait(self, seconds: float) -> bool:
        self._news.wait(seconds)
        return self._outcome is not PENDING

    def receive(self) -> Any:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        self._requests.put(None)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._outcome = self._exchange(request)
            except BaseException as error:  # noqa: BLE001  # passed on to the waiting callers
                self._outcome = error
            self._news.set()
        if not self._endpoint.is_transport_given:
            self._transport.close()

    def _exchange(self, request: HttpRequest) -> Response:
        response = self._transport.handle_request(self._endpoint.packed(request, self._seconds))
        try:
            response.read()
        finally:
            response.close()
        return unpacked(response)


class AsyncHttpWire:
    """A connection for tasks."""

    def __init__(self, endpoint: ServerEndpoint, receiver: Receiver) -> None:
        self._endpoint = endpoint
        self._receiver: Receiver | None = receiver
        self._transport: httpx.AsyncBaseTransport = endpoint.async_transport()
        self._exchanging: asyncio.Task[Response] | None = None
        self._closing: asyncio.Task[None] | None = None

    def is_over(self) -> bool:
        return False  # httpx handles this

    def send(self, message: HttpRequest) -> None:
        request = self._endpoint.packed(message, None)
        self._exchanging = asyncio.get_running_loop().create_task(self._exchange(request))
        self._exchanging.add_done_callback(self._on_end)

    def close(self) -> None:
        self._receiver = None
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def wait_closed(self) -> None:
        if self._closing is not None:
            await self._closing

    def abandon(self) -> None:
        abandon_task(self._exchanging)

    async def _exchange(self, request: httpx.Request) -> Response:
        response = await self._transport.handle_async_request(request)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return unpacked(response)

    async def _close(self) -> None:
        if self._exchanging is not None:
            self._exchanging.cancel()
            await asyncio.wait([self._exchanging])
        if not self._endpoint.is_transport_given:
            await self._transport.aclose()

    def _on_end(self, exchanging: asyncio.Task[Response]) -> None:
        cause: BaseException | None = InterruptedError("a task of the event loop was cancelled during a call")
        if not exchanging.cancelled():
            cause = exchanging.exception()
        if self._receiver is None:
            return  # closed
        if cause is not None:
            self._receiver.lose(cause)
        else:
            self._receiver.receive(exchanging.result())


def stream_events(endpoint: ServerEndpoint, seconds: float) -> Iterator[tuple[str, Any]]:
    """Yield the server's events as pairs of name and data.

    Args:
        endpoint: The server.
        seconds: The maximum time without an event.

    Raises:
        StoreUnavailable: The server is unreachable, or the connection was lost.
        StoreMisconfigured: The server rejects the token, or is not a Headgate server.
    """
    transport = endpoint.transport()
    try:
        response = transport.handle_request(endpoint.packed(HttpRequest("GET", "/v1/events"), seconds))
        with closing(response):
            if response.status_code != 200:
                response.read()
                raise failure(endpoint.name, unpacked(response))
            yield from read_events(endpoint.name, response.iter_lines())
    except httpx.HTTPError as error:
        raise endpoint.error(error) from error
    finally:
        if not endpoint.is_transport_given:
            transport.close()
