"""The limiter, with its choice of back end.

The order is: the script, if enabled; the pipeline; and without Redis, or while Redis is down, memory. During an outage each
process limits separately, starting with full buckets. An outage costs one timeout, not one per request, and probes detect
its end.
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
"""Time limit for a reply of Redis, in seconds."""


class Backends:
    """The back ends of a service, shared by the limiters of all tiers.

    Args:
        client: The Redis client; without it, all buckets are in memory.
        atomic: Whether to use the script.
        clock: A clock for tests.
        deadline: Time limit for a reply of Redis, in seconds.
        monotonic: Monotonic seconds, for pauses between attempts.
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
        self.deadline = deadline
        self._client = client
        self._atomic = AtomicBackend(client, clock, monotonic) if atomic and client is not None else None
        self._pipeline = PipelineBackend(client, clock) if client is not None else None
        self._circuit = AsyncCircuit(Breaker(self, monotonic), self._probe)
        self._complain = LimitedLog()

    def __repr__(self) -> str:
        settings = {} if self._client is None else self._client.connection_pool.connection_kwargs
        if path := settings.get("path"):
            return f"Redis at unix:{path}"
        return f"Redis at {settings.get('host', 'localhost')}:{settings.get('port', 6379)}"

    async def take(self, bucket: Bucket, key: str, cost: int) -> Outcome:
        """Take tokens from a bucket; use memory if Redis fails."""
        if self._client is None:
            return self.memory.take(bucket, key, cost)
        try:
            return await self._circuit.call(True, self._ask_redis, bucket, key, cost)
        except StoreError:
            return self.memory.take(bucket, key, cost)

    async def ping(self) -> None:
        """Check that Redis can be used, by taking a token from a separate bucket.

        Raises:
            StoreUnavailable: Redis is down.
            StoreMisconfigured: Redis refuses the credentials or a command.
        """
        if self._client is not None:
            await self._ask_redis(Bucket(1, 1.0), "headgate:ping", 1)

    async def _ask_redis(self, bucket: Bucket, key: str, cost: int) -> Outcome:
        assert self._pipeline is not None
        try:
            async with asyncio.timeout(self.deadline):
                outcome = None if self._atomic is None else await self._atomic.take(bucket, key, cost)
                return await self._pipeline.take(bucket, key, cost) if outcome is None else outcome
        except Exception as error:  # the caller passed the Redis client; its errors are of any type
            raise self._error(error, key) from error

    def _error(self, error: Exception, key: str) -> StoreError:
        """Translate and log an error."""
        if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
            error = StoreConflict(UNREADABLE.format(state_keys(key)[0]))
        # Only the first error of an outage is logged; then the breaker is open.
        if self._circuit.breaker.is_closed:
            self._complain(logging.ERROR, "Rate limit check failed: %s", str(error) or type(error).__name__)
        if isinstance(error, StoreError):
            return error
        kind = StoreMisconfigured if is_refusal(error) else StoreUnavailable
        return kind(_redact_redis_credentials(str(error) or type(error).__name__))

    async def _probe(self) -> None:
        """Check whether Redis is back."""
        client: Any = self._client
        try:
            async with asyncio.timeout(self.deadline):
                await client.ping()
        except (RedisError, OSError) as error:
            log(logging.DEBUG, "Rate limiting: Redis is still down: %s", error)
            raise StoreUnavailable(_redact_redis_credentials(str(error) or type(error).__name__)) from error


class TokenBucketRateLimiter:
    """A limiter with one bucket per key.

    Args:
        capacity: The most tokens of a bucket.
        refill_rate: Tokens per second.
        redis_client: The Redis client; without it, buckets are in this process.
        use_atomic_redis: Whether to use the script instead of the pipeline.
    """

    def __init__(
        self,
        capacity: int,
        refill_rate: float,
        redis_client: Redis | None = None,
        *,
        use_atomic_redis: bool = False,
    ) -> None:
        self.bucket = Bucket(capacity, refill_rate)
        self._backends = Backends(redis_client, atomic=use_atomic_redis)

    async def take(self, key: str, cost: int = 1) -> Outcome:
        """Take tokens from the bucket of a key, if there are enough.

        Raises:
            CostTooHigh: The cost is above the capacity.
            ConfigError: The cost is not a whole number of at least 0.
        """
        self.bucket.check_cost(cost)
        return await self._backends.take(self.bucket, key, cost)

    async def check_rate_limit(self, key: str, cost: int = 1) -> tuple[bool, int]:
        """Like `take`, but return whether it was allowed and the whole seconds to wait."""
        outcome = await self.take(key, cost)
        return outcome.allowed, outcome.retry_after
