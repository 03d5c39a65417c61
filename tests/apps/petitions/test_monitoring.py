"""Metrics, witnesses, and the room in the queue."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from headgate.testing import FakeClock
from headgate_services.petitions.application.ports import RateLimitResult
from headgate_services.petitions.application.services import (
    QueueCapacityService,
    RateLimitService,
    RefusalWitnessService,
)
from headgate_services.petitions.config import PetitionQueueConfig, PetitionRateLimitConfig
from headgate_services.petitions.domain.errors import (
    DatabaseUnavailableError,
    QueueOverflowError,
    RateLimitExceededError,
)
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    LedgerEvent,
    PostgresRateLimitStore,
    QueueMeasure,
)
from headgate_services.petitions.infrastructure.metrics import MetricsCollector
from tests.apps.petitions.conftest import Start
from tests.apps.petitions.support import rows, someone

THREE = PetitionRateLimitConfig(limit_per_hour=3)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def metrics(clock: FakeClock) -> MetricsCollector:
    return MetricsCollector(max_submitters=2, forget_after=3600, clock=lambda: clock.now)


# --- Metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A-63", "A-64", "A-65")
async def test_the_gauge_follows_every_submission(start: Start) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    seen = []
    for _ in range(4):
        await service.submit(submitter)
        labels = {"service": "archon72-api", "environment": "development", "submitter_id": str(submitter)}
        seen.append(await service.metric("petition_rate_limit_remaining", **labels))
    assert seen == [2, 1, 0, 0]
    assert await service.metric("petition_rate_limit_hits_total", **labels) == 1
    assert await service.metric("petition_rate_limit_checks_total", result="allowed") == 3
    assert await service.metric("petition_rate_limit_checks_total", result="blocked") == 1


@pytest.mark.requirement("A-63", "A-65")
async def test_a_check_alone_moves_the_gauge(start: Start) -> None:
    service, submitter = await start(), someone()
    await service.container.rate_limiter.check_rate_limit(submitter)
    assert await service.metric("petition_rate_limit_remaining", submitter_id=str(submitter)) == 10


@pytest.mark.requirement("A-61", "A-62", "A-63", "A-84")
async def test_metrics_have_their_names_and_help(start: Start) -> None:
    service = await start()
    answer = await service.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        "# HELP petition_rate_limit_hits_total Total petition submissions rejected due to rate limiting",
        "# TYPE petition_rate_limit_hits_total counter",
        "# HELP petition_rate_limit_remaining Remaining submissions before rate limit for active submitters",
        "# TYPE petition_rate_limit_remaining gauge",
    ):
        assert line in answer.text.splitlines()
    collector = service.container.metrics
    registered = {metric.name for metric in collector.registry.collect()}
    for attribute in (collector.petition_rate_limit_hits_total, collector.petition_rate_limit_remaining):
        assert {metric.name for metric in attribute.collect()} <= registered


def test_only_so_many_submitters_have_series_of_their_own(metrics: MetricsCollector) -> None:
    submitters = [someone() for _ in range(5)]
    for submitter in submitters:
        metrics.refused(submitter)
        metrics.recorded(submitter, 4, 3600)
    text = metrics.render().decode()
    assert [str(submitter) in text for submitter in submitters] == [True, True, False, False, False]
    assert sample(metrics, "petition_rate_limit_hits_total", "other") == 3
    assert sample(metrics, "petition_rate_limit_remaining", "other") == 4


def test_silent_submitters_lose_their_series(metrics: MetricsCollector, clock: FakeClock) -> None:
    silent, active, new = someone(), someone(), someone()
    metrics.refused(silent)
    clock.advance(1800)
    now = datetime.now(UTC)
    metrics.checked(active, RateLimitResult(True, 9, now + timedelta(hours=1), 1, 10, checked_at=now))
    clock.advance(1800)
    metrics.recorded(new, 9, 3600)  # takes the place of the silent one
    text = metrics.render().decode()
    assert [str(submitter) in text for submitter in (silent, active, new)] == [False, True, True]
    clock.advance(3600)
    assert str(new) not in metrics.render().decode()


def test_what_remains_is_not_shown_longer_than_it_is_true(
    metrics: MetricsCollector, clock: FakeClock
) -> None:
    submitter, now = someone(), datetime.now(UTC)
    metrics.checked(submitter, RateLimitResult(True, 9, now + timedelta(seconds=60), 1, 10, checked_at=now))
    assert "petition_rate_limit_remaining{" in metrics.render().decode()
    clock.advance(60)  # the oldest counter leaves the window, so the value may be higher
    assert "petition_rate_limit_remaining{" not in metrics.render().decode()
    metrics.recorded(submitter, 8, 60)
    assert sample(metrics, "petition_rate_limit_remaining", str(submitter)) == 8


def sample(metrics: MetricsCollector, name: str, submitter: str) -> float | None:
    labels = {"service": "archon72-api", "environment": "development", "submitter_id": submitter}
    assert generate_latest(metrics.registry)
    return metrics.registry.get_sample_value(name, labels)


# --- Witnesses -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A-66")
async def test_every_refusal_is_witnessed(start: Start) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    await service.submit_many(submitter, 3)
    for trace in ("first", "second"):
        await service.submit(submitter, headers={"X-Correlation-ID": trace})
    first, second = service.refusals(submitter)
    assert first == {
        "submitter_id": str(submitter),
        "current_count": 3,
        "limit": 3,
        "reset_at": "2026-03-02T11:00:00+00:00",
        "scope": "submitter",
        "window_minutes": 60,
        "refusals": 1,
        "trace_ids": ["first"],
    }
    assert second["trace_ids"] == ["second"]


class SlowLedger:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.events: list[LedgerEvent] = []
        self.gate = asyncio.Event()
        self.called = asyncio.Event()
        self.error: Exception | None = None

    async def append_unless_halted(self, event: LedgerEvent) -> int | None:
        self.called.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.events.append(event)
        return len(self.events)

    async def last_sequence(self) -> int:
        return len(self.events)


def refusal(submitter: UUID) -> RateLimitExceededError:
    return RateLimitExceededError(submitter, 10, 10, datetime.now(UTC))


@pytest.mark.requirement("A-66")
async def test_the_first_refusals_of_a_burst_are_written_before_their_answers() -> None:
    ledger, flooding, other = SlowLedger(), someone(), someone()
    witness = RefusalWitnessService(ledger)
    burst = [asyncio.create_task(witness.witness(refusal(flooding), f"trace-{n}")) for n in range(10)]
    single = asyncio.create_task(witness.witness(refusal(other), "trace-x"))
    await ledger.called.wait()
    merged = asyncio.create_task(witness.witness(refusal(flooding), "trace-10"))
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*burst, single, merged))
    burst[7].cancel()  # the event of a client that hangs up is written all the same
    ledger.gate.set()
    numbers = await asyncio.gather(*burst, single, return_exceptions=True)
    assert isinstance(numbers.pop(7), asyncio.CancelledError)
    assert len(set(numbers)) == 10
    assert await merged >= 1
    # The events that a killed process would leave:
    assert [event.payload["refusals"] for event in ledger.events] == [1] * 11
    assert [event.payload["trace_ids"] for event in ledger.events[:10]] == [[f"trace-{n}"] for n in range(10)]
    await witness.aclose()
    assert ledger.events[-1].payload["trace_ids"] == ["trace-10"]


@pytest.mark.requirement("A-66")
async def test_a_flood_is_merged_and_its_count_kept() -> None:
    ledger, flooding = SlowLedger(), someone()
    ledger.gate.set()
    witness = RefusalWitnessService(ledger)
    await asyncio.gather(*(witness.witness(refusal(flooding), f"trace-{n}") for n in range(500)))
    await witness.aclose()
    assert sorted(event.payload["refusals"] for event in ledger.events) == [1] * 10 + [90] + [100] * 4
    traces = [trace for event in ledger.events for trace in event.payload["trace_ids"]]
    assert sorted(traces) == sorted(f"trace-{n}" for n in range(500))


async def test_a_refusal_after_a_flood_has_an_event_again(clock: FakeClock) -> None:
    ledger, submitter = SlowLedger(), someone()
    ledger.gate.set()
    witness = RefusalWitnessService(ledger, clock)
    for number in range(10):
        await witness.witness(refusal(submitter), str(number))
    clock.advance(61)
    await witness.witness(refusal(submitter), "later")
    assert ledger.events[-1].payload["trace_ids"] == ["later"]


async def test_a_flood_of_refusals_has_few_lines_in_the_log(store: PostgresRateLimitStore) -> None:
    service, flooding, other = RateLimitService(store, limit_per_hour=1), someone(), someone()
    for submitter in (flooding, other):
        await service.record_submission(submitter)
    with capture_logs() as logs:
        for submitter in [flooding] * 12 + [other]:
            await service.check_rate_limit(submitter)
    assert [line["log_level"] for line in logs] == ["info"] * 10 + ["debug"] * 2 + ["info"]


# --- Room in the queue -----------------------------------------------------------------------------------------------


class Queue:
    """A queue of any depth, and how often it was counted."""

    def __init__(self) -> None:
        self.depth = 0
        self.counted = 0
        self.age = 0.0

    async def measure_queue(self, max_age: float) -> QueueMeasure:
        self.counted += 1
        return QueueMeasure(self.depth, self.age)

    async def take_place(self, threshold: int) -> int | None:
        if self.depth >= threshold:
            return None
        self.depth += 1
        return self.depth


@pytest.mark.requirement("A-44")
async def test_a_full_queue_has_room_again_only_well_below_the_threshold(clock: FakeClock) -> None:
    queue = Queue()
    capacity = QueueCapacityService(queue, PetitionQueueConfig(10, 3), None, lambda: clock.now)
    seen = []
    with capture_logs() as logs:
        for depth in (9, 10, 8, 7, 6, 9, 10):
            queue.depth = depth
            clock.advance(5)
            seen.append(await capacity.is_accepting_submissions())
        capacity.refuse()
    assert seen == [True, False, False, False, True, True, False]
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("queue_capacity_exceeded", "warning"),
        ("queue_capacity_resumed", "info"),
        ("queue_capacity_exceeded", "warning"),
        ("petition_rejected_queue_overflow", "info"),
    ]


@pytest.mark.requirement("A-45")
async def test_the_queue_is_counted_at_most_once_per_ttl(clock: FakeClock) -> None:
    queue = Queue()
    capacity = QueueCapacityService(queue, PetitionQueueConfig(10, 3), None, lambda: clock.now)
    await asyncio.gather(*(capacity.is_accepting_submissions() for _ in range(20)))
    clock.advance(4.9)
    await capacity.is_accepting_submissions()
    assert queue.counted == 1
    clock.advance(0.1)
    await capacity.is_accepting_submissions()
    assert queue.counted == 2


@pytest.mark.requirement("A-43")
async def test_what_was_accepted_since_counts_too(clock: FakeClock) -> None:
    capacity = QueueCapacityService(Queue(), PetitionQueueConfig(2, 0), None, lambda: clock.now)
    seen = []
    for _ in range(2):
        seen.append(await capacity.is_accepting_submissions())
        await capacity.take_place()
    assert [*seen, await capacity.is_accepting_submissions()] == [True, True, False]
    with pytest.raises(QueueOverflowError) as refused:
        await capacity.take_place()
    assert (refused.value.queue_depth, refused.value.threshold) == (2, 2)


@pytest.mark.requirement("A-45")
async def test_a_count_of_another_instance_is_believed_only_for_the_rest_of_its_time(
    clock: FakeClock,
) -> None:
    queue = Queue()
    queue.age = 4
    capacity = QueueCapacityService(queue, PetitionQueueConfig(10, 3), None, lambda: clock.now)
    await capacity.is_accepting_submissions()
    clock.advance(1)
    await capacity.is_accepting_submissions()
    assert queue.counted == 2


@pytest.mark.requirement("A-43")
async def test_40_parallel_submissions_over_two_instances_are_as_many_as_the_queue_has_room_for(
    start: Start, empty_url: str
) -> None:
    queue = PetitionQueueConfig(threshold=5, hysteresis=1)
    services = [await start(url=empty_url, queue=queue) for _ in range(2)]
    answers = await asyncio.gather(*(services[n % 2].submit(someone()) for n in range(40)))
    assert sorted(answer.status_code for answer in answers) == [201] * 5 + [503] * 35
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert (refused.json()["title"], refused.headers["retry-after"]) == ("Queue Overflow", "60")
    assert rows(empty_url, "SELECT count(*) FROM petition_submissions") == [(5,)]
    assert rows(empty_url, "SELECT sum(count) FROM petition_rate_limit_buckets") == [(5,)]


@pytest.mark.requirement("A-44")
async def test_parallel_submissions_that_fill_the_queue_start_the_hysteresis(
    start: Start, empty_url: str
) -> None:
    """All of them pass the first check, so most are refused when they take their place in the queue."""
    queue = PetitionQueueConfig(threshold=5, hysteresis=2, cache_ttl_seconds=3600)
    service = await start(url=empty_url, queue=queue)
    with capture_logs() as logs:
        answers = await asyncio.gather(*(service.submit(someone()) for _ in range(40)))
    assert sorted(answer.status_code for answer in answers) == [201] * 5 + [503] * 35
    assert [line["event"] for line in logs].count("queue_capacity_exceeded") == 1


@pytest.mark.requirement("A-44")
async def test_a_refused_place_in_the_queue_starts_the_hysteresis(clock: FakeClock) -> None:
    queue = Queue()
    capacity = QueueCapacityService(queue, PetitionQueueConfig(10, 3), None, lambda: clock.now)
    assert await capacity.is_accepting_submissions()
    queue.depth = 10  # filled by others since
    with pytest.raises(QueueOverflowError):
        await capacity.take_place()
    seen = []
    for depth in (9, 7, 6):
        queue.depth = depth
        clock.advance(5)
        seen.append(await capacity.is_accepting_submissions())
    assert seen == [False, False, True]


@pytest.mark.requirement("A-43", "A-44")
async def test_a_queue_that_was_drained_has_room_below_the_hysteresis_again(
    start: Start, empty_url: str
) -> None:
    queue = PetitionQueueConfig(threshold=4, hysteresis=2, cache_ttl_seconds=0.001)
    service = await start(url=empty_url, queue=queue)
    seen = [(await service.submit(someone())).status_code for _ in range(5)]
    for _ in range(3):
        take_from_queue(empty_url)
        seen.append((await service.submit(someone())).status_code)
    assert seen == [201, 201, 201, 201, 503, 503, 503, 201]


def take_from_queue(url: str) -> None:
    rows(
        url,
        "UPDATE petition_submissions SET state = 'REFERRED' WHERE id IN "
        "(SELECT id FROM petition_submissions WHERE state = 'RECEIVED' LIMIT 1)",
    )


# --- The database is away --------------------------------------------------------------------------------------------


async def test_a_busy_database_is_not_given_up(shared_url: str) -> None:
    database = Database(shared_url, pool_size=1, timeout=1)
    await database.open()
    await database._pool.wait()  # the first connection may take its time

    async def decide() -> None:
        async with database.connection() as connection:
            await connection.execute("SELECT 1")

    try:
        async with database.connection():
            with pytest.raises(DatabaseUnavailableError) as refused:
                await decide()
        assert refused.value.retry_after_seconds == 1
        await decide()
        assert not database.is_down
    finally:
        await database.aclose()


async def test_a_statement_that_the_database_breaks_off_is_an_outage_of_one(database: Database) -> None:
    async def decide() -> None:
        async with database.connection() as connection:
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(DatabaseUnavailableError):
        await decide()
    async with database.connection() as connection:
        assert await (await connection.execute("SELECT 1")).fetchone() == (1,)
