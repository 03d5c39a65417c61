"""The limit and the queue, as operators set them.

Each field is an environment variable; `load_petition_config` reads them. A value that cannot work is refused with the
variable's name: a limit that silently becomes another one is worse than a service that does not start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from headgate_services.petitions.config.environment import Environment, SettingsError

LONGEST_WINDOW_MINUTES = 1_440
LARGEST_LIMIT = 2**31 - 1
"""What the count's column, an INTEGER, can hold."""


@dataclass(frozen=True, slots=True)
class PetitionQueueConfig:
    """How many petitions may wait.

    Attributes:
        threshold: So many waiting petitions, and no more are taken.
        hysteresis: They are taken again once fewer than threshold - hysteresis wait.
        cache_ttl_seconds: How long the number of waiting petitions is believed before it is counted again.
        retry_after_seconds: What a refused client is told to wait.
    """

    threshold: int = 10_000
    hysteresis: int = 500
    cache_ttl_seconds: float = 5.0
    retry_after_seconds: int = 60

    def __post_init__(self) -> None:
        _demand(self.threshold >= 1, "PETITION_QUEUE_THRESHOLD: must be at least 1")
        _demand(
            0 <= self.hysteresis < self.threshold,
            f"PETITION_QUEUE_HYSTERESIS: must be at least 0 and below PETITION_QUEUE_THRESHOLD, {self.threshold}",
        )
        _demand(0 < self.cache_ttl_seconds <= 3600, "PETITION_QUEUE_CACHE_TTL: must be above 0, at most 3600")
        _demand(self.retry_after_seconds >= 1, "PETITION_RETRY_AFTER: must be at least 1")


@dataclass(frozen=True, slots=True)
class PetitionRateLimitConfig:
    """How many petitions may be submitted.

    Attributes:
        limit_per_hour: Most petitions of one submitter in a window.
        window_minutes: How long the window is; an hour unless it is changed.
        bucket_ttl_hours: How long counters are kept. Longer than the window, or live ones would be deleted.
        strict: Count each petition until the end of its minute plus the window, so that no span as long as the window
            ever holds more than the limit. Otherwise it counts from the beginning of its minute, as the document has
            it, and may be forgotten up to a minute early.
        realm_limit: Most petitions to one realm in a window, of all submitters; 0 for no such limit.
        global_limit: Most petitions in a window altogether; 0 for no such limit.
        co_sign_limit_per_hour: Most co-signs of one identity in a window.
    """

    limit_per_hour: int = 10
    window_minutes: int = 60
    bucket_ttl_hours: int = 2
    strict: bool = False
    realm_limit: int = 0
    global_limit: int = 0
    co_sign_limit_per_hour: int = 50

    def __post_init__(self) -> None:
        _demand(
            1 <= self.limit_per_hour <= LARGEST_LIMIT,
            f"PETITION_RATE_LIMIT_PER_HOUR: must be from 1 to {LARGEST_LIMIT}",
        )
        _demand(
            1 <= self.window_minutes <= LONGEST_WINDOW_MINUTES,
            f"PETITION_RATE_LIMIT_WINDOW_MINUTES: must be from 1 to {LONGEST_WINDOW_MINUTES}",
        )
        _demand(
            self.bucket_ttl_hours * 60 > self.window_minutes,
            f"PETITION_RATE_LIMIT_TTL_HOURS: must be longer than the window of {self.window_minutes} minutes",
        )
        _demand(
            0 <= self.realm_limit <= LARGEST_LIMIT,
            f"PETITION_RATE_LIMIT_PER_REALM: must be from 0 to {LARGEST_LIMIT}",
        )
        _demand(
            0 <= self.global_limit <= LARGEST_LIMIT,
            f"PETITION_RATE_LIMIT_GLOBAL: must be from 0 to {LARGEST_LIMIT}",
        )
        _demand(
            1 <= self.co_sign_limit_per_hour <= LARGEST_LIMIT,
            f"PETITION_CO_SIGN_LIMIT_PER_HOUR: must be from 1 to {LARGEST_LIMIT}",
        )


def load_petition_config(
    variables: Mapping[str, str] | None = None,
) -> tuple[PetitionQueueConfig, PetitionRateLimitConfig]:
    """Return both from these variables, by default the environment's.

    Raises:
        SettingsError: One of them cannot work; the message begins with its name.
    """
    given = Environment(os.environ if variables is None else variables)
    threshold = given.whole("PETITION_QUEUE_THRESHOLD", 10_000)
    queue = PetitionQueueConfig(
        threshold=threshold,
        # Whoever sets a small threshold alone gets the same proportion, not a start that fails.
        hysteresis=given.whole("PETITION_QUEUE_HYSTERESIS", min(500, max(0, threshold) // 20)),
        cache_ttl_seconds=given.number("PETITION_QUEUE_CACHE_TTL", 5.0),
        retry_after_seconds=given.whole(
            "PETITION_RETRY_AFTER", given.whole("PETITION_QUEUE_RETRY_AFTER", 60)
        ),
    )
    limit = PetitionRateLimitConfig(
        limit_per_hour=given.whole("PETITION_RATE_LIMIT_PER_HOUR", 10),
        window_minutes=given.whole("PETITION_RATE_LIMIT_WINDOW_MINUTES", 60),
        bucket_ttl_hours=given.whole("PETITION_RATE_LIMIT_TTL_HOURS", 2),
        strict=given.flag("PETITION_RATE_LIMIT_STRICT", False),
        realm_limit=given.whole("PETITION_RATE_LIMIT_PER_REALM", 0),
        global_limit=given.whole("PETITION_RATE_LIMIT_GLOBAL", 0),
        co_sign_limit_per_hour=given.whole("PETITION_CO_SIGN_LIMIT_PER_HOUR", 50),
    )
    return queue, limit


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SettingsError(otherwise)
