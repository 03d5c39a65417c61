"""Calls of a model provider from several processes: refusals, and the used share of the quota.

    python -m benchmarks.llm [headgate langchain litellm litellm-enforced none] [--outside] [--seconds 90] [--period 20]

A local server enforces requests and tokens per period, requests per day and calls in progress, with the headers of a real
provider. Each process runs tasks that make one call after another, so that demand is always above the quota. The usage
is 0.2 to 3 times the estimate, one call of 20 is an abandoned stream, and one process is killed halfway through. The budget
counts in Redis. The other limiters are in `llm_limiters.py`. With `--outside`, an additional client without a limiter uses
about a tenth of the account's tokens. LiteLLM counts per minute: compare it with `--period 60`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import IO, Any

import httpx

from benchmarks.llm_limiters import MODEL, Account, Ask, budget_rules, open_client
from headgate import Limiter
from headgate.testing.servers import RedisServer

ACCOUNT = Account()
ESTIMATE = 250
PROMPT = [{"role": "user", "content": "word " * 20}]
SECONDS_PER_CALL = 1.0


class Outcomes:
    """The outcomes of the calls of one process."""

    def __init__(self) -> None:
        self.calls = self.refused = self.aborted = self.failed = 0


def make_request(random_: random.Random) -> dict[str, Any]:
    """Return a request whose usage differs from its estimate by a factor of 0.2 to 3."""
    factor = random_.choice((0.2, 0.5, 0.8, 1.0, 1.2, 3.0))
    chosen = {
        "usage": str(int(ESTIMATE * factor)),
        "seconds": str(SECONDS_PER_CALL * random_.uniform(0.5, 1.5)),
    }
    return {"model": MODEL, "messages": PROMPT, "max_tokens": ESTIMATE, "metadata": chosen}


async def work(ask: Ask, random_: random.Random, outcomes: Outcomes, ends: float) -> None:
    """Make calls until the end."""
    while time.monotonic() < ends:
        request = make_request(random_)
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
    """Run one process of callers: print a line when ready, start after a line of input, and print the outcomes."""
    limiter, store, url, account, processes, tasks, seconds, seed = arguments
    outcomes = Outcomes()
    async with open_client(limiter, store, url, Account(**json.loads(account)), int(processes)) as ask:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        ends = time.monotonic() + float(seconds)
        callers = [
            asyncio.create_task(work(ask, random.Random(f"{seed} {number}"), outcomes, ends))
            for number in range(int(tasks))
        ]
        await asyncio.wait(callers, timeout=float(seconds), return_when=asyncio.FIRST_EXCEPTION)
        for caller in callers:
            caller.cancel()
        for ended in await asyncio.gather(*callers, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    print(json.dumps(vars(outcomes)))


def measure(
    limiter: str,
    processes: int,
    tasks: int,
    seconds: float,
    account: Account = ACCOUNT,
    kills: bool = True,
    outside: bool = False,
) -> dict[str, Any]:
    """Run the provider and all processes; return the provider's figures, and the used shares of its quotas."""
    with RedisServer() as redis, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serve = ["--serve", str(listener.fileno()), json.dumps(asdict(account))]
        provider = _start(serve, pass_fds=[listener.fileno()])
        url = f"http://127.0.0.1:{port}"
        own = [redis.url, url, json.dumps(asdict(account)), str(processes)]
        callers = []
        try:
            if outside:
                callers.append(_start(["--process", "outside", *own, "4", str(seconds), "outside"]))
            callers += [
                _start(["--process", limiter, *own, str(tasks), str(seconds), str(number)])
                for number in range(processes)
            ]
            for caller in callers:
                _pipe(caller.stdout).readline()
            for caller in callers:
                _pipe(caller.stdin).write(b"\n")
                _pipe(caller.stdin).flush()
            warm_up = min(account.period * 2.5, seconds / 2)  # until the initial capacity is used up
            time.sleep(warm_up)
            first, started = httpx.get(f"{url}/figures", timeout=60).json(), time.monotonic()
            if kills:
                time.sleep((seconds - warm_up) / 2)
                callers[-1].send_signal(signal.SIGKILL)
            # Do not measure the last seconds, in which the tasks end.
            time.sleep(max(0.0, seconds - warm_up - 3 - (time.monotonic() - started)))
            with Limiter(*budget_rules(account), name="provider", store=redis.url) as counts:
                left = {result.name: result.remaining for result in counts.check(MODEL, 0).results}
            last, ended = httpx.get(f"{url}/figures", timeout=60).json(), time.monotonic()
            outputs = [caller.communicate(timeout=120)[0] for caller in callers]
            final = httpx.get(f"{url}/figures", timeout=60).json()
        finally:
            for child in (provider, *callers):
                child.kill()
                with child:  # waits for its end, and closes its pipes
                    pass
    found = [json.loads(output) for output in outputs if output]
    others = [found.pop(0)] if outside else []
    elapsed = (ended - started) / account.period
    return {
        "limiter": limiter,
        "calls": final["statuses"].get("200", 0),
        "refused": final["statuses"].get("429", 0),
        "refusals": final["refusals"],
        "aborted": sum(outcome["aborted"] for outcome in found),
        "failed": sum(outcome["failed"] for outcome in found),
        "outside": [(outcome["calls"], outcome["refused"]) for outcome in others],
        "processes that ended": len(found),
        "left": left,
        "requests used": used_share("requests", account.requests * elapsed, first, last),
        "tokens used": used_share("tokens", account.tokens * elapsed, first, last),
    }


def _start(arguments: list[str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.llm", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def used_share(unit: str, refilled: float, first: dict[str, Any], last: dict[str, Any]) -> float:
    """Return the used share of the units that were refilled or left at the beginning."""
    left_over = max(0.0, first[f"{unit} left"] - last[f"{unit} left"])
    share: float = (last[unit] - first[unit]) / (refilled + left_over)
    return share


def serve(descriptor: int, limits: dict[str, Any]) -> None:
    """Run the provider on an open socket."""
    import uvicorn

    from benchmarks.provider import Limits, Provider

    provider = Provider(Limits(**limits), time.monotonic)
    config = uvicorn.Config(
        provider, log_level="critical", lifespan="off", access_log=False, timeout_keep_alive=600
    )
    with socket.socket(fileno=descriptor) as listener:
        uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("limiters", nargs="*", default=["headgate"], metavar="limiter")
    parser.add_argument("--outside", action="store_true")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--requests", type=int, default=ACCOUNT.requests, help="requests per period")
    parser.add_argument("--tokens", type=int, default=ACCOUNT.tokens, help="tokens per period")
    parser.add_argument(
        "--period", type=float, default=ACCOUNT.period, help="seconds; real providers have 60"
    )
    options = parser.parse_args()
    account = replace(ACCOUNT, requests=options.requests, tokens=options.tokens, period=options.period)
    print("| Limiter | Calls | 429 | Requests used | Tokens used | Abandoned streams |")
    print("| --- | --- | --- | --- | --- | --- |")
    for limiter in options.limiters:
        found = measure(
            limiter, options.processes, options.tasks, options.seconds, account, outside=options.outside
        )
        print(
            f"| {limiter} | {found['calls']:,} | {found['refused']:,} | {found['requests used']:.1%} "
            f"| {found['tokens used']:.1%} | {found['aborted']} |",
            flush=True,
        )
        print(f"<!-- load {os.getloadavg()}, {found} -->", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), json.loads(sys.argv[3]))
    elif sys.argv[1:2] == ["--process"]:
        asyncio.run(process(sys.argv[2:]))
    else:
        main()
