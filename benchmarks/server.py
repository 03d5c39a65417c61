"""`python -m benchmarks.server`: what a decision costs over HTTP, and which server and router carry it best.

Every contender is a process of its own on a loopback port, asked by wrk (Debian: `apt-get install wrk`) over 32 connections.
The measure is the CPU time of the server per request, all its processes and threads together: on a machine that the client
shares with the server, requests per second say as much about the client. Both are in the table.

    bare uvicorn         an application that reads the body and answers a constant
    bare, …              a limiter behind the least that an application can be, by router and by server
    headgate serve       the whole server: figures, metrics, access; with one rule, with two, on Redis, with two workers
    headgate, granian    the same application on granian
    batches              decisions rather than requests, 100 in each
    /healthz             how long it takes beside 500 busy connections
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
    worst_of,
    write_chart,
    write_json,
)
from headgate import AsyncLimiter
from headgate.testing.servers import RedisServer, find_free_port
from headgate_server import open_app
from headgate_server.wire import HitAsk, decision_answer

STEPS = 2
CONNECTIONS = 32
BUSY_CONNECTIONS = 500
BATCH = 100
POLICY = """
[limiters.free]
rules = ["1000000000/minute"]
[limiters.two]
rules = ["1000000000/minute", "1000000000/hour"]
"""
HIT = '{"key":"alice","cost":1}'
CALLS = '{"calls":[%s]}' % ",".join(['{"operation":"hit","limiter":"free","key":"alice"}'] * BATCH)  # noqa: UP031

FREE, TWO, BATCHES = "/v1/limiters/free/hit", "/v1/limiters/two/hit", "/v1/batch"
BARE = "bare uvicorn"

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


def constant() -> Application:
    """Return an application that reads the body and answers a constant."""

    async def application(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await receive()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"16")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"allowed":true}'})

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
    """Return the command of our own server; instead of a factory, the number of its workers."""
    workers = factory or "1"
    call = "import os; from headgate_server import serve; serve(os.environ['BENCHMARK_POLICY'], port={}, workers={})"
    return [sys.executable, "-c", call.format(port, workers)]


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


@dataclass(frozen=True)
class Contender:
    """What is served, by what, and what is asked of it.

    Attributes:
        command: Makes the command.
        factory: What it serves.
        path: What is asked.
        body: With which body.
        decisions: In each request.
        on_redis: Whether its limiters count in Redis.
    """

    command: Callable[[int, str], list[str]]
    factory: str = ""
    path: str = FREE
    body: str = HIT
    decisions: int = 1
    on_redis: bool = False


ONE_RULE, TWO_RULES = "headgate serve, one rule", "headgate serve, two rules"
ON_REDIS, TWO_WORKERS = "headgate serve, Redis", "headgate serve, Redis, two workers"
IN_MEMORY_BATCHES, REDIS_BATCHES = f"batches of {BATCH}, memory", f"batches of {BATCH}, Redis"
CONTENDERS: dict[str, Contender] = {
    BARE: Contender(on_uvicorn, "constant"),
    "bare, own router, uvicorn": Contender(on_uvicorn, "bare"),
    "bare, own router, granian": Contender(on_granian, "bare"),
    "bare, Starlette, uvicorn": Contender(on_uvicorn, "starlette"),
    "bare, Starlette, granian": Contender(on_granian, "starlette"),
    ONE_RULE: Contender(our_own),
    TWO_RULES: Contender(our_own, path=TWO),
    "headgate, granian": Contender(on_granian, "full"),
    ON_REDIS: Contender(our_own, on_redis=True),
    TWO_WORKERS: Contender(our_own, "2", on_redis=True),
    IN_MEMORY_BATCHES: Contender(our_own, path=BATCHES, body=CALLS, decisions=BATCH),
    REDIS_BATCHES: Contender(our_own, path=BATCHES, body=CALLS, decisions=BATCH, on_redis=True),
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
            socket.create_connection(("127.0.0.1", port), 1).close()
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


class Load(NamedTuple):
    """What wrk has seen: how many requests, how many a second, and the milliseconds of the median and the 99th."""

    requests: int
    rate: float
    median: float
    worst: float


def command_of_wrk(
    port: int, contender: Contender, seconds: int, connections: int, folder: Path
) -> list[str]:
    """Return how wrk asks a contender."""
    if shutil.which("wrk") is None:
        raise NotOfferedError("not installed: wrk")
    script = folder / f"{contender.path.replace('/', '-')}.lua"
    script.write_text(
        f'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\nwrk.body = [[{contender.body}]]\n'
    )
    options = ["-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script)]
    return ["wrk", *options, f"http://127.0.0.1:{port}{contender.path}"]


def load(command: list[str]) -> Load:
    """Run wrk."""
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise RuntimeError(said)
    requests, rate = re.search(r"(\d+) requests in", said), re.search(r"Requests/sec:\s*([\d.]+)", said)
    assert requests is not None
    assert rate is not None
    return Load(int(requests[1]), float(rate[1]), _milliseconds(said, "50%"), _milliseconds(said, "99%"))


def _milliseconds(said: str, share: str) -> float:
    found = re.search(rf"{share}\s+([\d.]+)(us|ms|s)", said)
    assert found is not None
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found[2]]


# --- Measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a contender's rounds looked like from outside."""

    loads: list[Load] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def sampler(pid: int, command: list[str], decisions: int, seen: Seen) -> Runner:
    """Return what asks a server for one sample: CPU microseconds per decision."""

    def sample() -> float:
        before = cpu_seconds(pid)
        asked = load(command)
        seen.loads.append(asked)
        seen.rates.append(asked.rate * decisions)
        return (cpu_seconds(pid) - before) * 1e6 / (asked.requests * decisions)

    return sample


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure all contenders in turns."""
    seconds = 1 if scale is QUICK else 3
    progress.begin("decisions over HTTP")
    seen: dict[str, Seen] = {name: Seen() for name in CONTENDERS}
    runners: dict[str, Runner | Result] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "memory.toml").write_text(POLICY)
        redis = stack.enter_context(RedisServer())
        (folder / "redis.toml").write_text(f'[store]\nurl = "{redis.url}"\n{POLICY}')
        servers: dict[tuple[object, ...], tuple[int, int]] = {}
        for name, each in CONTENDERS.items():
            place = each.command, each.factory, each.on_redis
            policy = folder / ("redis.toml" if each.on_redis else "memory.toml")
            try:
                if place not in servers:
                    servers[place] = stack.enter_context(running(each.command, each.factory, policy))
                pid, port = servers[place]
                command = command_of_wrk(port, each, seconds, CONNECTIONS, folder)
                runners[name] = sampler(pid, command, each.decisions, seen[name])
            except NotOfferedError as error:
                runners[name] = Result(trouble=str(error))
        results = interleave(runners, scale.rounds, progress)
        progress.begin("/healthz beside busy connections")
        health = {
            name: health_beside_load(servers[each.command, each.factory, False][1], each, seconds, folder)
            for name, each in CONTENDERS.items()
            if name in (BARE, ONE_RULE) and results[name].samples
        }
    yield section(results, seen, health)


def health_beside_load(port: int, contender: Contender, seconds: int, folder: Path) -> list[float]:
    """Return how many milliseconds `/healthz` took, asked again and again beside busy connections."""
    command = command_of_wrk(port, contender, 3 * seconds, BUSY_CONNECTIONS, folder)
    took: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as busy:
        while busy.poll() is None:
            start = time.perf_counter()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as answer:
                answer.read()
            took.append((time.perf_counter() - start) * 1000)
    return sorted(took)


def section(
    results: Mapping[str, Result], seen: Mapping[str, Seen], health: Mapping[str, list[float]]
) -> Section:
    """Return the table, the targets and the chart."""
    headers = ["one decision over HTTP", "server CPU µs", "of bare", "a second", "median ms", "99th ms"]
    rows = [
        [name, number(result.median, 1), number(_of_bare(results, name), 2), *_outside(seen[name])]
        for name, result in results.items()
    ]
    rows += [
        [
            f"{name}: /healthz beside {BUSY_CONNECTIONS}",
            "-",
            "-",
            "-",
            number(_share(took, 0.5), 1),
            number(_share(took, 0.99), 1),
        ]
        for name, took in health.items()
    ]
    in_memory = {name: _of_bare(results, name) for name in (ONE_RULE, TWO_RULES)}
    star = results["bare, Starlette, uvicorn"]
    targets = [
        worst_of("in memory, of a bare uvicorn application", 0.7, in_memory, at_most=False),
        Target("on Redis, of the bare application", 0.6, _of_bare(results, ON_REDIS), at_most=False),
        Target("on Redis, two workers, each of it", 0.5, _of_bare(results, TWO_WORKERS), at_most=False),
        Target(
            "decisions a second in batches, memory", 40_000, _rate(seen[IN_MEMORY_BATCHES]), at_most=False
        ),
        Target("decisions a second in batches, Redis", 25_000, _rate(seen[REDIS_BATCHES]), at_most=False),
        Target("/healthz, 99th in ms", 100, _share(health.get(ONE_RULE, []), 0.99), at_most=True),
        Target("beside a bare Starlette application", 1.2, results[ONE_RULE].times(star), at_most=True),
    ]
    bars = [(name, result.median, number(result.median, 1)) for name, result in results.items()]
    return Section(
        "server",
        [table("Server", headers, rows), *notes([results])],
        {name: {"cpu_us": result.samples, "rates": seen[name].rates} for name, result in results.items()},
        targets,
        [Panel("Server CPU time per decision over HTTP", "µs", bars)],
    )


def _of_bare(results: Mapping[str, Result], name: str) -> float:
    """Return what share of the bare application's requests it could answer in the same CPU time."""
    return results[BARE].times(results[name])


def _share(sorted_times: list[float], share: float) -> float:
    return sorted_times[int(len(sorted_times) * share)] if sorted_times else float("nan")


def _rate(seen: Seen) -> float:
    return median(seen.rates) if seen.rates else float("nan")


def _outside(seen: Seen) -> list[str]:
    if not seen.loads:
        return ["-", "-", "-"]
    times = (median(load.median for load in seen.loads), median(load.worst for load in seen.loads))
    return [number(_rate(seen)), *(number(each, 2) for each in times)]


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
    chart = write_chart("server", "A decision over HTTP (less is better)", panels, ONE_RULE)
    print(f"\n{written}\n{chart}", file=sys.stderr)


if __name__ == "__main__":
    main()
