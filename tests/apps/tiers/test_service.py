"""The service as its users run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headgate.testing import FakeClock
from headgate.testing.servers import RedisServer
from headgate_services.tiers import TiersSettings, create_app
from headgate_services.tiers.load_test import Run, _load_checks, load_test
from tests.apps.conftest import Command
from tests.apps.processes import client_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.requirement("S-32")
async def test_s32_refusals_and_what_is_left_can_be_watched(tmp_path: Path) -> None:
    settings = TiersSettings(saju_enable_rate_limiting=True, database_url=f"sqlite:///{tmp_path / 'keys.db'}")
    app = create_app(settings, clock=FakeClock())
    async with client_of(app) as client:
        assert [(await client.get("/v1/whoami")).status_code for _ in range(7)] == [200] * 5 + [429] * 2
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = set(answer.text.splitlines())
    assert {
        'saju_rate_limit_429_total{tier="anonymous"} 2.0',
        'saju_rate_limit_429_total{tier="pro"} 0.0',
        'saju_rate_limit_remaining_count{tier="anonymous"} 7.0',
        'saju_rate_limit_remaining_sum{tier="anonymous"} 10.0',
        'saju_rate_limit_remaining_bucket{le="0.0",tier="anonymous"} 3.0',
        'saju_rate_limit_decisions_total{backend="memory",outcome="allowed",tier="anonymous"} 5.0',
        'saju_rate_limit_limit{tier="pro"} 300.0',
    } <= samples


@pytest.mark.requirement("S-18")
async def test_without_the_switch_nothing_is_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(TiersSettings(database_url=f"sqlite:///{tmp_path / 'keys.db'}"))
    assert "Rate limiting is off" in caplog.text
    async with client_of(app) as client:
        answers = [await client.get("/v1/whoami") for _ in range(9)]
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json()["limit"] is None
    assert "x-ratelimit-limit" not in answers[0].headers


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SAJU_ENABLE_RATE_LIMITING", "perhaps"),
        ("SAJU_ENABLE_ATOMIC_RATE_LIMITER", "2"),
        ("SAJU_REDIS_URL", "memcached://ada:hunter2@host"),
        ("SAJU_REDIS_TIMEOUT", "0"),
        ("SAJU_RATE_LIMITS", "pro=5"),
        ("SAJU_TRUSTED_PROXIES", "everybody"),
        ("SAJU_FORWARDED_HEADER", "x-real-ip"),
        ("DATABASE_URL", "mysql://ada:hunter2@host/db"),
        ("PORT", "70000"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_setting_stops_start_up_by_name(command: Command, variable: str, value: str) -> None:
    code, output = command("run", "tiers", **{"SAJU_ENABLE_RATE_LIMITING": "true", variable: value})
    assert (code, output.startswith(f"{variable}: "), "hunter2" in output) == (2, True, False)


@pytest.mark.parametrize(("proxies", "statuses"), [("", [200, 429]), ("127.0.0.0/8", [200, 200])])
async def test_forwarded_addresses_are_believed_only_from_named_proxies(
    tmp_path: Path, proxies: str, statuses: list[int]
) -> None:
    """That the server underneath believes nobody either is part of `test_s17_a_whole_run_leaves_no_password_in_the_log`."""
    settings = TiersSettings(
        saju_enable_rate_limiting=True,
        saju_rate_limits="anonymous=1 burst 1",
        saju_trusted_proxies=proxies,
        database_url=f"sqlite:///{tmp_path / 'keys.db'}",
    )
    async with client_of(create_app(settings)) as client:  # from 127.0.0.1
        headers = [{"X-Forwarded-For": f"198.51.100.{host}"} for host in (1, 2)]
        answers = [await client.get("/v1/whoami", headers=each) for each in headers]
    assert [answer.status_code for answer in answers] == statuses


@pytest.mark.requirement("S-28", "S-29")
@pytest.mark.parametrize(
    "path", ["services/common/tests/test_rate_limit.py", "saju-engine/tests/test_rate_limit.py"]
)
def test_the_test_files_of_the_document_are_under_their_names(path: str) -> None:
    assert "\nasync def test_" in (Path(__file__).parent / path).read_text(encoding="utf-8")


@pytest.mark.requirement("S-26", "S-30")
def test_s30_the_load_test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Two instances and one Redis: capacity 1 and 100 requests at once admit exactly one, in both modes."""
    with RedisServer(options=("--requirepass", "s3cret")) as server:
        code = load_test(f"redis://:s3cret@127.0.0.1:{server.port}/0", seconds=0.3, clients=8)
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.count("pass  capacity 1, 100 at once: exactly one is admitted: 1 admitted, 99 refused") == 2
    assert said.count("pass  no credentials in the logs: 0 lines") == 2
    assert said.endswith("PASS: 16 of 16 checks hold\n")


@pytest.mark.requirement("S-30")
def test_s30_the_plan_is_written_down() -> None:
    plan = (ROOT / "docs" / "RATE_LIMIT_LOAD_TEST_PLAN.md").read_text("utf-8")
    for promised in (
        "headgate tiers load-test",
        "SAJU_ENABLE_ATOMIC_RATE_LIMITER",
        "two instances",
        "EVALSHA",
    ):
        assert promised in plan


@pytest.mark.requirement("S-31")
def test_s31_the_guide_says_staging_first() -> None:
    guide = (ROOT / "docs" / "services" / "tiers.md").read_text("utf-8")
    rollout = guide[guide.index("## Rolling it out") :].partition("\n## ")[0]
    for promised in ("staging", "INFO commandstats", "saju_rate_limit_429_total", "grep"):
        assert promised in rollout


def test_every_setting_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "services" / "tiers.md").read_text("utf-8")
    rows = set(re.findall(r"`([A-Z][A-Z_]+)`", guide[guide.index("## Settings") :].partition("\n## ")[0]))
    assert {field.upper() for field in TiersSettings.model_fields} <= rows


@pytest.mark.parametrize(("refused", "passes"), [(0, True), (1, False)])
def test_the_load_test_asks_no_more_of_a_slow_machine_than_it_can_send(refused: int, passes: bool) -> None:
    """In three seconds the bucket has room for more than the 21 requests that were sent."""
    run = Run(21, refused, first_sent=0.0, first_answered=0.1, last_sent=3.0, last_answered=3.2)
    assert all(check.passed for check in _load_checks(run)) is passes
