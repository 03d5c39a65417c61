"""Log lines."""

from __future__ import annotations

import logging
import re

import pytest

from headgate_services.mail.providers import ProviderError
from tests.apps.mail.conftest import Start

LIMITER = "headgate_services.mail.rate_limiter"
FILTER = "headgate_services.mail.domain_filter"


def lines(caplog: pytest.LogCaptureFixture, logger: str, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if (r.name, r.levelno) == (logger, level)]


@pytest.mark.requirement("N-45", "N-46", "N-47", "N-48", "N-49")
async def test_n49_a_refusal_is_one_warning(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = await start(global_send_rate_limit_per_minute=5)
    await service.send_many(5)
    service.clock.advance(13)
    refusals = [await service.send() for _ in range(3)]
    warnings = lines(caplog, LIMITER, logging.WARNING)
    assert len(warnings) == len(refusals)
    for answer, line in zip(refusals, warnings, strict=True):
        found = re.fullmatch(
            r"Rate limit exceeded: per-minute limit reached \(5/5\); retry after (\d+) s", line
        )
        assert found
        assert found[1] == answer.headers["retry-after"] == "48"


@pytest.mark.requirement("N-46", "N-48")
@pytest.mark.parametrize(
    ("per_minute", "exhausted"),
    [
        (0, "per-hour limit reached (2/2)"),
        (2, "per-minute limit reached (2/2); per-hour limit reached (2/2)"),
    ],
)
async def test_n46_every_exhausted_window_is_named(
    start: Start, caplog: pytest.LogCaptureFixture, per_minute: int, exhausted: str
) -> None:
    service = await start(global_send_rate_limit_per_minute=per_minute, global_send_rate_limit_per_hour=2)
    await service.send_many(2)
    wait = (await service.send()).headers["retry-after"]
    [line] = lines(caplog, LIMITER, logging.WARNING)
    assert (line, wait) == (f"Rate limit exceeded: {exhausted}; retry after {wait} s", "3601")


@pytest.mark.requirement("N-50", "N-51")
async def test_n50_n51_an_allowed_send_is_two_debug_lines(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=LIMITER)
    service = await start(global_send_rate_limit_per_minute=5, global_send_rate_limit_per_hour=50)
    for _ in range(2):
        await service.send_many(4)
        service.clock.advance(61)
    await service.send_many(2)
    caplog.clear()
    assert await service.send_many(1) == [201]
    passed, recorded = lines(caplog, LIMITER, logging.DEBUG)
    assert re.fullmatch(r"Rate limit check passed: per-minute: 2/5, per-hour: 10/50", passed)
    assert re.fullmatch(r"Send recorded: per-minute: 3/5, per-hour: 11/50", recorded)


@pytest.mark.requirement("N-50")
async def test_nx7_a_window_without_limit_is_unlimited(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=LIMITER)
    service = await start(global_send_rate_limit_per_minute=5)
    await service.send_many(4)
    assert lines(caplog, LIMITER, logging.DEBUG)[-2:] == [
        "Rate limit check passed: per-minute: 3/5, per-hour: 3/unlimited",
        "Send recorded: per-minute: 4/5, per-hour: 4/unlimited",
    ]


async def test_a_failed_send_is_not_said_to_be_recorded(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=LIMITER)
    service = await start(global_send_rate_limit_per_minute=5)
    service.provider.error = ProviderError("no route to host")
    await service.send()
    assert lines(caplog, LIMITER, logging.DEBUG) == [
        "Rate limit check passed: per-minute: 0/5, per-hour: 0/unlimited"
    ]
    [line] = lines(caplog, "headgate_services.mail.sending", logging.ERROR)
    assert re.fullmatch(r"Provider fake failed to send message [0-9a-f-]{36}: .*no route to host.*", line)


@pytest.mark.requirement("N-52", "N-34")
async def test_n52_the_filter_logs_blocks_at_info_and_passes_at_debug(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "headgate_services")
    service = await start(global_send_rate_limit_per_minute=5, outbound_domain_blocklist=r"(.*\.)?evil\.com")
    assert (await service.send("x@mail.evil.com")).status_code == 403
    [line] = lines(caplog, FILTER, logging.INFO)
    assert re.fullmatch(r"outbound domain mail\.evil\.com blocked by pattern '.*evil.*'", line)
    assert not any(record.name == LIMITER for record in caplog.records)
    await service.send("x@example.com")
    assert lines(caplog, FILTER, logging.DEBUG) == ["outbound domain example.com allowed"]
