"""Three back ends for buckets, with the same results.

    atomic    one script call on the server: `token_bucket.lua`
    pipeline  read, decide in this process, and write in a transaction that fails if another client wrote in between
    memory    this process, with Headgate's token bucket

The first two use the same keys, so a request may fall back from one to the other at any time. A refusal writes nothing, and
unused buckets expire.

The server's clock is used. The script gets the caller's time as an argument, but uses it only if it is far in the past
(see `token_bucket.lua`); the pipeline queries the server's clock. Tests pass a clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError, WatchError

from headgate import Decision, Limiter, MemoryStore, Quota, StoreConflict, token_bucket
from headgate.clock import MICROSECONDS, Clock, SteadyClock
from headgate_services.tiers.bucket import Bucket, Contents, Outcome, whole_seconds
from headgate_services.tiers.log import LimitedLog, log

SCRIPT = "token_bucket.lua"
MAX_KEYS = 100_000
"""The most buckets in memory; further keys share one bucket."""

MOST_TRIES = 64
_TURNS = 256
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_CLOCK_AGE = 3600.0

UNREADABLE = "the value of {} is not a bucket"


def state_keys(key: str) -> tuple[str, str]:
    """Return the two Redis keys of a bucket: its tokens, and the time of that number."""
    return f"ratelimit:{key}:tokens", f"ratelimit:{key}:time"


def read_script() -> str:
    """Return the text of the script.

    Raises:
        OSError: The file cannot be read.
    """
    return resources.files(__package__).joinpath(SCRIPT).read_text(encoding="utf-8")


class AtomicBackend:
    """The script, registered on first use.

    If registering fails, it is tried again after growing pauses. If the server lost the script by a restart, it is
    registered again.

    Args:
        client: The client of the server.
        clock: A clock for tests, instead of the server's.
        monotonic: Monotonic seconds, for the pauses.
    """

    def __init__(
        self, client: Redis, clock: Clock | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._clock = clock
        self._own_clock = SteadyClock()
        self._ahead_us = 0  # the server's clock minus ours
        self._monotonic = monotonic
        self._sha: str | None = None
        self._pause = _FIRST_PAUSE
        self._next_try = float("-inf")  # when to register, for the first time or again
        self._registering = asyncio.Lock()
        self._complain = LimitedLog()

    async def take(self, bucket: Bucket, key: str, cost: int) -> Outcome | None:
        """Run the script and return its result; `None`, after a warning, if only the script cannot be used.

        Raises:
            RedisError: The server cannot be reached.
        """
        sha = await self._registered()
        if sha is None:
            return None
        try:
            return await self._run(sha, bucket, key, cost)
        except NoScriptError:
            self._next_try = float("-inf")
        except ResponseError as error:
            self._complain(
                logging.WARNING,
                "Rate limiting: atomic script failed, using the pipeline for this request: %s",
                error,
            )
            return None
        # Nothing was charged, because the server did not have the script.
        sha = await self._registered()
        return None if sha is None else await self._run(sha, bucket, key, cost)

    async def _run(self, sha: str, bucket: Bucket, key: str, cost: int) -> Outcome:
        now_us = self._now_us()
        reply: Any = await self._client.evalsha(
            sha,
            2,
            *state_keys(key),
            str(bucket.capacity),
            repr(bucket.refill_rate),
            str(cost),
            f"{now_us / MICROSECONDS:.6f}",
            str(bucket.ttl),
        )
        allowed, retry_after, remaining = reply
        return bucket.outcome(bool(allowed), int(retry_after), float(remaining), now_us, "atomic")

    def _now_us(self) -> int:
        if self._clock is not None:
            return self._clock.now_us()
        return self._own_clock.now_us() + self._ahead_us

    async def _registered(self) -> str | None:
        if self._monotonic() >= self._next_try:
            async with self._registering:  # concurrent requests wait for the first one
                if self._monotonic() >= self._next_try:
                    await self._register()
        return self._sha

    async def _register(self) -> None:
        self._sha = None
        try:
            script = read_script()
        except OSError as error:
            self._postpone(error)
            return
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.script_load(script)
            pipeline.time()
            sha, clock = await pipeline.execute(raise_on_error=False)
        for reply in (sha, clock):
            if isinstance(reply, Exception):
                self._postpone(reply)
                return
        self._sha = sha if isinstance(sha, str) else sha.decode()
        self._ahead_us = clock[0] * MICROSECONDS + clock[1] - self._own_clock.now_us()
        self._pause = _FIRST_PAUSE
        self._next_try = self._monotonic() + _CLOCK_AGE  # the clocks are compared again, because they drift

    def _postpone(self, error: Exception) -> None:
        log(
            logging.WARNING,
            "Rate limiting: atomic script not registered, using the pipeline for the next %g s: %s",
            self._pause,
            error,
        )
        self._next_try = self._monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class PipelineBackend:
    """Reads, decides here, and writes, for servers without scripts.

    With WATCH, the write fails if another client wrote in between; then the request is decided again. A refusal writes
    nothing, so each lost race means that another request was admitted. Requests of this process for the same key wait for
    each other.

    Args:
        client: The client of the server.
        clock: A clock for tests, instead of the server's.
    """

    def __init__(self, client: Redis, clock: Clock | None = None) -> None:
        self._client = client
        self._clock = clock
        self._turns = [asyncio.Lock() for _ in range(_TURNS)]

    async def take(self, bucket: Bucket, key: str, cost: int) -> Outcome:
        """Take tokens from a bucket.

        Raises:
            RedisError: The server cannot be reached, or refuses a command.
            StoreConflict: The stored value is not a bucket.
        """
        async with self._turns[hash(key) % _TURNS], self._client.pipeline() as pipeline:
            return await self._decide(pipeline, bucket, key, cost)

    async def _decide(self, pipeline: Any, bucket: Bucket, key: str, cost: int) -> Outcome:
        tokens_key, time_key = state_keys(key)
        for _ in range(MOST_TRIES):
            await pipeline.watch(tokens_key, time_key)
            tokens, since = await pipeline.get(tokens_key), await pipeline.get(time_key)
            seconds, microseconds = await pipeline.time()
            now_us = seconds * MICROSECONDS + microseconds if self._clock is None else self._clock.now_us()
            after, outcome = bucket.take(_contents(tokens, since, tokens_key), now_us, cost, "pipeline")
            if after is None:
                return outcome
            pipeline.multi()
            for name, value in (
                (tokens_key, f"{after.tokens:.17g}"),
                (time_key, f"{after.time_us / MICROSECONDS:.6f}"),
            ):
                pipeline.execute_command("SETEX", name, bucket.ttl, value)
            with suppress(WatchError):
                await pipeline.execute()
                return outcome
        # Each attempt failed because another request was admitted, so refuse this one.
        return bucket.outcome(False, 1, outcome.remaining, now_us, "pipeline")


def _contents(tokens: bytes | None, since: bytes | None, key: str) -> Contents | None:
    if tokens is None or since is None:
        return None
    try:
        return Contents(float(tokens), round(float(since) * MICROSECONDS))
    except (ValueError, OverflowError) as error:
        raise StoreConflict(UNREADABLE.format(key)) from error


class MemoryBackend:
    """Buckets in this process, with Headgate's token bucket.

    Args:
        clock: The clock; by default the monotonic clock.
        max_keys: The most buckets.
    """

    def __init__(self, clock: Clock | None = None, max_keys: int = MAX_KEYS) -> None:
        self.store = MemoryStore(clock=clock, max_keys=max_keys)
        self._limiters: dict[Bucket, Limiter] = {}

    def take(self, bucket: Bucket, key: str, cost: int) -> Outcome:
        """Take tokens from a bucket."""
        now_us = self.store.clock.now_us()
        decision = self._limiter(bucket).hit(key, cost)
        retry_after = 0 if decision.retry_after_us is None else whole_seconds(decision.retry_after_us)
        return bucket.outcome(decision.allowed, retry_after, _remaining(bucket, decision), now_us, "memory")

    def _limiter(self, bucket: Bucket) -> Limiter:
        if bucket not in self._limiters:
            # All tiers with a whole rate per minute share a state, so a new tier does not refill the bucket.
            self._limiters[bucket] = Limiter(token_bucket(_quota(bucket)), name="tiers", store=self.store)
        return self._limiters[bucket]


def _remaining(bucket: Bucket, decision: Decision) -> float:
    """Return the remaining tokens with their fraction.

    The library rounds down; the fraction follows from the time until the bucket is full, unless the caller just changed
    tier and the bucket still fills at the old rate.
    """
    whole = decision.remaining or 0
    exact = bucket.capacity - (decision.reset_after_us or 0) / MICROSECONDS * bucket.refill_rate
    return exact if whole <= exact < whole + 1 else whole


def _quota(bucket: Bucket) -> Quota:
    if isinstance(bucket.per_us, int):
        return Quota.of(bucket.per_us, 60, burst=bucket.capacity)
    # The error of the fraction is too small to matter.
    rate = Fraction(bucket.refill_rate).limit_denominator(1_000_000)
    return Quota.of(rate.numerator, rate.denominator, burst=bucket.capacity)
