"""`python -m benchmarks.server`: what a decision costs over HTTP, and which server and router carry it best.

Every contender is a process of its own on a loopback port, asked over 32 connections by a small client on raw sockets. The
measure is the CPU time of the server per request, all its processes and threads together: on a machine that the client
shares with the server, requests per second say as much about the client. Both are in the table.

    headgate serve       the whole server: figures, metrics, access
    headgate, granian    the same application on granian
    bare, …              a limiter behind the least that an application can be, by router and by server
    headgate, batches    decisions rather than requests, 100 in each
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import (
    FULL,
    QUICK,
    NotOfferedError,
    Panel,
    Progress,
    Result,
    Runner,
    Scale,
    Section,
    Target,
    interleave,
    notes,
    number,
    table,
    target_table,
    write_chart,
    write_json,
)
from headgate import AsyncLimiter
from headgate.testing.servers import find_free_port
from headgate_server import open_app
from headgate_server.wire import HitAsk, decision_answer

STEPS = 1
CONNECTIONS = 32
BATCH = 100
POLICY = '[limiters.free]\nrules = ["1000000000/minute"]\n'
HIT = b'{"key":"alice","cost":1}'
CALL = b'{"operation":"hit","limiter":"free","key":"alice"}'

OURS = "headgate serve"
BATCHES = f"headgate serve, batches of {BATCH}"

Application = Callable[..., Any]


# --- What is served --------------------------------------------------------------------------------------------------


def full() -> Application:
    """Return our whole application."""
    return open_app(os.environ["BENCHMARK_POLICY"])


async def decided(limiter: AsyncLimiter, decoder: msgspec.json.Decoder[HitAsk], body: bytes) -> bytes:
    """Return the answer to a body, with the types that our server uses."""
    ask = decoder.decode(body)
    assert isinstance(ask.key, str)
    return msgspec.json.encode(decision_answer(await limiter.hit(ask.key, ask.cost, tier=ask.tier)))


def bare() -> Application:
    """Return the least that can be an application: one path, one limiter."""
    limiter, decoder = AsyncLimiter("1000000000/minute"), msgspec.json.Decoder(HitAsk)

    async def application(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        answer = await decided(limiter, decoder, (await receive())["body"])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return application


def starlette() -> Application:
    """Return the same behind Starlette's routing, requests and responses."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    limiter, decoder = AsyncLimiter("1000000000/minute"), msgspec.json.Decoder(HitAsk)

    async def hit(request: Request) -> Response:
        return Response(await decided(limiter, decoder, await request.body()), media_type="application/json")

    return Starlette(routes=[Route("/v1/limiters/{name}/hit", hit, methods=["POST"])])


# --- What serves it --------------------------------------------------------------------------------------------------


def our_own(port: int, factory: str) -> list[str]:
    """Return the command of our own server."""
    call = "import os; from headgate_server import serve; serve(os.environ['BENCHMARK_POLICY'], port={})"
    return [sys.executable, "-c", call.format(port)]


def on_uvicorn(port: int, factory: str) -> list[str]:
    """Return the command of uvicorn, on the parts that we use it with."""
    quiet = ["--no-access-log", "--log-level", "warning", "--no-proxy-headers", "--no-server-header"]
    parts = ["--loop", "uvloop", "--http", "httptools", "--ws", "none", "--port", str(port)]
    return [sys.executable, "-m", "uvicorn", "--factory", f"benchmarks.server:{factory}", *parts, *quiet]


def on_granian(port: int, factory: str) -> list[str]:
    """Return the command of granian, one worker."""
    if importlib.util.find_spec("granian") is None:
        raise NotOfferedError("not installed: granian")
    parts = ["--interface", "asgi", "--http", "1", "--loop", "uvloop", "--no-ws", "--port", str(port)]
    return [sys.executable, "-m", "granian", "--factory", "--no-log", *parts, f"benchmarks.server:{factory}"]


CONTENDERS: dict[str, tuple[Callable[[int, str], list[str]], str]] = {
    OURS: (our_own, "full"),
    "headgate, granian": (on_granian, "full"),
    "bare, own router, uvicorn": (on_uvicorn, "bare"),
    "bare, own router, granian": (on_granian, "bare"),
    "bare, Starlette, uvicorn": (on_uvicorn, "starlette"),
    "bare, Starlette, granian": (on_granian, "starlette"),
}


