"""The cost of a decision over HTTP, by server and router.

    python -m benchmarks.server [--quick]

Every contender is a process on a loopback port, called by this process over 32 persistent connections with one request at a
time. The main result is the CPU time per decision of all processes and threads of the server: requests per second also
depend on the client, which runs on the same machine. The table contains both.

    constant, uvicorn    an application that reads the body and returns a constant
    bare, …              a limiter behind a minimal application, by router and by server
    headgate serve       the complete server with figures, metrics and access control; in memory and on Redis
    headgate, granian    the same application on granian
    batches              100 decisions per request
    client               Headgate's Python client with 64 tasks, on `headgate serve`
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.harness import (
    NotOfferedError,
    Result,
    Scale,
    Section,
    Target,
    announce,
    cpu_seconds,
    each,
    interleave,
    main,
    notes,
    number,
    table,
)
from headgate import AsyncLimiter
from headgate.client import ServerStore
from headgate.testing.servers import RedisServer, find_free_port
from headgate_server import open_app
from headgate_server.wire import HitBody, decision_answer

ROOT = Path(__file__).resolve().parent.parent
CONNECTIONS = 32
CLIENT_TASKS = 64
BATCH = 100
QUOTA = "1000000000/minute"
POLICY = f'[limiters.free]\nrules = ["{QUOTA}"]\n'
ONE = b'{"key":"alice","cost":1}'
MANY = b'{"calls":[%s]}' % b",".join([b'{"operation":"hit","limiter":"free","key":"alice"}'] * BATCH)

Application = Callable[..., Any]


# --- Applications ----------------------------------------------------------------------------------------------------


def full() -> Application:
    """Return the complete application of the Headgate server."""
    return open_app(os.environ["BENCHMARK_POLICY"])


def constant() -> Application:
    """Return an application that returns a constant."""

    async def answer(body: bytes) -> bytes:
        return b'{"allowed":true}'

    return _application(answer)


def bare() -> Application:
    """Return a minimal application that decides: one path, one limiter."""
    return _application(_decider())


def _application(answer: Callable[[bytes], Any]) -> Application:
    async def application(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = await answer((await receive())["body"])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return application


def _decider() -> Callable[[bytes], Any]:
    limiter, decoder = AsyncLimiter(QUOTA), msgspec.json.Decoder(HitBody)

    async def decide(body: bytes) -> bytes:
        hit = decoder.decode(body)
        assert isinstance(hit.key, str)
        return msgspec.json.encode(decision_answer(await limiter.hit(hit.key, hit.cost, tier=hit.tier)))

    return decide


def starlette() -> Application:
    """Return the minimal application with Starlette's routing, requests and responses."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    decide = _decider()

    async def hit(request: Request) -> Response:
        return Response(await decide(await request.body()), media_type="application/json")

    return Starlette(routes=[Route("/v1/limiters/{name}/hit", hit, methods=["POST"])])


# --- Servers ---------------------------------------------------------------------------------------------------------


def headgate_serve(port: int, factory: str) -> list[str]:
    """Return the command of `headgate serve`."""
    call = "import os; from headgate_server import serve; serve(os.environ['BENCHMARK_POLICY'], port={})"
    return [sys.executable, "-c", call.format(port)]


def on_uvicorn(port: int, factory: str) -> list[str]:
    """Return the command of uvicorn, with the same event loop and HTTP parser as `headgate serve`."""
    quiet = ["--no-access-log", "--log-level", "warning", "--no-proxy-headers", "--no-server-header"]
    parts = ["--loop", "uvloop", "--http", "httptools", "--ws", "none", "--port", str(port)]
    return [sys.executable, "-m", "uvicorn", "--factory", f"benchmarks.server:{factory}", *parts, *quiet]


def on_granian(port: int, factory: str) -> list[str]:
    """Return the command of granian, one worker."""
    if importlib.util.find_spec("granian") is None:
        raise NotOfferedError("not installed: granian")
    parts = ["--interface", "asgi", "--http", "1", "--loop", "uvloop", "--no-ws", "--port", str(port)]
    return [sys.executable, "-m", "granian", "--factory", "--no-log", *parts, f"benchmarks.server:{factory}"]


@dataclass(frozen=True)
class Contender:
    """An application, the server that runs it, and the number of decisions per request."""

    command: Callable[[int, str], list[str]]
    factory: str = ""
    batch: int = 1
    on_redis: bool = False

    def request(self) -> bytes:
        """Return the bytes of one request."""
        path, body = ("/v1/limiters/free/hit", ONE) if self.batch == 1 else ("/v1/batch", MANY)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


