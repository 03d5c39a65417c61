"""PostgreSQL behind the ports."""

from headgate_services.petitions.infrastructure.adapters.persistence.database import Database
from headgate_services.petitions.infrastructure.adapters.persistence.migrations import (
    all_migrations,
    migrate,
)
from headgate_services.petitions.infrastructure.adapters.persistence.rate_limit_store import (
    PostgresRateLimitStore,
)
from headgate_services.petitions.infrastructure.adapters.persistence.readiness import PostgresReadiness
from headgate_services.petitions.infrastructure.adapters.persistence.records import (
    PostgresCoSignRepository,
    PostgresEventLedger,
    PostgresHaltState,
    PostgresPetitionRepository,
    PostgresQueueStore,
)

__all__ = [
    "Database",
    "PostgresCoSignRepository",
    "PostgresEventLedger",
    "PostgresHaltState",
    "PostgresPetitionRepository",
    "PostgresQueueStore",
    "PostgresRateLimitStore",
    "PostgresReadiness",
    "all_migrations",
    "migrate",
]
