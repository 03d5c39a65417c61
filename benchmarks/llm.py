"""Calls of a model provider from several processes: refusals, and the share of the quota that is used.

    python -m benchmarks.llm [--seconds 90] [--processes 8] [--tasks 50] [--with langchain none]

A local server enforces requests and tokens per period, requests per day and calls in progress, with the headers of a real
provider. Each process runs tasks that make one call after another, so that demand is always above the quota. The usage
is 0.2 to 3 times the estimate, one call of 20 is a stream that is abandoned, and one process is killed in the middle. The
budget counts in Redis. With `--with`, the same calls go through LangChain's limiter, or none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx

from headgate import AsyncLimiter, Limiter, Rule, concurrent, sliding_window, token_bucket
from headgate.llm import AsyncBudget
from headgate.llm.httpx import AsyncBudgetTransport
from headgate.testing.servers import RedisServer

MODEL = "m"
MARGIN = 0.995
"""The share of the provider's rate that the budget has."""

BURST = 0.8
"""The share of the provider's capacity that the budget has. The rest is for usage that the budget does not know yet."""

PERIOD = 20
"""The period of the limits in seconds. Real providers have 60; a shorter one makes the measurement shorter."""

REQUESTS, TOKENS, IN_FLIGHT, PER_DAY = 700, 120_000, 300, 1_000_000
ESTIMATE = 250
PROMPT = [{"role": "user", "content": "word " * 20}]
SECONDS_PER_CALL = 1.0


def budget_rules() -> tuple[Rule, ...]:
    """Return the rules of the budget."""
    return (
        token_bucket(f"{int(REQUESTS * MARGIN)}/{PERIOD}s", burst=int(REQUESTS * BURST), name="requests"),
        token_bucket(
            f"{int(TOKENS * MARGIN)}/{PERIOD}s", burst=int(TOKENS * BURST), unit="tokens", name="tokens"
        ),
        sliding_window(f"{PER_DAY}/day", name="per day"),
        concurrent(IN_FLIGHT, lease="2m", name="in flight"),
    )


class Outcomes:
    """The outcomes of the calls of one process."""

    def __init__(self) -> None:
        self.calls = self.refused = self.aborted = self.failed = 0


def question(random_: random.Random) -> dict[str, Any]:
    """Return a request whose usage differs from its estimate by a factor of 0.2 to 3."""
    factor = random_.choice((0.2, 0.5, 0.8, 1.0, 1.2, 3.0))
    chosen = {
        "usage": str(int(ESTIMATE * factor)),
        "seconds": str(SECONDS_PER_CALL * random_.uniform(0.5, 1.5)),
    }
    return {"model": MODEL, "messages": PROMPT, "max_tokens": ESTIMATE, "metadata": chosen}


Ask = Callable[[dict[str, Any]], AbstractAsyncContextManager[httpx.Response]]


@asynccontextmanager
async def asking(limiter: str, store: str, url: str, processes: int) -> AsyncIterator[Ask]:
    """Open a client, limited by one of the limiters."""
    options: dict[str, Any] = {"timeout": 120, "base_url": url, "limits": httpx.Limits(max_connections=None)}
    if limiter == "headgate":
        counts = AsyncLimiter(
            *budget_rules(),
            name="provider",
            store=store,
            on_store_error="raise",
            deadline=30,
        )
        budget = AsyncBudget(counts, max_wait=600)
        async with httpx.AsyncClient(transport=AsyncBudgetTransport(budget), **options) as client:
            yield lambda request: client.stream("POST", "/v1/chat/completions", json=request)
        await counts.aclose()
        return
    acquire = _limiter_of(limiter, processes)
    async with httpx.AsyncClient(**options) as client:

        @asynccontextmanager
        async def ask(request: dict[str, Any]) -> AsyncIterator[httpx.Response]:
            await acquire(request)
            async with client.stream("POST", "/v1/chat/completions", json=request) as response:
                yield response

        yield ask


def _limiter_of(limiter: str, processes: int) -> Callable[[dict[str, Any]], Awaitable[object]]:
    """Return a function that waits for a call."""
    if limiter == "langchain":  # counts requests in one process
        from langchain_core.rate_limiters import InMemoryRateLimiter

        share = REQUESTS / PERIOD / processes
        own = InMemoryRateLimiter(
            requests_per_second=share, check_every_n_seconds=0.05, max_bucket_size=share
        )
        return lambda request: own.aacquire()

    async def nothing(request: dict[str, Any]) -> None:
        pass

    return nothing


async def work(ask: Ask, random_: random.Random, outcomes: Outcomes, ends: float) -> None:
    """Make calls until the end."""
    while time.monotonic() < ends:
        request = question(random_)
        is_aborted = random_.random() < 0.05
        if is_aborted:
            request["stream"] = True
        try:
            async with ask(request) as response:
                outcomes.calls += 1
                if response.status_code != 200:
                    outcomes.refused += 1
                    await response.aread()
                    await asyncio.sleep(1)
                elif is_aborted:
                    outcomes.aborted += 1
                    lines = response.aiter_lines()
                    for _ in range(40):
                        await anext(lines)
                else:
                    await response.aread()
        except (httpx.HTTPError, StopAsyncIteration):
            outcomes.failed += 1


