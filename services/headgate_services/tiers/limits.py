"""Tiers and their limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headgate import ConfigError
from headgate_services.tiers.bucket import MAX_CAPACITY, Bucket

ANONYMOUS = "anonymous"
"""The tier of callers without a user, and of users with an unknown tier."""

SIGNED_IN = "free"
"""The tier of users without a tier."""

DEFAULT_RATE_LIMITS: Mapping[str, int] = MappingProxyType(
    {ANONYMOUS: 5, SIGNED_IN: 10, "plus": 60, "pro": 300}
)
"""Requests per minute by tier."""

WINDOW = 60
"""The period of limits, in seconds."""

_LEAST_CAPACITY = 5
_CAPACITY_SHARE = 6

_TIER = re.compile(r"\s*([\w.-]+)\s*=\s*([0-9]+)(?:\s+burst\s+([0-9]+))?\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class TierLimit:
    """The limit of a tier.

    Attributes:
        limit: Requests per minute.
        capacity: The most requests at once.
    """

    limit: int
    capacity: int

    def __post_init__(self) -> None:
        for number in (self.limit, self.capacity):
            if type(number) is not int or not 1 <= number <= MAX_CAPACITY:
                raise ConfigError(
                    f"a limit is a whole number from 1 to {MAX_CAPACITY:,} a minute, not {number!r}"
                )

    @classmethod
    def of(cls, limit: int | TierLimit) -> TierLimit:
        """Return a limit per minute with the default capacity: a sixth of it, at least 5."""
        if isinstance(limit, TierLimit):
            return limit
        return cls(limit, max(limit // _CAPACITY_SHARE, _LEAST_CAPACITY) if type(limit) is int else 1)

    def bucket(self) -> Bucket:
        """Return the bucket of this limit."""
        return Bucket(self.capacity, self.limit / WINDOW)


def limits_by_tier(rate_limits: Mapping[str, int | TierLimit] | None) -> dict[str, TierLimit]:
    """Return the limit of each tier; a default for `anonymous` is added if it is missing.

    Raises:
        ConfigError: A limit is not a whole number of at least 1.
    """
    given = DEFAULT_RATE_LIMITS if rate_limits is None else rate_limits
    complete = {ANONYMOUS: DEFAULT_RATE_LIMITS[ANONYMOUS], **given}
    return {tier: TierLimit.of(limit) for tier, limit in complete.items()}


def parse_rate_limits(text: str) -> dict[str, TierLimit]:
    """Parse limits such as `anonymous=5, free=10, pro=300 burst 50`.

    Raises:
        ConfigError: The text is invalid, or `anonymous` is missing.
    """
    limits: dict[str, TierLimit] = {}
    for part in text.split(","):
        match = _TIER.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"invalid limit {part.strip()!r}; write 'pro=300' or 'pro=300 burst 50', in requests per minute"
            )
        tier, limit, burst = match.groups()
        if tier in limits:
            raise ConfigError(f"{tier} is listed twice")
        limits[tier] = TierLimit.of(int(limit) if burst is None else TierLimit(int(limit), int(burst)))
    if ANONYMOUS not in limits:
        raise ConfigError(f"{ANONYMOUS} is missing; it is the tier of callers without an API key")
    return limits
