"""The load test of docs/RATE_LIMIT_LOAD_TEST_PLAN.md: two instances, one Redis, flag off and on.

It runs on this machine only: two child processes and a few clients, for a given time. The expected numbers are computed from
the bucket and the measured time, so the result does not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from math import ceil, floor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from redis.asyncio import Redis

from headgate_services.common.databases import database_url
from headgate_services.tiers.backends import state_keys
from headgate_services.tiers.config import TiersSettings
from headgate_services.tiers.keys import KeyTable
from headgate_services.tiers.limits import TierLimit

STEADY = TierLimit(600, 60)
_LIMITS = f"anonymous=5, steady={STEADY.limit} burst {STEADY.capacity}, single=1 burst 1"
_AT_ONCE = 100
_TTL_PAUSE = 0.2
_REQUEST_TIMEOUT = 60.0
_OUR_VARIABLES = frozenset(name.upper() for name in TiersSettings.model_fields)


@dataclass
class Check:
    """A check and the observed values."""

    name: str
    passed: bool
    seen: str

    def __str__(self) -> str:
        return f"  {'pass' if self.passed else 'FAIL'}  {self.name}: {self.seen}"


@dataclass
class Instance:
    """A child process that runs the service."""

    url: str
    log: list[str]


@dataclass
class Run:
    """The statuses that clients got, and the times that bound the expected number of admitted requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    first_sent: float = float("inf")
    first_answered: float = float("inf")
    last_sent: float = 0.0
    last_answered: float = 0.0

    async def send(self, client: httpx.AsyncClient, key: str) -> None:
        """Send one request."""
        sent = time.monotonic()
        answer = await client.get("/v1/whoami", headers={"X-API-Key": key})
        answered = time.monotonic()
        self.statuses[answer.status_code] += 1
        self.first_sent, self.first_answered = min(self.first_sent, sent), min(self.first_answered, answered)
        self.last_sent, self.last_answered = max(self.last_sent, sent), max(self.last_answered, answered)

    def theory(self, limit: TierLimit) -> tuple[int, int]:
        """Return the fewest and the most requests that a bucket admits under constant load."""
        rate = limit.bucket().refill_rate
        shortest, longest = self.last_sent - self.first_answered, self.last_answered - self.first_sent
        return limit.capacity + floor(rate * shortest) - 1, limit.capacity + floor(rate * longest)


def load_test(redis_url: str, *, seconds: float = 10.0, clients: int = 16) -> int:
    """Run the plan and print the results; return 0 if all checks pass, otherwise 1.

    Args:
        redis_url: A Redis without other clients; the test writes keys that begin with `ratelimit:user:`.
        seconds: Duration of the load in each mode.
        clients: Number of concurrent requests.
    """
    checks = asyncio.run(_run_plan(redis_url, seconds, clients))
    failed = sum(not check.passed for check in checks)
    print(f"{'FAIL' if failed else 'PASS'}: {len(checks) - failed} of {len(checks)} checks hold")
    return 1 if failed else 0


async def _run_plan(redis_url: str, seconds: float, clients: int) -> list[Check]:
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="headgate-load-") as folder:
        for atomic in (False, True):
            print(f"SAJU_ENABLE_ATOMIC_RATE_LIMITER={str(atomic).lower()}, two instances, {seconds:g} s")
            async for check in _run_mode(Path(folder), redis_url, atomic, seconds, clients):
                print(check, flush=True)
                checks.append(check)
    return checks


async def _run_mode(
    folder: Path, redis_url: str, atomic: bool, seconds: float, clients: int
) -> AsyncIterator[Check]:
    variables = {
        "SAJU_ENABLE_RATE_LIMITING": "true",
        "SAJU_ENABLE_ATOMIC_RATE_LIMITER": str(atomic).lower(),
        "SAJU_REDIS_URL": redis_url,
        "SAJU_REDIS_TIMEOUT": "30",  # so that a slow machine does not look like an outage
        "SAJU_RATE_LIMITS": _LIMITS,
        "DATABASE_URL": f"sqlite:///{folder / 'keys.db'}",
        "LOG_LEVEL": "debug",
    }
    keys = KeyTable(database_url(variables["DATABASE_URL"]))
    await keys.prepare()
    steady = await keys.create(f"steady-{secrets.token_hex(4)}", "steady")
    single = await keys.create(f"single-{secrets.token_hex(4)}", "single")
    await keys.aclose()
    logs: list[str] = []
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(Redis.from_url(redis_url))
        instances = [await stack.enter_async_context(_instance(variables)) for _ in range(2)]
        ends = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=instance.url, timeout=_REQUEST_TIMEOUT)
            )
            for instance in instances
        ]
        script_calls = await _calls(redis, "evalsha")
        burst = Run()
        await asyncio.gather(*(burst.send(ends[number % 2], single.key) for number in range(_AT_ONCE)))
        yield _burst_check(burst)
        ttls: set[int] = set()
        run = await _under_load(ends, steady.key, seconds, clients, redis, steady.user.id, ttls)
        requests = sum(burst.statuses.values()) + sum(run.statuses.values())
        for check in (
            *_load_checks(run),
            _ttl_check(ttls),
            _script_check(await _calls(redis, "evalsha") - script_calls, requests if atomic else 0),
        ):
            yield check
        logs = [line for instance in instances for line in instance.log]
    for check in _log_checks(logs, redis_url):
        yield check


