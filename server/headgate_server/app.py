"""The server as an ASGI application: access, bodies, responses, errors, and background tasks."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from headgate import StoreMisconfigured
from headgate.observe import redact
from headgate.policy import AsyncLivePolicy, PolicyError
from headgate_server.access import AccessControl, HeaderFields, header_fields
from headgate_server.candidates import Candidates
from headgate_server.endpoints import endpoints
from headgate_server.events import STALLED, Events
from headgate_server.gate import ProxyGate, gate_routes
from headgate_server.holds import HoldBook
from headgate_server.idempotency import IdempotentCalls
from headgate_server.metrics import ServerMetrics
from headgate_server.operations import Operations, problem_from
from headgate_server.problems import ApiProblem, Field
from headgate_server.replies import Reply, Stream, json_reply, problem_reply
from headgate_server.routing import ApiRequest, Route, Router
from headgate_server.statistics import Demo, Statistics

logger = logging.getLogger("headgate.server")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DIRECT = "headgate.direct"
"""The ASGI extension of our HTTP layer, to get a complete body, write a whole response, or cut a connection."""

BODY_SECONDS = 10.0
"""Seconds for a body to arrive."""

TIDY_SECONDS = 10.0
PUBLISH_SECONDS = 0.05
"""Seconds for all workers to publish their figures before these are summed, so that all workers get the same sum."""

BODILESS = (204, 304)
"""Statuses of responses without a body, and so without its length."""

_READY = (Reply, Stream)
_TOO_LARGE: tuple[Field, ...] = ((b"connection", b"close"),)  # so that the rest does not have to be read


class Companion(Protocol):
    """Another server in the same event loop."""

    async def start(self) -> None:
        """Listen and answer."""

    async def stop(self) -> None:
        """Finish the calls in progress, and close the port."""


class _Gone(Exception):
    """The client has disconnected."""


class App:
    """The application.

    Args:
        live: The limiters. They are closed when the application shuts down.
        statistics: The figures; one of the policy's hooks.
        metrics: The metrics for Prometheus; their hooks are among the policy's hooks.
        demo: The demo, if this server is part of it.
        companions: Started and stopped with the application.

    Attributes:
        live: The limiters.
    """

    def __init__(
        self,
        live: AsyncLivePolicy,
        statistics: Statistics,
        metrics: ServerMetrics | None = None,
        demo: Demo | None = None,
        companions: Sequence[Companion] = (),
    ) -> None:
        statistics.demo = demo
        self._companions = companions
        self.live = live
        self._statistics = statistics
        self._metrics = metrics
        self._book = HoldBook(live, run=statistics.run)
        self._events = Events(statistics)
        self._candidates = Candidates(
            live, statistics.candidates_file, partial(statistics.follow_candidates, live)
        )
        self._operations = Operations(live, self._book, statistics)
        self._idempotent = IdempotentCalls(problem_from)
        self._access = AccessControl(live)
        live.on_change(self._check_tokens)
        table = endpoints(self._operations, self._events, statistics.history, self._candidates, metrics, demo)
        table += gate_routes(ProxyGate(live))
        self._router = Router(table)
        self._decoders = {
            id(endpoint): msgspec.json.Decoder(endpoint.takes) for endpoint in table if endpoint.takes
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._not_http(scope, receive, send)
            return
        direct = _direct(scope)
        try:
            answer = await self._answer(scope, receive, direct)
        except _Gone:
            return
        except Exception as error:  # noqa: BLE001  # every request gets a response; unexpected errors are logged
            answer = problem_reply(problem_from(error))
        if isinstance(answer, Stream):
            async with aclosing(answer.pieces):
                await self._stream(answer, scope, receive, send)
        elif direct is None or not direct.reply(answer.status, answer.fields, answer.body):
            await _send_reply(answer, scope, send)

    async def _not_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def end_streams(self) -> None:
        """End all event streams, so that the server can wait for the other requests."""
        self._events.end()

    # Requests

    async def _answer(self, scope: Scope, receive: Receive, direct: Any) -> Reply | Stream:
        path = scope.get("raw_path") or quote(scope["path"]).encode()
        endpoint, values = self._router.find(scope["method"], path)
        policy, fields = self.live.policy, header_fields(scope["headers"])
        access = self._access.check(endpoint.needs, scope, fields)
        arguments: tuple[Any, ...] = values
        if endpoint.takes is not None:
            largest = policy.server.largest_body
            whole = whole_body(direct, fields, largest)
            # A body that has not arrived is awaited in a task, because of the timeout.
            body = await asyncio.ensure_future(_arriving_body(receive, largest)) if whole is None else whole
            arguments = (self._decoded(endpoint, body), *values)
        if endpoint.wants_request:
            arguments = (ApiRequest(fields, *access, scope), *arguments)
        if endpoint.charges and b"idempotency-key" in fields and (limiter := self.live.get(values[0])):
            handle, key = partial(endpoint.handle, *arguments), fields[b"idempotency-key"]
            return await self._idempotent.answer(
                limiter.store.notes, key, access.caller, scope["path"], body, handle
            )
        answer = await endpoint.handle(*arguments)
        return answer if type(answer) in _READY else json_reply(answer)

    def _decoded(self, endpoint: Route, body: bytes) -> msgspec.Struct:
        try:
            return self._decoders[id(endpoint)].decode(body)
        except msgspec.DecodeError as error:
            raise ApiProblem(400, f"the body cannot be used: {error}") from error
        except UnicodeDecodeError as error:
            raise ApiProblem(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error

    async def _stream(self, stream: Stream, scope: Scope, receive: Receive, send: Send) -> None:
        """Send pieces until the stream ends, or the client is gone or reads nothing."""
        await send({"type": "http.response.start", "status": 200, "headers": list(stream.fields)})
        gone = asyncio.ensure_future(_until_gone(receive))
        sending = asyncio.ensure_future(
            _send_pieces(stream, send, lambda: self._may_read(scope), is_head=scope["method"] == "HEAD")
        )
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            sending.cancel()
            outcome = (await asyncio.gather(sending, gone, return_exceptions=True))[0]
        if isinstance(outcome, TimeoutError):
            logger.info("dropped a client of /v1/events that read nothing for %g s", STALLED)
            if (direct := _direct(scope)) is not None:
                direct.abort()
                await _until_gone(receive)
        elif isinstance(outcome, Exception):
            raise outcome

    def _may_read(self, scope: Scope) -> bool:
        """Return whether a client may still read a stream; its token may have been removed from the policy."""
        try:
            self._access.check("token", scope, header_fields(scope["headers"]))
        except ApiProblem:
            return False
        return True

    # Background

    def _check_tokens(self) -> None:
        """Log that a reload removed the last token, so that no request is permitted from now on."""
        if self._access.had_tokens and not self.live.policy.server.tokens:
            logger.error(
                "the last token was removed from the policy: no request is permitted until it has tokens or a restart"
            )

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._ping_stores()
                await self._tick(int(time.time()))
                tasks = [asyncio.ensure_future(work) for work in self._background()]
                for companion in self._companions:
                    await companion.start()
            else:
                self.end_streams()
                for companion in self._companions:
                    await companion.stop()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.live.aclose()
                self._statistics.save()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _ping_stores(self) -> None:
        """Ping every store before the first request; `serve` has refused misconfigured stores."""
        for url, error in (await self.live.ping()).items():
            if isinstance(error, StoreMisconfigured):
                logger.error("the store %s cannot be used: %s", redact(url), redact(str(error)))

    def _background(self) -> list[Any]:
        work = [self._tick_every_second(), self._tidy_regularly()]
        if self.live.follows_file:
            work.append(self.live.watch())
            with suppress(
                AttributeError, NotImplementedError, RuntimeError, ValueError
            ):  # not available in every thread and system
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        return work

    def _reload(self) -> None:
        try:
            self.live.reload()
        except PolicyError as error:
            logger.error("the policy stays as it was: %s", error)  # noqa: TRY400

    async def _tick_every_second(self) -> None:
        while True:
            now = time.time()
            following = int(now) + 1
            await asyncio.sleep(following - now)
            await self._tick(following)

    async def _tick(self, at: int) -> None:
        try:
            if self._metrics is not None:
                self._metrics.flush()
            self._candidates.refresh()
            self._statistics.publish(self.live)
            if self._statistics.is_shared:
                await asyncio.sleep(PUBLISH_SECONDS)
            self._events.publish(self._statistics.collect(at))
        except Exception:  # an error must not end the figures
            logger.exception("the figures of this second are missing")

    async def _tidy_regularly(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                await self._book.tidy()
            except Exception:  # the next attempt may succeed
                logger.exception("expired holds could not be removed")


def whole_body(direct: Any, fields: HeaderFields, largest: int) -> bytes | None:
    """Return the body of a request; `None` if it has not arrived completely.

    Raises:
        ApiProblem: 413 if it is too large; 415 if it is not JSON.
    """
    media_type = fields.get(b"content-type", b"")
    if (
        media_type != b"application/json"
        and media_type.partition(b";")[0].strip().lower() != b"application/json"
    ):
        raise ApiProblem(415, "send JSON, with the header Content-Type: application/json")
    body: bytes | None = None if direct is None else direct.whole_body()
    if body is not None:
        size = len(body)
    else:
        length = fields.get(b"content-length", b"")
        size = int(length) if length.isdigit() else 0
    if size > largest:
        raise _too_large(largest)
    return body


async def _arriving_body(receive: Receive, largest: int) -> bytes:
    """Wait for the body of a request, and return it.

    Raises:
        ApiProblem: 413 if it is too large; 408 if it does not arrive.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while len(body) <= largest:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                body += message.get("body", b"")
                if not message.get("more_body") and len(body) <= largest:
                    return bytes(body)
    except TimeoutError:
        raise ApiProblem(408, f"the body did not arrive within {BODY_SECONDS:g} s", _TOO_LARGE) from None
    raise _too_large(largest)


def _direct(scope: Scope) -> Any:
    """Return the `DIRECT` extension; `None` under another server."""
    extensions = scope.get("extensions")
    return None if extensions is None else extensions.get(DIRECT)


def _too_large(largest: int) -> ApiProblem:
    return ApiProblem(413, f"the body is larger than {largest} bytes, the policy's largest_body", _TOO_LARGE)


async def _send_reply(reply: Reply, scope: Scope, send: Send) -> None:
    headers, body = list(reply.fields), reply.body
    if reply.status not in BODILESS:
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _send_pieces(
    stream: Stream, send: Send, may_continue: Callable[[], bool], *, is_head: bool
) -> None:
    if not is_head:
        async for piece in stream.pieces:
            if not may_continue():
                break
            async with asyncio.timeout(STALLED):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
