"""The limit itself, counting in a real PostgreSQL."""

from __future__ import annotations

import dataclasses
import inspect
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from structlog.testing import capture_logs

from headgate_services.petitions.application import ports
from headgate_services.petitions.application.ports import RateLimiterPort, RateLimitResult, RateLimitStorePort
from headgate_services.petitions.application.services import RateLimitService, rate_limit_service
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.domain.errors import RateLimitExceededError
from headgate_services.petitions.domain.models import RateLimitBucket
from headgate_services.petitions.infrastructure.adapters.persistence import PostgresRateLimitStore
from headgate_services.petitions.infrastructure.stubs import RateLimiterStub
from tests.apps.petitions.support import TABLE, Calendar, put_bucket, someone

HOUR = timedelta(hours=1)


@pytest.mark.requirement("A-67", "A-72", "A-73")
async def test_allowing_below_limit(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    service, submitter = RateLimitService(store), someone()
    put_bucket(shared_url, submitter, calendar.at, 9)
    result = await service.check_rate_limit(submitter)
    assert (result.allowed, result.remaining, result.current_count, result.limit) == (True, 1, 9, 10)


@pytest.mark.requirement("A-73", "A-76")
async def test_rejecting_at_limit(store: PostgresRateLimitStore, calendar: Calendar, shared_url: str) -> None:
    service, submitter = RateLimitService(store), someone()
    put_bucket(shared_url, submitter, calendar.at, 10)
    with capture_logs() as logs:
        result = await service.check_rate_limit(submitter)
    assert (result.allowed, result.remaining, result.current_count) == (False, 0, 10)
    [line] = logs
    assert line["event"] == "rate_limit_exceeded"
    assert line["log_level"] == "info"
    assert (line["submitter_id"], line["current_count"], line["limit"]) == (str(submitter), 10, 10)


@pytest.mark.requirement("A-73", "A-36")
async def test_rejecting_above_limit(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    """With more counted than the limit, the oldest counter's end frees too little: the true instant is announced."""
    service, submitter = RateLimitService(store), someone()
    for minute, count in ((0, 1), (20, 5), (40, 7)):
        put_bucket(shared_url, submitter, calendar.at + timedelta(minutes=minute), count)
    calendar.set(10, 50)
    result = await service.check_rate_limit(submitter)
    assert (result.allowed, result.remaining, result.current_count) == (False, 0, 13)
    assert result.reset_at == datetime(2026, 3, 2, 11, 20, tzinfo=UTC)
    calendar.at = result.reset_at - timedelta(microseconds=1)
    assert not (await service.check_rate_limit(submitter)).allowed
    calendar.at = result.reset_at
    assert (await service.check_rate_limit(submitter)).allowed


@pytest.mark.requirement("A-69", "A-73")
@pytest.mark.parametrize(("counted", "remaining"), [(0, 10), (9, 1), (10, 0), (15, 0)])
async def test_remaining_count_calculation(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str, counted: int, remaining: int
) -> None:
    service, submitter = RateLimitService(store), someone()
    if counted:
        put_bucket(shared_url, submitter, calendar.at, counted)
    assert await service.get_remaining(submitter) == remaining
    assert (await service.check_rate_limit(submitter)).remaining == remaining


@pytest.mark.requirement("A-36", "A-74")
async def test_reset_time_calculation(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    service, submitter = RateLimitService(store), someone()
    calendar.set(10, 30, 30)
    assert (await service.check_rate_limit(submitter)).reset_at == calendar.at + HOUR
    put_bucket(shared_url, submitter, calendar.at.replace(minute=5, second=0))
    put_bucket(shared_url, submitter, calendar.at.replace(minute=20, second=0))
    assert (await service.check_rate_limit(submitter)).reset_at == datetime(2026, 3, 2, 11, 5, tzinfo=UTC)


@pytest.mark.requirement("A-35")
async def test_sliding_window_bucket_expiry(store: PostgresRateLimitStore, calendar: Calendar) -> None:
    service, submitter = RateLimitService(store, limit_per_hour=2), someone()
    await service.record_submission(submitter)
    calendar.set(10, 30)
    await service.record_submission(submitter)
    calendar.at = datetime(2026, 3, 2, 10, 59, 59, 999_999, tzinfo=UTC)
    assert not (await service.check_rate_limit(submitter)).allowed
    calendar.set(11, 0)
    calendar.at = calendar.at.replace(microsecond=0)
    assert (await service.check_rate_limit(submitter)).current_count == 1


@pytest.mark.requirement("A-68", "A-75", "A-77")
async def test_record_submission_increments_bucket(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    service, submitter = RateLimitService(store), someone()
    calendar.set(10, 7, 42)
    with capture_logs() as logs:
        await service.record_submission(submitter)
        await service.record_submission(submitter)
    assert [(line["event"], line["log_level"]) for line in logs] == [("submission_recorded", "debug")] * 2
    assert logs[0]["component"] == "petition.rate_limit"
    assert logs[0]["submitter_id"] == str(submitter)
    assert logs[0]["bucket_minute"] == "2026-03-02T10:07:00+00:00"
    with psycopg.connect(shared_url) as connection:
        query = f"SELECT bucket_minute, count FROM {TABLE} WHERE submitter_id = %s"
        found = connection.execute(query, [submitter]).fetchall()
    assert found == [(datetime(2026, 3, 2, 10, 7, tzinfo=UTC), 2)]


@pytest.mark.requirement("A-75")
def test_a_service_with_the_logging_mixin_logs_its_component() -> None:
    class Service(LoggingMixin):
        def __init__(self) -> None:
            self._init_logger(component="petition.example")

        def work(self) -> None:
            self._log.info("done", count=1)

    with capture_logs() as logs:
        Service().work()
    assert logs == [{"component": "petition.example", "count": 1, "event": "done", "log_level": "info"}]


@pytest.mark.requirement("A-49", "A-60", "A-70", "A-75")
async def test_configuration_from_constructor(store: PostgresRateLimitStore, calendar: Calendar) -> None:
    """The same mechanism serves another limit over another window: co-signers, 3 per 5 minutes."""
    service, signer = RateLimitService(store, limit_per_hour=3, window_minutes=5), someone()
    assert (service.get_limit(), service.get_window_minutes()) == (3, 5)
    for _ in range(3):
        await service.record_submission(signer)
    result = await service.check_rate_limit(signer)
    assert (result.allowed, result.limit) == (False, 3)
    assert result.reset_at == calendar.at + timedelta(minutes=5)
    assert RateLimitService(store).get_limit() == 10
    assert RateLimitService(store).get_window_minutes() == 60


async def test_recording_beyond_the_limit_is_refused_and_counts_nothing(
    store: PostgresRateLimitStore, calendar: Calendar
) -> None:
    service, submitter = RateLimitService(store, limit_per_hour=1), someone()
    await service.record_submission(submitter)
    with pytest.raises(RateLimitExceededError) as refusal:
        await service.record_submission(submitter)
    assert (refusal.value.current_count, refusal.value.limit) == (1, 1)
    assert refusal.value.reset_at == calendar.at + HOUR
    assert refusal.value.retry_after_seconds == 3600
    assert (await service.check_rate_limit(submitter)).current_count == 1


async def test_strict_no_span_as_long_as_the_window_holds_more_than_the_limit(
    store: PostgresRateLimitStore, calendar: Calendar
) -> None:
    """By the document's formula a petition of 10:00:59 is forgotten at 11:00:00; strictly counted, at 11:01:00."""
    lenient, strict = RateLimitService(store, 1), RateLimitService(store, 1, strict=True)
    forgotten, kept = someone(), someone()
    calendar.set(10, 0, 59)
    await lenient.record_submission(forgotten)
    await strict.record_submission(kept)
    calendar.set(11, 0, 0)
    assert (await lenient.check_rate_limit(forgotten)).allowed
    result = await strict.check_rate_limit(kept)
    assert not result.allowed
    assert result.reset_at == datetime(2026, 3, 2, 11, 1, tzinfo=UTC)
    calendar.at = result.reset_at
    assert (await strict.check_rate_limit(kept)).allowed


@pytest.mark.requirement("A-50", "A-51")
async def test_a_check_is_one_statement_on_the_table(
    store: PostgresRateLimitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    original = psycopg.AsyncCursor.execute

    async def execute(self: psycopg.AsyncCursor, query: str, *arguments: object, **options: object) -> object:
        statements.append(str(query))
        return await original(self, query, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(psycopg.AsyncCursor, "execute", execute)
    await RateLimitService(store).check_rate_limit(someone())
    assert len([text for text in statements if TABLE in text]) == 1
    statements.clear()
    await RateLimitService(store, realm_limit=1, global_limit=1).check_rate_limit(someone(), realm="x")
    assert len([text for text in statements if TABLE in text]) == 1


@pytest.mark.requirement("A-67", "A-68", "A-69", "A-70", "A-71", "A-78")
def test_the_ports_have_the_methods_that_were_agreed_on() -> None:
    assert {"RateLimiterPort", "RateLimitStorePort", "RateLimitResult"} <= set(ports.__all__)
    for name in ("check_rate_limit", "record_submission", "get_remaining"):
        assert inspect.iscoroutinefunction(getattr(RateLimiterPort, name))
    assert not inspect.iscoroutinefunction(RateLimiterPort.get_limit)
    for name in (
        "get_submission_count",
        "increment_bucket",
        "get_oldest_bucket_expiry",
        "cleanup_expired_buckets",
    ):
        assert inspect.iscoroutinefunction(getattr(RateLimitStorePort, name))
    assert list(inspect.signature(RateLimitStorePort.get_submission_count).parameters)[1:] == [
        "submitter_id",
        "since",
    ]
    assert all(word in str(RateLimiterPort.__doc__) for word in ("FR-1.5", "HC-4", "D4"))


@pytest.mark.requirement("A-72")
def test_the_result_is_frozen_and_has_its_fields() -> None:
    assert rate_limit_service.RateLimitResult is RateLimitResult
    result = RateLimitResult(allowed=True, remaining=1, reset_at=datetime.now(UTC), current_count=9, limit=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.allowed = False  # type: ignore[misc]


@pytest.mark.requirement("A-05")
@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        (timedelta(seconds=-5), 1),
        (timedelta(0), 1),
        (timedelta(microseconds=1), 1),
        (timedelta(seconds=1, microseconds=1), 2),
        (timedelta(seconds=30), 30),
    ],
)
def test_waits_are_rounded_up_to_at_least_a_second(wait: timedelta, seconds: int) -> None:
    at = datetime.now(UTC)
    result = RateLimitResult(False, 0, at + wait, 10, 10, checked_at=at)
    assert result.retry_after_seconds == seconds


@pytest.mark.requirement("A-81")
def test_a_bucket_is_a_minute_and_leaves_the_window_exactly_then() -> None:
    minute = datetime(2026, 3, 2, 10, 0, tzinfo=UTC)
    bucket = RateLimitBucket(someone(), minute, 3)
    assert bucket.expires_at(HOUR) == minute + HOUR
    assert bucket.counts_at(minute + HOUR - timedelta(microseconds=1), HOUR)
    assert not bucket.counts_at(minute + HOUR, HOUR)
    with pytest.raises(ValueError, match="whole minute"):
        RateLimitBucket(someone(), minute.replace(second=1))
    with pytest.raises(ValueError, match="at least 1"):
        RateLimitBucket(someone(), minute, 0)


@pytest.mark.requirement("A-82")
def test_the_error_says_everything() -> None:
    submitter, reset_at = someone(), datetime.now(UTC)
    error = RateLimitExceededError(submitter, 10, 10, reset_at)
    assert str(error) == "Maximum 10 petitions per hour exceeded"
    assert (error.submitter_id, error.current_count, error.limit) == (submitter, 10, 10)
    assert (error.reset_at, error.retry_after_seconds) == (reset_at, 1800)
    assert str(RateLimitExceededError(submitter, 3, 3, reset_at, window_minutes=5)).endswith(
        "per 5 minutes exceeded"
    )


@pytest.mark.requirement("A-80")
async def test_the_stub_answers_as_it_was_set_up() -> None:
    submitter = someone()
    stub = RateLimiterStub(limit=2)
    await stub.record_submission(submitter)
    assert (stub.get_count(submitter), await stub.get_remaining(submitter)) == (1, 1)
    stub.set_count(submitter, 2)
    result = await stub.check_rate_limit(submitter)
    assert (result.allowed, result.current_count, result.limit) == (False, 2, 2)
    with pytest.raises(RateLimitExceededError):
        await stub.record_submission(submitter)
    assert (await stub.check_rate_limit(someone())).allowed
    assert not (await RateLimiterStub.at_limit().check_rate_limit(submitter)).allowed
    limiter: RateLimiterPort = stub  # the type checker agrees
    assert (limiter.get_limit(), limiter.get_window_minutes()) == (2, 60)
