"""The load test of docs/RATE_LIMIT_LOAD_TEST_PLAN.md: two instances of the limiter, one Redis, flag off and on.

The instances run in this process and share nothing but Redis. The expected numbers are computed from the bucket and the
measured time, so the result does not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis

from headgate_services.common.starting import set_up_log
from headgate_services.tiers.backends import state_keys
from headgate_services.tiers.bucket import Backend, Bucket
from headgate_services.tiers.middleware import setup_rate_limiting
from headgate_services.tiers.rate_limiter import Backends

SINGLE = Bucket(1, 1 / 60)
STEADY = Bucket(60, 10.0)
_AT_ONCE = 100
_TTL_PAUSE = 0.2
_PATIENCE = 30.0  # seconds for a reply of Redis, so that a slow machine does not look like an outage


@dataclass
class Check:
    """A check and the observed values."""

    name: str
    passed: bool
    seen: str

    def __str__(self) -> str:
        return f"  {'pass' if self.passed else 'FAIL'}  {self.name}: {self.seen}"


@dataclass
class Run:
    """The decisions of a load, and the times that bound the expected number of admitted requests."""

    admitted: int = 0
    refused: int = 0
    backends: Counter[Backend] = field(default_factory=Counter)
    first_sent: float = float("inf")
    first_answered: float = float("inf")
    last_sent: float = 0.0
    last_answered: float = 0.0

    async def send(self, instance: Backends, bucket: Bucket, key: str) -> None:
        """Take one token."""
        sent = time.monotonic()
        outcome = await instance.take(bucket, key, 1)
        answered = time.monotonic()
        self.admitted += outcome.allowed
        self.refused += not outcome.allowed
        self.backends[outcome.backend] += 1
        self.first_sent, self.first_answered = min(self.first_sent, sent), min(self.first_answered, answered)
        self.last_sent, self.last_answered = max(self.last_sent, sent), max(self.last_answered, answered)

    def theory(self, bucket: Bucket) -> tuple[int, int]:
        """Return the fewest and the most requests that a bucket admits under constant load."""
        shortest, longest = self.last_sent - self.first_answered, self.last_answered - self.first_sent
        fewest = bucket.capacity + floor(bucket.refill_rate * shortest) - 1
        return fewest, bucket.capacity + floor(bucket.refill_rate * longest)


def load_test(redis_url: str, *, seconds: float = 10.0, clients: int = 16) -> int:
    """Run the plan and print the results; return 0 if all checks pass, otherwise 1.

    Args:
        redis_url: A Redis without other clients; the test writes keys that begin with `ratelimit:load-test:`.
        seconds: Duration of the load in each mode.
        clients: Number of concurrent requests.

    Raises:
        StoreError: Redis cannot be used.
    """
    checks = asyncio.run(_run_plan(redis_url, seconds, clients))
    failed = sum(not check.passed for check in checks)
    print(f"{'FAIL' if failed else 'PASS'}: {len(checks) - failed} of {len(checks)} checks hold")
    return 1 if failed else 0


async def _run_plan(redis_url: str, seconds: float, clients: int) -> list[Check]:
    checks: list[Check] = []
    for atomic in (False, True):
        print(f"SAJU_ENABLE_ATOMIC_RATE_LIMITER={str(atomic).lower()}, two instances, {seconds:g} s")
        async for check in _run_mode(redis_url, atomic, seconds, clients):
            print(check, flush=True)
            checks.append(check)
    return checks


async def _run_mode(redis_url: str, atomic: bool, seconds: float, clients: int) -> AsyncIterator[Check]:
    log = _Lines()
    set_up_log(log, "DEBUG")
    key = f"load-test:{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(Redis.from_url(redis_url))
        instances = []
        for _ in range(2):
            client = setup_rate_limiting(redis_url, timeout=_PATIENCE)
            assert client is not None
            await stack.enter_async_context(client)
            instances.append(Backends(client, atomic=atomic, deadline=_PATIENCE))
            await instances[-1].ping()
        script_calls = await _script_calls(redis)
        burst = Run()
        single = f"{key}:single"
        await asyncio.gather(*(burst.send(instances[n % 2], SINGLE, single) for n in range(_AT_ONCE)))
        seen = f"{burst.admitted} admitted, {burst.refused} refused"
        yield Check(f"capacity 1, {_AT_ONCE} at once: exactly one is admitted", burst.admitted == 1, seen)
        ttls: set[int] = set()
        run = await _load(instances, f"{key}:steady", seconds, clients, redis, ttls)
        for check in (*_load_checks(run), _ttl_check(ttls)):
            yield check
        used = burst.backends + run.backends
        calls = await _script_calls(redis) - script_calls
    yield Check("no errors", set(used) == {"atomic" if atomic else "pipeline"}, f"answers of {dict(used)}")
    expected = used.total() if atomic else 0
    yield Check("one EVALSHA per request with the flag, none without", calls == expected, f"{calls} calls")
    for check in _log_checks(log.lines, redis_url):
        yield check


async def _load(
    instances: list[Backends], key: str, seconds: float, clients: int, redis: Redis, ttls: set[int]
) -> Run:
    run = Run()
    await run.send(instances[0], STEADY, key)  # creates the bucket
    end = time.monotonic() + seconds

    async def demand(number: int) -> None:
        while time.monotonic() < end:
            await run.send(instances[number % 2], STEADY, key)

    async def watch() -> None:
        while time.monotonic() < end:
            ttls.update([await redis.ttl(name) for name in state_keys(key)])
            await asyncio.sleep(_TTL_PAUSE)

    await asyncio.gather(watch(), *(demand(number) for number in range(clients)))
    return run


def _load_checks(run: Run) -> Iterator[Check]:
    fewest, most = run.theory(STEADY)
    total = run.admitted + run.refused
    span = run.last_answered - run.first_sent
    most_refused = max(0, total - fewest)  # a slow machine may send fewer requests than the bucket admits
    yield Check(
        "nothing is admitted twice",
        run.admitted <= most,
        f"{run.admitted} admitted, at most {most} in {span:.2f} s ({total / span:.0f} requests/s)",
    )
    yield Check(
        "no more 429 than in theory",
        run.refused <= most_refused,
        f"{run.refused} of {total} refused, at most {most_refused}",
    )


def _ttl_check(ttls: set[int]) -> Check:
    least = ceil(STEADY.capacity / STEADY.refill_rate)
    passed = bool(ttls) and all(least - 1 <= ttl <= STEADY.ttl for ttl in ttls)
    seen = f"{min(ttls, default=None)} to {max(ttls, default=None)} s of {STEADY.ttl}"
    return Check("TTLs are stable", passed, seen)


def _log_checks(lines: list[str], redis_url: str) -> Iterator[Check]:
    bad = [line for line in lines if line.startswith(("ERROR ", "WARNING "))]
    yield Check("no warnings or errors in the logs", not bad, f"{len(lines)} lines, {bad[:1] or 'none'}")
    password = urlsplit(redis_url).password
    if password:
        found = sum(password in line or unquote(password) in line for line in lines)
        yield Check("no credentials in the logs", not found, f"{found} lines")


async def _script_calls(redis: Redis) -> int:
    stats: Any = await redis.info("commandstats")
    calls: int = stats.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return calls


class _Lines(logging.Handler):
    """A log in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