@contextlib.contextmanager
def running(
    command: Callable[[int, str], list[str]], factory: str, policy: Path
) -> Iterator[tuple[int, int]]:
    """Run a server for the length of a block; give its process and its port."""
    port = find_free_port()
    environment = {**os.environ, "BENCHMARK_POLICY": str(policy)}
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(
        command(port, factory), cwd=root, env=environment, stdout=subprocess.DEVNULL
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
            asyncio.run(load(port, "/v1/limiters/free/hit", HIT, 1, 1))
            return
        time.sleep(0.05)
    raise RuntimeError("the server did not start")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children so far."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    family = [stat for other, stat in parents.items() if other == pid or int(stat[1]) == pid]
    return sum(int(stat[11]) + int(stat[12]) for stat in family) / os.sysconf("SC_CLK_TCK")


# --- Who asks --------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """What was asked, and how long it took."""

    left: int
    seconds: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    def __init__(self, request: bytes, load: Load, done: asyncio.Future[None]) -> None:
        self._request, self._load, self._done = request, load, done
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._ask()

    def _ask(self) -> None:
        if self._load.left <= 0:
            self._transport.close()
            return
        self._load.left -= 1
        self._asked = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._transport.close()
            if not self._done.done():
                self._done.set_exception(RuntimeError(self._received[:200].decode("latin-1")))
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self._received = body[length:]
        self._load.seconds.append(time.perf_counter() - self._asked)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def load(port: int, path: str, body: bytes, requests: int, connections: int = CONNECTIONS) -> Load:
    """Ask so often, over so many connections at once."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    asked = Load(requests)
    done = [loop.create_future() for _ in range(connections)]
    for ended in done:
        await loop.create_connection(partial(Client, request, asked, ended), "127.0.0.1", port)
    await asyncio.gather(*done)
    return asked


# --- Measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a contender's rounds looked like from outside."""

    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def sampler(pid: int, port: int, body: bytes, requests: int, decisions: int, seen: Seen) -> Runner:
    """Return what asks a server for one sample: CPU microseconds per decision."""
    path = "/v1/limiters/free/hit" if decisions == 1 else "/v1/batch"

    def sample() -> float:
        before, start = cpu_seconds(pid), time.perf_counter()
        asked = asyncio.run(load(port, path, body, requests))
        seen.rates.append(len(asked.seconds) * decisions / (time.perf_counter() - start))
        seen.seconds += asked.seconds
        return (cpu_seconds(pid) - before) * 1e6 / (len(asked.seconds) * decisions)

    return sample


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure all contenders in turns."""
    progress.begin("decisions over HTTP")
    seen: dict[str, Seen] = {}
    runners: dict[str, Runner | Result] = {}
    batch = b'{"calls":[%b]}' % b",".join([CALL] * BATCH)
    with contextlib.ExitStack() as stack:
        policy = Path(stack.enter_context(tempfile.TemporaryDirectory()), "headgate.toml")
        policy.write_text(POLICY)
        for name, (command, factory) in CONTENDERS.items():
            seen[name] = Seen()
            try:
                pid, port = stack.enter_context(running(command, factory, policy))
            except NotOfferedError as error:
                runners[name] = Result(trouble=str(error))
                continue
            runners[name] = sampler(pid, port, HIT, scale.calls, 1, seen[name])
            if name == OURS:
                seen[BATCHES] = Seen()
                runners[BATCHES] = sampler(pid, port, batch, scale.calls // BATCH, BATCH, seen[BATCHES])
        results = interleave(runners, scale.rounds, progress)
    yield section(results, seen)


def section(results: Mapping[str, Result], seen: Mapping[str, Seen]) -> Section:
    """Return the table, the targets and the chart."""
    headers = ["one decision over HTTP", "server CPU µs", "a second", "median ms", "99th ms"]
    rows = [[name, number(result.median, 1), *_outside(seen[name])] for name, result in results.items()]
    ours, star = results[OURS], results["bare, Starlette, uvicorn"]
    targets = [
        Target("the whole server, beside a bare Starlette application", 1.2, ours.times(star), at_most=True),
        Target("a decision in a batch, beside one alone", 0.5, results[BATCHES].times(ours), at_most=True),
    ]
    bars = [(name, result.median, number(result.median, 1)) for name, result in results.items()]
    return Section(
        "server",
        [table("Server", headers, rows), *notes([results])],
        {name: {"cpu_us": result.samples, "rates": seen[name].rates} for name, result in results.items()},
        targets,
        [Panel("Server CPU time per decision over HTTP", "µs", bars)],
    )


def _outside(seen: Seen) -> list[str]:
    if not seen.seconds:
        return ["-", "-", "-"]
    times = sorted(seen.seconds)
    rates = sorted(seen.rates)
    return [
        number(rates[len(rates) // 2]),
        number(times[len(times) // 2] * 1000, 2),
        number(times[len(times) * 99 // 100] * 1000, 2),
    ]


def main() -> None:
    """Print the table and targets; write JSON and a chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer calls and rounds")
    options = parser.parse_args()
    progress = Progress(STEPS)
    sections = list(run(QUICK if options.quick else FULL, progress))
    progress.end()
    for found in sections:
        print(*found.tables, sep="\n", flush=True)
    promised = [target for found in sections for target in found.targets]
    print(target_table(promised, "Targets"))
    written = write_json("server", {**{found.name: found.data for found in sections}, "targets": promised})
    panels = [panel for found in sections for panel in found.panels]
    chart = write_chart("server", "A decision over HTTP (less is better)", panels, OURS)
    print(f"\n{written}\n{chart}", file=sys.stderr)


if __name__ == "__main__":
    main()
