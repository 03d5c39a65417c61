"""Dependency container of the service, created at start-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from fastapi import Request

from headgate_services.petitions.application.services import (
    PetitionSubmissionService,
    QueueCapacityService,
    RateLimitCleanupService,
    RateLimitService,
    RefusalWitnessService,
)
from headgate_services.petitions.application.services.petition_submission_service import CO_SIGN
from headgate_services.petitions.config import PetitionsSettings
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    PetitionRecords,
    PostgresRateLimitStore,
    PostgresReadiness,
)
from headgate_services.petitions.infrastructure.metrics import MetricsCollector


@dataclass(frozen=True, slots=True)
class Container:
    """The objects that routes and commands use."""

    settings: PetitionsSettings
    metrics: MetricsCollector
    database: Database
    rate_limiter: RateLimitService
    co_sign_limiter: RateLimitService
    queue_capacity: QueueCapacityService
    submissions: PetitionSubmissionService
    witness: RefusalWitnessService
    cleanup: RateLimitCleanupService
    records: PetitionRecords
    counters: tuple[PostgresRateLimitStore, ...]
    readiness: PostgresReadiness


def build_metrics(settings: PetitionsSettings) -> MetricsCollector:
    """Return the metrics of a service with these settings."""
    return MetricsCollector(
        settings.service_name,
        settings.environment,
        max_submitters=settings.metrics_max_submitters,
        # With strict counting, a petition counts up to a minute longer than the window.
        forget_after=(settings.rate_limit.window_minutes + 1) * 60,
    )


def build_container(
    settings: PetitionsSettings,
    url: str,
    metrics: MetricsCollector | None = None,
    now: Callable[[], datetime] | None = None,
) -> Container:
    """Create the container of a service on a database; `now` replaces the database's clock in tests."""
    metrics = build_metrics(settings) if metrics is None else metrics
    database = Database(
        url,
        pool_size=settings.pool_size,
        timeout=settings.database_timeout,
        outage_seconds=settings.outage_seconds,
    )
    limit = settings.rate_limit
    store = PostgresRateLimitStore(database, limit.window_minutes, now=now)
    co_sign_store = PostgresRateLimitStore(database, limit.window_minutes, counter=CO_SIGN, now=now)
    records = PetitionRecords(database)
    rate_limiter = RateLimitService(
        store,
        limit.limit_per_hour,
        limit.window_minutes,
        strict=limit.strict,
        realm_limit=limit.realm_limit,
        global_limit=limit.global_limit,
        metrics=metrics,
    )
    return Container(
        settings=settings,
        metrics=metrics,
        database=database,
        rate_limiter=rate_limiter,
        co_sign_limiter=RateLimitService(
            co_sign_store, limit.co_sign_limit_per_hour, limit.window_minutes, strict=limit.strict
        ),
        queue_capacity=QueueCapacityService(records, settings.queue, metrics),
        submissions=PetitionSubmissionService(records),
        witness=RefusalWitnessService(records),
        cleanup=RateLimitCleanupService(store, limit.bucket_ttl_hours),
        records=records,
        counters=(store, co_sign_store),
        readiness=PostgresReadiness(database, store, rate_limiter.policy, settings.queue),
    )


def get_container(request: Request) -> Container:
    """Return the container of the service of a request."""
    container: Container = request.app.state.container
    return container