async def _under_load(
    ends: list[httpx.AsyncClient],
    key: str,
    seconds: float,
    clients: int,
    redis: Redis,
    user_id: str,
    ttls: set[int],
) -> Run:
    run = Run()
    await run.send(ends[0], key)  # creates the bucket
    end = time.monotonic() + seconds

    async def demand(number: int) -> None:
        while time.monotonic() < end:
            await run.send(ends[number % 2], key)

    async def watch() -> None:
        tokens, since = state_keys(f"user:{user_id}")
        while time.monotonic() < end:
            ttls.update({await redis.ttl(tokens), await redis.ttl(since)})
            await asyncio.sleep(_TTL_PAUSE)

    await asyncio.gather(watch(), *(demand(number) for number in range(clients)))
    return run


def _burst_check(run: Run) -> Check:
    seen = dict(sorted(run.statuses.items()))
    name = f"capacity 1, {_AT_ONCE} at once: exactly one is admitted"
    return Check(name, run.statuses == {200: 1, 429: _AT_ONCE - 1}, f"{seen}")


def _load_checks(run: Run) -> Iterator[Check]:
    fewest, most = run.theory(STEADY)
    admitted, refused = run.statuses[200], run.statuses[429]
    total = sum(run.statuses.values())
    span = run.last_answered - run.first_sent
    most_refused = max(0, total - fewest)  # a slow machine may send fewer requests than the bucket admits
    yield Check(
        "nothing is admitted twice",
        admitted <= most,
        f"{admitted} admitted, at most {most} in {span:.2f} s ({total / span:.0f} requests/s)",
    )
    yield Check(
        "no more 429 than in theory",
        refused <= most_refused,
        f"{refused} of {total} refused, at most {most_refused}",
    )
    others = {status: count for status, count in run.statuses.items() if status not in (200, 429)}
    yield Check("no errors", not others, f"{others or 'only 200 and 429'}")


def _ttl_check(ttls: set[int]) -> Check:
    ttl = STEADY.bucket().ttl
    least = ceil(STEADY.capacity / STEADY.bucket().refill_rate)
    passed = bool(ttls) and all(least - 1 <= seen <= ttl for seen in ttls)
    return Check(
        "TTLs are stable", passed, f"{min(ttls, default=None)} to {max(ttls, default=None)} s of {ttl}"
    )


def _script_check(calls: int, expected: int) -> Check:
    return Check("one EVALSHA per request with the flag, none without", calls == expected, f"{calls} calls")


def _log_checks(lines: list[str], redis_url: str) -> Iterator[Check]:
    bad = [line for line in lines if " ERROR " in line or " WARNING " in line or "Traceback" in line]
    yield Check("no warnings or errors in the logs", not bad, f"{len(lines)} lines, {bad[:1] or 'none'}")
    password = urlsplit(redis_url).password
    if password:
        found = sum(password in line or unquote(password) in line for line in lines)
        yield Check("no credentials in the logs", not found, f"{found} lines")


async def _calls(redis: Redis, command: str) -> int:
    """Return the number of calls of a command."""
    stats: Any = await redis.info("commandstats")
    calls: int = stats.get(f"cmdstat_{command}", {"calls": 0})["calls"]
    return calls


@asynccontextmanager
async def _instance(variables: dict[str, str]) -> AsyncIterator[Instance]:
    """Run the service on a free port until the block ends."""
    environment = {name: value for name, value in os.environ.items() if name not in _OUR_VARIABLES}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headgate_server.cli", "run", "tiers", "--host", "127.0.0.1", "--port", "0"),
        env={**environment, **variables},
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
    )
    assert process.stderr is not None
    log: list[str] = []
    drained = asyncio.create_task(_drain(process.stderr, log, started := asyncio.Event()))
    try:
        await started.wait()
        url = next((found[1] for line in log if (found := re.search(r"running on (http://\S+)", line))), None)
        if url is None:
            raise RuntimeError("the service did not start:\n" + "".join(log))
        yield Instance(url, log)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await drained


async def _drain(stream: asyncio.StreamReader, log: list[str], started: asyncio.Event) -> None:
    """Read the log of the service to its end."""
    async for line in stream:
        log.append(line.decode())
        if b"running on http" in line:
            started.set()
    started.set()
