"""The real application of `headgate serve` on a store in memory, behind a small HTTP server, and a client for it."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import httpcore
import httpx

from headgate.client import ServerStore
from headgate.clock import WallClock
from headgate.policy import AsyncLivePolicy, parse_policy
from headgate_server.factory import make_app
from tests.simulation.network import Link, Network
from tests.simulation.servers import Server, Session

PORT = 80


def server_store(deadline: float) -> ServerStore:
    """Return a store that uses the simulated server."""
    transport = httpx.AsyncHTTPTransport(verify=False, trust_env=False)
    transport._pool._network_backend = SimulatedBackend()
    return ServerStore("http://127.0.0.1", deadline=deadline, transport=transport)


class SimulatedBackend(httpcore.AsyncNetworkBackend):
    """Connections for httpcore, through the event loop."""

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        try:
            return SimulatedStream(*await asyncio.open_connection(host, port))
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error


class SimulatedStream(httpcore.AsyncNetworkStream):
    """A connection for httpcore."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._writer.is_closing():
            raise httpcore.WriteError("broken pipe")
        self._writer.write(buffer)

    async def aclose(self) -> None:
        self._writer.close()

    def get_extra_info(self, info: str) -> Any:
        has_news = self._reader.at_eof() or bool(self._reader._buffer)  # type: ignore[attr-defined]
        return has_news if info == "is_readable" else None


class HeadgateServer(Server):
    """The real application of `headgate serve`, on a store in memory, behind a small HTTP server."""

    wrong_replies = (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<p>hi</p>",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    )

    def __init__(self, network: Network, policy: str) -> None:
        super().__init__(network)
        self._live = AsyncLivePolicy(parse_policy(policy), clock=ServerClock(self))
        self.app: Any = make_app(self._live)
        network.servers[PORT] = self

    def reload(self, policy: str) -> None:
        """Reload the policy."""
        self._live._use(parse_policy(policy))

    def session(self, link: Link) -> Session:
        """Return the server's side of a new connection."""
        return HttpSession(self, link)


class ServerClock(WallClock):
    """The clock of a simulated server, for its limiters."""

    def __init__(self, server: Server) -> None:
        self.now_us = server.now_us  # type: ignore[method-assign]


class HttpSession(Session):
    """A connection to the Headgate server."""

    def __init__(self, server: Server, link: Link) -> None:
        super().__init__(server, link)
        self._parser = h11.Connection(h11.SERVER)
        self._request: Any = None
        self._body = b""

    def receive(self, data: bytes) -> None:
        """Reply to each complete request."""
        self._parser.receive_data(data)
        while isinstance(event := self._parser.next_event(), (h11.Request, h11.Data, h11.EndOfMessage)):
            if isinstance(event, h11.Request):
                self._request, self._body = event, b""
            elif isinstance(event, h11.Data):
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                if (reply := self.take_next_reply()) is not None:
                    self.send(reply)
                    self.link.break_off()
                    return
                timeline: Any = self.server.network.timeline
                timeline.start(timeline.world, self._serve)

    async def _serve(self) -> None:
        request, body = self._request, self._body
        scope = {
            "type": "http",
            "method": request.method.decode(),
            "path": request.target.decode(),
            "raw_path": request.target,
            "query_string": b"",
            "headers": list(request.headers),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        sent = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.server.app(scope, receive, send)
        start, *rest = sent
        whole = b"".join(message.get("body", b"") for message in rest)
        out = self._parser.send(h11.Response(status_code=start["status"], headers=start["headers"]))
        out += self._parser.send(h11.Data(data=whole)) + self._parser.send(h11.EndOfMessage())
        if self._parser.our_state is h11.DONE:
            self._parser.start_next_cycle()
        self.send(out)
