"""Counters, petitions and the ledger in PostgreSQL."""

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
    LedgerEvent,
    PetitionRecords,
    QueueMeasure,
)

__all__ = [
    "Database",
    "LedgerEvent",
    "PetitionRecords",
    "PostgresRateLimitStore",
    "PostgresReadiness",
    "QueueMeasure",
    "all_migrations",
    "migrate",
]
