"""The token bucket as pure functions.

Counts are integers: a token is 60,000,000 parts, so a rate of n tokens per minute refills n parts per microsecond without
drift. Other rates refill whole parts too, at most one part too few per admission. `token_bucket.lua` is a port of
`Bucket.take` with the same steps; both use doubles for rates that are not whole, so their results are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, isfinite
from typing import Literal, NamedTuple

from headgate import ConfigError, CostTooHigh
from headgate.clock import MICROSECONDS

PARTS = 60_000_000
"""Parts in a token: the microseconds of a minute, because limits are per minute."""

MAX_CAPACITY = 100_000_000
"""The most tokens whose parts are exact in a double."""

_CLOSE = 1e-9
_SLACK = 0.001

Backend = Literal["atomic", "pipeline", "memory"]


class Outcome(NamedTuple):
    """The result of a call.

    Attributes:
        allowed: Whether the tokens were taken.
        retry_after: Whole seconds until the call would be admitted; 0 if it was admitted.
        remaining: The remaining tokens, with their fraction.
        reset_after: Whole seconds until the bucket is full, rounded up.
        now_us: The time of the decision.
        backend: The back end that decided.
    """

    allowed: bool
    retry_after: int
    remaining: float
    reset_after: int
    now_us: int
    backend: Backend

    @property
    def reset_at(self) -> int:
        """The time when the bucket is full, in whole seconds since the epoch."""
        return self.now_us // MICROSECONDS + self.reset_after


class Contents(NamedTuple):
    """The stored state of a bucket: the tokens, and the time of that number."""

    tokens: float
    time_us: int


@dataclass(frozen=True)
class Bucket:
    """The parameters of a bucket.

    Attributes:
        capacity: The most tokens; a new bucket is full.
        refill_rate: Tokens per second.
    """

    capacity: int
    refill_rate: float

    def __post_init__(self) -> None:
        if type(self.capacity) is not int or not 1 <= self.capacity <= MAX_CAPACITY:
            raise ConfigError(
                f"capacity is a whole number from 1 to {MAX_CAPACITY:,} tokens, not {self.capacity!r}"
            )
        if not (isfinite(self.refill_rate) and self.refill_rate > 0):
            raise ConfigError(
                f"refill_rate is a number of tokens per second above 0, not {self.refill_rate!r}"
            )

    @cached_property
    def ttl(self) -> int:
        """Seconds until the state expires: twice the time to fill an empty bucket."""
        return max(1, ceil(2 * self.capacity / self.refill_rate))

    @cached_property
    def per_us(self) -> float:
        """Parts refilled per microsecond; an integer if the rate is a whole number per minute."""
        per_us = self.refill_rate * 60
        nearest = floor(per_us + 0.5)
        return nearest if abs(per_us - nearest) <= _CLOSE * per_us else per_us

    @cached_property
    def _slack(self) -> float:
        return 0 if isinstance(self.per_us, int) else _SLACK

    def check_cost(self, cost: int) -> None:
        """Check the cost of a call.

        Raises:
            CostTooHigh: It is above the capacity.
            ConfigError: It is not a whole number of at least 0.
        """
        if type(cost) is not int or cost < 0:
            raise ConfigError(f"a cost is a whole number of at least 0, not {cost!r}")
        if cost > self.capacity:
            raise CostTooHigh(cost, self.capacity, "token_bucket")

    def take(
        self, contents: Contents | None, now_us: int, cost: int, backend: Backend
    ) -> tuple[Contents | None, Outcome]:
        """Return the new state, or None if it does not change, and the result."""
        tokens, time_us = self.capacity * PARTS, now_us
        if contents is not None:
            time_us = max(now_us, contents.time_us)
            refilled = floor((time_us - contents.time_us) * self.per_us + self._slack)
            tokens = min(tokens, floor(contents.tokens * PARTS + 0.5) + refilled)
        missing = cost * PARTS - tokens
        if missing <= 0:
            left = -missing / PARTS
            return Contents(left, time_us), self.outcome(True, 0, left, now_us, backend)
        # If the clock went back, the caller also has to wait until it catches up.
        wait_us = ceil((missing - self._slack) / self.per_us) + (time_us - now_us)
        return None, self.outcome(False, whole_seconds(wait_us), tokens / PARTS, now_us, backend)

    def outcome(
        self, allowed: bool, retry_after: int, remaining: float, now_us: int, backend: Backend
    ) -> Outcome:
        """Return a result, with the time until the bucket is full."""
        missing = self.capacity * PARTS - floor(remaining * PARTS + 0.5)
        reset_us = ceil(max(0, missing - self._slack) / self.per_us)
        return Outcome(allowed, retry_after, remaining, -(-reset_us // MICROSECONDS), now_us, backend)


def whole_seconds(wait_us: int) -> int:
    """Return a wait in whole seconds, rounded up, at least 1."""
    return max(1, -(-wait_us // MICROSECONDS))