CONSTANT, SERVE = "constant, uvicorn", "headgate serve"
CONTENDERS: dict[str, Contender] = {
    CONSTANT: Contender(on_uvicorn, "constant"),
    "bare, uvicorn": Contender(on_uvicorn, "bare"),
    "bare, granian": Contender(on_granian, "bare"),
    "bare, Starlette, uvicorn": Contender(on_uvicorn, "starlette"),
    "bare, Starlette, granian": Contender(on_granian, "starlette"),
    SERVE: Contender(headgate_serve),
    "headgate, granian": Contender(on_granian, "full"),
    f"{SERVE}, Redis": Contender(headgate_serve, on_redis=True),
    f"{SERVE}, batches of {BATCH}": Contender(headgate_serve, batch=BATCH),
    f"{SERVE}, batches of {BATCH}, Redis": Contender(headgate_serve, batch=BATCH, on_redis=True),
}


@contextlib.contextmanager
def running(contender: Contender, policy: Path) -> Iterator[tuple[int, int]]:
    """Run a server within a block; yield its process id and its port."""
    port = find_free_port()
    environment = {**os.environ, "BENCHMARK_POLICY": str(policy)}
    with subprocess.Popen(
        contender.command(port, contender.factory), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    ) as process:
        try:
            _wait_for(process, port)
            yield process.pid, port
        finally:
            process.terminate()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.05)
    raise RuntimeError("the server did not start")


# --- Clients ---------------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """A connection that sends the next request as soon as a response is complete."""

    def __init__(self, request: bytes, left: Iterator[int], done: asyncio.Future[None]) -> None:
        self.request, self.left, self.done = request, left, done
        self.received = b""

    def connection_made(self, transport: Any) -> None:
        """Send the first request."""
        self.transport = transport
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Send the next request if the response is complete, until all requests are sent."""
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split(None, 1)[0]):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self.received.decode()))
        elif next(self.left, None) is None:
            self.done.set_result(None)
        else:
            self.received = b""
            self.transport.write(self.request)
            return
        self.transport.close()


async def send_requests(port: int, request: bytes, requests: int) -> None:
    """Send requests over several connections, and wait for all responses."""
    loop = asyncio.get_running_loop()
    left = iter(range(requests - CONNECTIONS))
    finished = [loop.create_future() for _ in range(CONNECTIONS)]
    for done in finished:
        await loop.create_connection(partial(Connection, request, left, done), "127.0.0.1", port)
    await asyncio.gather(*finished)


async def hit_with_client(port: int, decisions: int) -> None:
    """Hit through Headgate's Python client from many tasks."""
    async with ServerStore(f"http://127.0.0.1:{port}") as store:
        limiter = await store.async_limiter("free")

        async def work() -> None:
            for _ in range(decisions // CLIENT_TASKS):
                await limiter.hit("alice")

        await asyncio.gather(*(work() for _ in range(CLIENT_TASKS)))


# --- Measuring -------------------------------------------------------------------------------------------------------


def run(scale: Scale) -> Iterator[Section]:
    """Measure all contenders alternately."""
    announce("decisions over HTTP")
    rates: dict[str, Result] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory, redis = folder / "memory.toml", folder / "redis.toml"
        memory.write_text(POLICY)
        redis.write_text(f'[store]\nurl = "{stack.enter_context(RedisServer()).url}"\n{POLICY}')

        def sample(name: str, pid: int, decisions: int, work: Callable[[], Any]) -> float:
            before, started = cpu_seconds(pid), time.perf_counter()
            uvloop.run(work())
            rates.setdefault(name, Result()).samples.append(decisions / (time.perf_counter() - started))
            return (cpu_seconds(pid) - before) * 1e6 / decisions

        def start(item: tuple[str, Contender]) -> Callable[[], float]:
            name, contender = item
            pid, port = stack.enter_context(running(contender, redis if contender.on_redis else memory))
            requests = max(CONNECTIONS, scale.calls // contender.batch)
            work = partial(send_requests, port, contender.request(), requests)
            return partial(sample, name, pid, requests * contender.batch, work)

        runners = each({name: (name, contender) for name, contender in CONTENDERS.items()}, start)
        pid, port = stack.enter_context(running(CONTENDERS[SERVE], memory))
        runners["client"] = partial(
            sample, "client", pid, scale.calls, partial(hit_with_client, port, scale.calls)
        )
        results = interleave(runners, scale.rounds)
    rows = [
        [
            name,
            number(result.median, 1),
            number(result.times(results[CONSTANT]), 2),
            rates[name].cell if name in rates else "-",
        ]
        for name, result in results.items()
    ]
    headers = ["", "server CPU µs", f"÷ {CONSTANT}", "decisions a second"]
    target = Target(f"{SERVE} ÷ {CONSTANT}, CPU", 1.4, results[SERVE].times(results[CONSTANT]), at_most=True)
    tables = [table("One decision over HTTP", headers, rows), *notes(results)]
    yield Section("server", tables, {"CPU microseconds": results, "rates": rates}, [target])


if __name__ == "__main__":
    main("server", __doc__, run)
