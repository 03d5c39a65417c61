"""Protocols for the limiter, its store and the capacity of the queue."""

from headgate_services.petitions.application.ports.queue_capacity import QueueCapacityPort
from headgate_services.petitions.application.ports.rate_limit_store import (
    RateLimitPolicy,
    RateLimitStorePort,
)
from headgate_services.petitions.application.ports.rate_limiter import RateLimiterPort, RateLimitResult

__all__ = [
    "QueueCapacityPort",
    "RateLimitPolicy",
    "RateLimitResult",
    "RateLimitStorePort",
    "RateLimiterPort",
]
