"""Start-up of the services that count in a Redis."""

from __future__ import annotations

import pytest

from headgate.testing.servers import RedisServer
from tests.apps.conftest import Command

TELEGRAM = {"TELEGRAM_BOT_TOKEN": "1:x", "TELEGRAM_WEBHOOK_SECRET": "s", "SEEN_UPDATES_KV": "memory://"}


@pytest.mark.parametrize(
    ("service", "variables", "store", "warning"),
    [
        (
            "mail",
            {"GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "5"},
            "RATE_LIMIT_STORE",
            "Rate limit store unavailable",
        ),
        ("telegram", TELEGRAM, "RATE_LIMIT_KV", "messages are not limited until it is back"),
        ("tiers", {"SAJU_ENABLE_RATE_LIMITING": "true"}, "SAJU_REDIS_URL", "Redis cannot be reached"),
    ],
)
def test_a_store_that_refuses_stops_start_up_and_one_that_is_down_does_not(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    service: str,
    variables: dict[str, str],
    store: str,
    warning: str,
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **options: None)

    def start(password: str) -> tuple[int, str]:
        url = f"redis://:{password}@127.0.0.1:{redis.port}"
        return command("run", service, **variables, **{store: url})

    with RedisServer(options=("--requirepass", "s3cret")) as redis:
        assert start("s3cret")[0] == 0
        code, output = start("hunter2")
        assert (code, "hunter2" in output) == (2, False)
        assert output.splitlines()[-1].startswith(f"{store}: ")
    assert start("s3cret")[0] == 0
    assert warning in caplog.text
