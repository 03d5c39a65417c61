"""Protocols for the limiter and its store."""

from headgate_services.petitions.application.ports.rate_limit_store import (
    RateLimitPolicy,
    RateLimitStorePort,
)
from headgate_services.petitions.application.ports.rate_limiter import RateLimiterPort, RateLimitResult

__all__ = [
    "RateLimitPolicy",
    "RateLimitResult",
    "RateLimitStorePort",
    "RateLimiterPort",
]
