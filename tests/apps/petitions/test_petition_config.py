"""Settings and start-up errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from urllib.parse import quote

import pytest

from headgate_services.common.settings import SettingsError
from headgate_services.petitions.config import (
    PetitionQueueConfig,
    PetitionRateLimitConfig,
    PetitionsSettings,
    load_petition_config,
    load_settings,
)
from tests.apps.conftest import Command

TESTS = Path(__file__).parent


@pytest.mark.requirement("A-40", "A-41", "A-42", "A-43", "A-44", "A-45", "A-46", "A-47", "A-48")
def test_defaults() -> None:
    queue, limit = load_petition_config({})
    assert queue == PetitionQueueConfig(
        threshold=10_000, hysteresis=500, cache_ttl_seconds=5.0, retry_after_seconds=60
    )
    assert limit == PetitionRateLimitConfig(limit_per_hour=10, window_minutes=60, bucket_ttl_hours=2)
    assert (queue, limit) == (PetitionQueueConfig(), PetitionRateLimitConfig())
    assert (limit.strict, limit.realm_limit, limit.global_limit) == (False, 0, 0)
    assert (load_settings({}).queue, load_settings({}).rate_limit) == (queue, limit)


@pytest.mark.requirement("A-40", "A-41", "A-42", "A-43", "A-44", "A-45", "A-46", "A-48", "A-49")
def test_configuration_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PETITION_RATE_LIMIT_PER_HOUR": "3",
        "PETITION_RATE_LIMIT_WINDOW_MINUTES": "30",
        "PETITION_RATE_LIMIT_TTL_HOURS": "1",
        "PETITION_RATE_LIMIT_STRICT": "true",
        "PETITION_RATE_LIMIT_PER_REALM": "100",
        "PETITION_RATE_LIMIT_GLOBAL": "1000",
        "PETITION_QUEUE_THRESHOLD": "5",
        "PETITION_QUEUE_HYSTERESIS": "2",
        "PETITION_QUEUE_CACHE_TTL": "0.5",
        "PETITION_RETRY_AFTER": "7",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_petition_config() == (
        PetitionQueueConfig(5, 2, 0.5, 7),
        PetitionRateLimitConfig(3, 30, 1, strict=True, realm_limit=100, global_limit=1000),
    )


@pytest.mark.requirement("A-47")
def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PetitionQueueConfig().threshold = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        PetitionRateLimitConfig().limit_per_hour = 1  # type: ignore[misc]


@pytest.mark.parametrize("text", ["5", "+5", " 5 "])
def test_a_small_threshold_alone_is_enough(text: str) -> None:
    queue, _ = load_petition_config({"PETITION_QUEUE_THRESHOLD": text})
    assert (queue.threshold, queue.hysteresis) == (5, 0)


def test_the_other_name_of_the_wait_is_known() -> None:
    assert load_petition_config({"PETITION_QUEUE_RETRY_AFTER": "9"})[0].retry_after_seconds == 9
    both = {"PETITION_RETRY_AFTER": "8", "PETITION_QUEUE_RETRY_AFTER": "9"}
    assert load_petition_config(both)[0].retry_after_seconds == 8


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PETITION_RATE_LIMIT_PER_HOUR", "0"),
        ("PETITION_RATE_LIMIT_PER_HOUR", "ten"),
        ("PETITION_RATE_LIMIT_WINDOW_MINUTES", "0"),
        ("PETITION_RATE_LIMIT_WINDOW_MINUTES", "100000"),
        ("PETITION_RATE_LIMIT_TTL_HOURS", "1"),  # not longer than the window of an hour
        ("PETITION_RATE_LIMIT_STRICT", "perhaps"),
        ("PETITION_RATE_LIMIT_PER_REALM", "-1"),
        ("PETITION_RATE_LIMIT_GLOBAL", "-1"),
        ("PETITION_QUEUE_THRESHOLD", "0"),
        ("PETITION_QUEUE_THRESHOLD", "²"),
        ("PETITION_QUEUE_THRESHOLD", "9" * 19),
        ("PETITION_QUEUE_HYSTERESIS", "10000"),
        ("PETITION_QUEUE_CACHE_TTL", "0"),
        ("PETITION_RETRY_AFTER", "0"),
        ("PETITION_ANONYMOUS", "everybody"),
        ("PETITION_DEFAULT_REALM", "nowhere"),
        ("PETITION_DATABASE_POOL_SIZE", "0"),
        ("PETITION_CLEANUP_INTERVAL_SECONDS", "0"),
        ("TRUSTED_PROXIES", "the one over there"),
        ("LOG_LEVEL", "loud"),
        ("PORT", "65536"),
        ("PORT", "-1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^{variable}: "):
        load_settings({variable: value})


def test_where_the_embedded_database_is() -> None:
    assert load_settings({"PETITION_DATA_DIR": "here"}).data_dir == Path("here").absolute()
    assert load_settings({}).data_dir == PetitionsSettings().data_dir


NOWHERE = {"DATABASE_URL": "postgresql://127.0.0.1:1/none", "PETITION_DATABASE_TIMEOUT": 0.2}


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "last_line"),
    [
        (
            ("run",),
            {"PETITION_RATE_LIMIT_PER_HOUR": "none"},
            2,
            "PETITION_RATE_LIMIT_PER_HOUR: must be a whole number",
        ),
        (("run",), NOWHERE, 2, "DATABASE_URL: the database cannot be reached"),
        (("halt", " "), {}, 1, "headgate: a halt needs a reason, which clients get"),
        (("cleanup",), NOWHERE, 1, "headgate: DATABASE_URL: the database cannot be reached"),
    ],
    ids=["setting", "database", "reason", "command"],
)
def test_errors_name_the_problem(
    command: Command, arguments: tuple[str, ...], variables: dict[str, object], code: int, last_line: str
) -> None:
    words = ("run", "petitions") if arguments == ("run",) else ("petitions", *arguments)
    result, output = command(*words, **variables)
    assert (result, output.splitlines()[-1]) == (code, last_line)


def test_a_read_only_database_stops_start_up(command: Command, empty_url: str) -> None:
    assert command("petitions", "cleanup", DATABASE_URL=empty_url)[0] == 0  # creates the tables
    read_only = f"{empty_url}?options={quote('-c default_transaction_read_only=on')}"
    code, output = command("run", "petitions", DATABASE_URL=read_only)
    last_line = output.splitlines()[-1]
    assert (code, last_line.startswith("DATABASE_URL: "), "read-only" in last_line) == (2, True, True)


@pytest.mark.requirement("A-85", "A-86")
def test_every_test_that_was_agreed_on_exists() -> None:
    agreed = {
        "test_rate_limit_service.py": """
            test_allowing_below_limit test_rejecting_at_limit test_rejecting_above_limit
            test_remaining_count_calculation test_reset_time_calculation test_sliding_window_bucket_expiry
            test_record_submission_increments_bucket test_configuration_from_constructor
        """,
        "test_rate_limit_store.py": """
            test_increment_bucket_creates_new test_increment_bucket_updates_existing
            test_get_submission_count_sums_buckets test_get_submission_count_excludes_expired
            test_get_oldest_bucket_expiry
        """,
        "test_petition_submission_rate_limit.py": """
            test_429_returned_when_rate_limited test_retry_after_header_present
            test_rate_limit_remaining_in_response test_rfc_7807_error_format_with_governance_extensions
            test_201_returned_when_within_limit test_submission_recorded_after_success
        """,
        "test_submitter_rate_limiting.py": """
            test_rate_limit_blocks_after_threshold test_rate_limit_allows_after_window_expires
            test_rate_limit_sliding_window_behavior test_metrics_endpoint_exposes_rate_limit_hits
            test_rate_limit_counter_incremented
        """,
    }
    missing = [
        f"{file}: {name}"
        for file, names in agreed.items()
        for name in names.split()
        if f"def {name}(" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert missing == []
