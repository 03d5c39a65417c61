"""Envoy's rate-limit service over gRPC.

    python -m benchmarks.envoy [--quick]

Every server is a process on a loopback port, called by this process over one HTTP/2 connection, as by one thread of Envoy.

    a bare grpc.aio method    decodes the same message, and returns a constant response
    ShouldRateLimit           one and three descriptors, in memory and on Redis; calls per second, 32 concurrent calls
    at 2,000 calls a second   times from the planned start of each call, which include the wait of delayed calls
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from benchmarks.harness import (
    Result,
    Scale,
    Section,
    Target,
    announce,
    cpu_seconds,
    interleave,
    main,
    notes,
    number,
    table,
    worst_of,
)
from headgate.testing.servers import RedisServer, find_free_port
from headgate_server.envoy.messages import OK, RateLimitRequest, RateLimitResponse
from headgate_server.envoy.service import RATE_LIMITS

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 32
RATE = 2_000
TIMEOUT = 10.0
"""The timeout of a call in seconds; also the measured time of a failed call."""

SCOPES = ("a", "b", "c")
POLICY = """
[store]
url = "{store}"
[limiters.edge]
rules = [{rules}]
[envoy.domains.edge]
descriptors = [{descriptors}]
"""
BARE = "a bare grpc.aio method"


def policy(store: str) -> str:
    """Return a policy with a rule for each scope that admits everything."""
    rules = ", ".join(f'{{ quota = "1000000000/minute", scope = "{scope}" }}' for scope in SCOPES)
    descriptors = ", ".join(f'{{ key = "{scope}", scope = "{scope}" }}' for scope in SCOPES)
    return POLICY.format(store=store, rules=rules, descriptors=descriptors)


def message(descriptors: int) -> bytes:
    """Return a request with this number of descriptors."""
    request = RateLimitRequest(domain="edge")
    for scope in SCOPES[:descriptors]:
        request.descriptors.add().entries.add(key=scope, value="192.0.2.1")
    encoded: bytes = request.SerializeToString()
    return encoded


async def serve_bare(port: int) -> None:
    """Serve a method that decodes a request and returns a constant."""
    constant = RateLimitResponse(overall_code=OK)
    constant.statuses.add(code=OK, limit_remaining=9)

    async def answer(request: Any, context: Any) -> Any:
        return constant

    handler = grpc.unary_unary_rpc_method_handler(
        answer, RateLimitRequest.FromString, RateLimitResponse.SerializeToString
    )
    server = aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(RATE_LIMITS, {"ShouldRateLimit": handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


@contextlib.contextmanager
def running(store: str | None, folder: Path) -> Iterator[tuple[int, int]]:
    """Run a server within a block, the bare server if there is no store; yield its process id and its port."""
    port = find_free_port()
    if store is None:
        # On uvloop, like Headgate's server.
        code = f"import uvloop; from benchmarks.envoy import serve_bare; uvloop.run(serve_bare({port}))"
        command = [sys.executable, "-c", code]
    else:
        config = folder / f"{port}.toml"
        config.write_text(policy(store))
        command = [sys.executable, "-m", "headgate_server.cli", "serve", "--config", str(config)]
        command += ["--port", "0", "--grpc", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=subprocess.DEVNULL) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=30)
            yield process.pid, port
        finally:
            process.terminate()


# --- Calls -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _method(port: int) -> Any:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_unary(
            f"/{RATE_LIMITS}/ShouldRateLimit"
        )  # bytes, so that the client neither encodes nor decodes


async def call_often(port: int, request: bytes, calls: int) -> None:
    """Call as fast as possible, with `AT_ONCE` concurrent calls."""
    async with _method(port) as ask:

        async def work() -> None:
            for _ in range(calls // AT_ONCE):
                await ask(request, timeout=TIMEOUT)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def call_at_rate(port: int, request: bytes, seconds: float) -> list[float]:
    """Call at a fixed rate, and return the seconds from the planned start of each call to its reply."""
    loop = asyncio.get_running_loop()
    taken: list[float] = []
    async with _method(port) as ask:
        await ask(request, timeout=TIMEOUT)
        began = loop.time() + 0.1

        async def one(planned: float) -> None:
            try:
                await ask(request, timeout=TIMEOUT)
            except grpc.RpcError:  # grpc cancels some calls while a thousand are waiting
                taken.append(TIMEOUT)
            else:
                taken.append(loop.time() - planned)

        tasks = []
        for index in range(int(RATE * seconds)):
            planned = began + index / RATE
            if (pause := planned - loop.time()) > 0:
                await asyncio.sleep(pause)
            tasks.append(asyncio.ensure_future(one(planned)))
        await asyncio.gather(*tasks)
    return sorted(taken)


def run(scale: Scale) -> Iterator[Section]:
    """Compare calls per second, and measure times at a fixed rate."""
    announce("ShouldRateLimit")
    cpu: dict[str, Result] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loop = stack.enter_context(
            asyncio.Runner()
        )  # one loop for all samples, because grpc.aio is bound to its loop
        bare = stack.enter_context(running(None, folder))
        memory = stack.enter_context(running("memory://", folder))
        redis = stack.enter_context(running(stack.enter_context(RedisServer()).url, folder))

        def sample(name: str, server: tuple[int, int], request: bytes) -> float:
            before, started = cpu_seconds(server[0]), time.perf_counter()
            loop.run(call_often(server[1], request, scale.calls))
            seconds = time.perf_counter() - started
            used = (cpu_seconds(server[0]) - before) * 1e6 / scale.calls
            cpu.setdefault(name, Result()).samples.append(used)
            return scale.calls / seconds

        servers = {
            BARE: (bare, 1),
            "memory, 1 descriptor": (memory, 1),
            "memory, 3 descriptors": (memory, 3),
            "Redis, 1 descriptor": (redis, 1),
            "Redis, 3 descriptors": (redis, 3),
        }
        results = interleave(
            {name: partial(sample, name, server, message(size)) for name, (server, size) in servers.items()},
            scale.rounds,
        )
        taken = loop.run(call_at_rate(memory[1], message(1), scale.calls / RATE))
        plain = loop.run(call_at_rate(bare[1], message(1), scale.calls / RATE))
    ratios = {name: result.times(results[BARE]) for name, result in results.items() if name != BARE}
    rows = [
        [name, result.cell, number(ratios.get(name, 1.0), 2), number(cpu[name].median)]
        for name, result in results.items()
    ]
    headers = ["", "calls a second", "÷ bare", "server CPU µs"]
    shown = [_times_row(BARE, plain), _times_row("memory, 1 descriptor", taken)]
    tables = [
        table("ShouldRateLimit, 32 calls at once", headers, rows),
        table(f"At {RATE:,} calls a second, ms", ["", "p50", "p99", "p99.9"], shown),
        *notes(results),
    ]
    targets = [
        worst_of("calls a second ÷ bare grpc.aio", 0.7, ratios, at_most=False),
        Target("p99.9 at 2,000 calls a second, ms", 10, _quantile(taken, 0.999) * 1e3, at_most=True),
    ]
    yield Section("envoy", tables, {"calls a second": results, "CPU microseconds": cpu}, targets)


def _quantile(taken: Sequence[float], share: float) -> float:
    return taken[min(len(taken) - 1, int(len(taken) * share))]


def _times_row(name: str, taken: Sequence[float]) -> list[str]:
    return [name, *(number(_quantile(taken, share) * 1e3, 2) for share in (0.5, 0.99, 0.999))]


if __name__ == "__main__":
    main("envoy", __doc__, run)
