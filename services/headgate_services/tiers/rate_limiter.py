"""The limiter: which back end is asked, and what happens when it does not answer.

Order: the script, if it is wanted; the pipeline; and without Redis, or while Redis is down, this process's memory. While it
is down, every process limits by itself: each admits what a full bucket would, and no more. That costs one time-out per
outage, not one per request, and ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from headgate import StoreConflict, StoreError, StoreMisconfigured, StoreUnavailable
from headgate.clock import Clock
from headgate.outage import AsyncCircuit, Breaker
from headgate.stores.redis import is_refusal
from headgate_services.tiers.backends import (
    UNREADABLE,
    AtomicBackend,
    MemoryBackend,
    PipelineBackend,
    state_keys,
)
from headgate_services.tiers.bucket import Bucket, Outcome
from headgate_services.tiers.log import LimitedLog, _redact_redis_credentials, log

DEADLINE = 1.0
"""Seconds that Redis has for an answer."""


class Backends:
    """All back ends of one service; the limiters of its tiers share them.

    Args:
        client: The client of Redis; without one, everything is in memory.
        atomic: Whether to use the script.
        clock: Where time comes from, for tests.
        deadline: Seconds that Redis has for an answer.
        monotonic: How long it is until something that failed is tried again.
    """

    def __init__(
        self,
        client: Redis | None = None,
        *,
        atomic: bool = False,
        clock: Clock | None = None,
        deadline: float = DEADLINE,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = MemoryBackend(clock)
        self._client = client
        self._deadline = deadline
        self._atomic = AtomicBackend(client, clock, monotonic) if atomic and client is not None else None
        self._pipeline = PipelineBackend(client, clock) if client is not None else None
        self._circuit = AsyncCircuit(Breaker(_Name(client), monotonic), self._probe)
        self._complain = LimitedLog()

    async def take(self, bucket: Bucket, key: str, cost: int) -> Outcome:
        """Take tokens from a bucket, wherever it can be done; never raises for want of Redis."""
        if self._client is None:
            return self.memory.take(bucket, key, cost)
        try:
            return await self._circuit.call(True, self._ask_redis, bucket, key, cost)
        except StoreError:
            return self.memory.take(bucket, key, cost)

    async def ping(self) -> None:
        """Ask Redis whether it can be used, by taking a token from a bucket of its own.

        Raises:
            StoreUnavailable: It is down.
            StoreMisconfigured: It refuses us.
        """
        if self._client is not None:
            await self._ask_redis(Bucket(1, 1.0), "headgate:ping", 1)

    async def _ask_redis(self, bucket: Bucket, key: str, cost: int) -> Outcome:
        assert self._pipeline is not None
        try:
            async with asyncio.timeout(self._deadline):
                outcome = None if self._atomic is None else await self._atomic.take(bucket, key, cost)
                return await self._pipeline.take(bucket, key, cost) if outcome is None else outcome
        except (
            Exception
        ) as error:  # the caller brings the client; whatever that raises must not stop the service
            raise self._error(error, key) from error

    def _error(self, error: Exception, key: str) -> StoreError:
        """Return what a failure means, and log it."""
        if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
            error = StoreConflict(UNREADABLE.format(state_keys(key)[0]))
        # Of the many requests that an outage meets, the first one speaks for all; the breaker keeps the others away.
        if self._circuit.breaker.is_closed:
            self._complain(logging.ERROR, "Rate limit check failed: %s", str(error) or type(error).__name__)
        if isinstance(error, StoreError):
            return error
        kind = StoreMisconfigured if is_refusal(error) else StoreUnavailable
        return kind(_redact_redis_credentials(str(error) or type(error).__name__))

    async def _probe(self) -> None:
        """Look whether Redis is back."""
        client: Any = self._client
        try:
            async with asyncio.timeout(self._deadline):
                await client.ping()
        except (RedisError, OSError) as error:
            log(logging.DEBUG, "Rate limiting: Redis is still away: %s", error)
            raise StoreUnavailable(_redact_redis_credentials(str(error) or type(error).__name__)) from error


class TokenBucketRateLimiter:
    """Limits with buckets of one kind, one per key.

    Args:
        capacity: The most tokens that a bucket holds.
        refill_rate: Tokens per second.
        redis_client: Where buckets are kept; without, in this process.
        use_atomic_redis: Whether each check is one script call; otherwise a transaction.
        backends: What limiters share, instead of a client of this one's own.
    """

    def __init__(
        self,
        capacity: int,
        refill_rate: float,
        redis_client: Redis | None = None,
        *,
        use_atomic_redis: bool = False,
        backends: Backends | None = None,
    ) -> None:
        self.bucket = Bucket(capacity, refill_rate)
        self._backends = backends or Backends(redis_client, atomic=use_atomic_redis)

    async def take(self, key: str, cost: int = 1) -> Outcome:
        """Take tokens from a key's bucket if there are enough, and return everything there is to say about it.

        Raises:
            CostTooHigh: The cost is above the capacity, so no waiting would help.
            ConfigError: It is not a whole number of at least 0.
        """
        self.bucket.check_cost(cost)
        return await self._backends.take(self.bucket, key, cost)

    async def check_rate_limit(self, key: str, cost: int = 1) -> tuple[bool, int]:
        """As `take`; return whether it was allowed, and the whole seconds to wait if it was not."""
        outcome = await self.take(key, cost)
        return outcome.allowed, outcome.retry_after


class _Name:
    """What a server is called in messages."""

    def __init__(self, client: Redis | None) -> None:
        self._client = client

    def __repr__(self) -> str:
        settings = {} if self._client is None else self._client.connection_pool.connection_kwargs
        if path := settings.get("path"):
            return f"Redis at unix:{path}"
        return f"Redis at {settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