async def process(arguments: list[str]) -> None:
    """Run one process of callers and print its outcomes."""
    limiter, store, url, processes, tasks, seconds, seed = arguments
    outcomes = Outcomes()
    ends = time.monotonic() + float(seconds)
    async with asking(limiter, store, url, int(processes)) as ask:
        callers = [
            asyncio.create_task(work(ask, random.Random(f"{seed} {number}"), outcomes, ends))
            for number in range(int(tasks))
        ]
        await asyncio.sleep(float(seconds))
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    print(json.dumps(vars(outcomes)))


def measure(limiter: str, processes: int, tasks: int, seconds: float, kills: bool = True) -> dict[str, Any]:
    """Run the provider and all processes; return the provider's figures, and the used shares of its quotas."""
    with RedisServer() as redis, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        limits = {
            "requests": REQUESTS,
            "tokens": TOKENS,
            "period": PERIOD,
            "per_day": PER_DAY,
            "in_flight": IN_FLIGHT,
        }
        serve = [
            sys.executable,
            "-m",
            "benchmarks.llm",
            "--serve",
            str(listener.fileno()),
            json.dumps(limits),
        ]
        provider = subprocess.Popen(serve, pass_fds=[listener.fileno()])
        url = f"http://127.0.0.1:{port}"
        own = [limiter, redis.url, url, str(processes), str(tasks), str(seconds)]
        try:
            callers = [
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.llm", "--process", *own, str(number)],
                    stdout=subprocess.PIPE,
                )
                for number in range(processes)
            ]
            warm_up = min(PERIOD * 2.5, seconds / 2)  # until the capacity at the start is used up
            time.sleep(warm_up)
            first, started = httpx.get(f"{url}/figures", timeout=60).json(), time.monotonic()
            if kills:
                time.sleep((seconds - warm_up) / 2)
                callers[-1].send_signal(signal.SIGKILL)
            # The last part is left out, in which the tasks end.
            time.sleep(max(0.0, seconds - warm_up - 3 - (time.monotonic() - started)))
            with Limiter(*budget_rules(), name="provider", store=redis.url) as counts:
                left = {result.name: result.remaining for result in counts.check(MODEL, 0).results}
            last, ended = httpx.get(f"{url}/figures", timeout=60).json(), time.monotonic()
            outputs = [caller.communicate(timeout=120)[0] for caller in callers]
            final = httpx.get(f"{url}/figures", timeout=60).json()
        finally:
            for child in (provider, *callers):
                child.kill()
                child.wait()
    outcomes = [json.loads(output) for output in outputs if output]
    elapsed = (ended - started) / PERIOD
    return {
        "limiter": limiter,
        "calls": final["statuses"].get("200", 0),
        "refused": final["statuses"].get("429", 0),
        "refusals": final["refusals"],
        "aborted": sum(outcome["aborted"] for outcome in outcomes),
        "processes that ended": len(outcomes),
        "left": left,
        "requests used": used_share("requests", REQUESTS * elapsed, first, last),
        "tokens used": used_share("tokens", TOKENS * elapsed, first, last),
    }


def used_share(unit: str, refilled: float, first: dict[str, Any], last: dict[str, Any]) -> float:
    """Return the used share of the units that were refilled, or left over from before."""
    left_over = max(0.0, first[f"{unit} left"] - last[f"{unit} left"])
    share: float = (last[unit] - first[unit]) / (refilled + left_over)
    return share


def serve(descriptor: int, limits: dict[str, Any]) -> None:
    """Run the provider on an open socket."""
    import uvicorn

    from benchmarks.provider import Limits, Provider

    provider = Provider(Limits(**limits), time.monotonic)
    config = uvicorn.Config(provider, log_level="critical", lifespan="off", access_log=False)
    with socket.socket(fileno=descriptor) as listener:
        uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--with", dest="others", nargs="*", default=[], choices=["langchain", "none"])
    options = parser.parse_args()
    print("| Limiter | Calls | 429 | Requests used | Tokens used | Abandoned streams |")
    print("| --- | --- | --- | --- | --- | --- |")
    for limiter in ("headgate", *options.others):
        found = measure(limiter, options.processes, options.tasks, options.seconds)
        print(
            f"| {limiter} | {found['calls']:,} | {found['refused']:,} | {found['requests used']:.1%} "
            f"| {found['tokens used']:.1%} | {found['aborted']} |",
            flush=True,
        )
        print(f"<!-- {found} -->", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), json.loads(sys.argv[3]))
    elif sys.argv[1:2] == ["--process"]:
        asyncio.run(process(sys.argv[2:]))
    else:
        main()
