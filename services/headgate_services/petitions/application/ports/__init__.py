"""What the service needs from outside, and what it offers: protocols and the values that they speak of."""

from headgate_services.petitions.application.ports.persistence import (
    CoSignRepositoryPort,
    EventLedgerPort,
    HaltStatePort,
    LedgerEvent,
    PetitionRepositoryPort,
    UnitOfWorkPort,
)
from headgate_services.petitions.application.ports.queue_capacity import (
    QueueCapacityPort,
    QueueMeasure,
    QueueObserver,
    QueueStorePort,
)
from headgate_services.petitions.application.ports.rate_limit_store import (
    RateLimitPolicy,
    RateLimitStorePort,
)
from headgate_services.petitions.application.ports.rate_limiter import (
    RateLimiterPort,
    RateLimitObserver,
    RateLimitResult,
)

__all__ = [
    "CoSignRepositoryPort",
    "EventLedgerPort",
    "HaltStatePort",
    "LedgerEvent",
    "PetitionRepositoryPort",
    "QueueCapacityPort",
    "QueueMeasure",
    "QueueObserver",
    "QueueStorePort",
    "RateLimitObserver",
    "RateLimitPolicy",
    "RateLimitResult",
    "RateLimitStorePort",
    "RateLimiterPort",
    "UnitOfWorkPort",
]
