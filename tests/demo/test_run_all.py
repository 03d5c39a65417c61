"""`headgate run all`: the four services together, as their environment says."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import httpx
import pytest

from headgate_server.hosting import PortTaken, listen
from headgate_services.demo import all_services, run_all
from tests.demo.support import Program, until_ended


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    return {
        **{f"{service}_PORT": "0" for service in ("MAIL", "TELEGRAM", "TIERS", "PETITIONS")},
        "PORT": "1",
        "DATABASE_URL": "",
        "MAIL_DATABASE_URL": f"sqlite:///{folder / 'mail.db'}",
        "TIERS_DATABASE_URL": f"sqlite:///{folder / 'tiers.db'}",
        "PETITION_DATA_DIR": str(folder / "petitions"),
        "RATE_LIMIT_KV": "memory://",
        "TELEGRAM_BOT_TOKEN": "1:test",
        "TELEGRAM_WEBHOOK_SECRET": "secret",
        "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "1",
    }


def test_all_four_run_and_stop_together(environment: dict[str, str]) -> None:
    with Program("run", "all", environment=environment) as program:
        program.wait_for_output("petitions ")
        urls = dict(re.findall(r"^(\w+) +(http://\S+)$", program.output, re.MULTILINE))
        assert list(urls) == ["mail", "telegram", "tiers", "petitions"]
        for name, url in urls.items():
            path = "/" if name == "telegram" else "/health"
            assert httpx.get(url + path, timeout=30, trust_env=False).status_code == 200, name
        limit = httpx.get(f"{urls['mail']}/v1/rate-limit", timeout=30, trust_env=False).json()
        assert limit["windows"][0]["limit"] == 1
        processes = program.descendants()
        assert processes  # the PostgreSQL of the petitions service
        assert program.tell(signal.SIGTERM) == 0
        until_ended(processes)
    assert "Traceback" not in program.problems


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"TELEGRAM_BOT_TOKEN": ""}, "telegram: TELEGRAM_BOT_TOKEN is missing"),
        ({"GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "-1"}, "mail: GLOBAL_SEND_RATE_LIMIT_PER_MINUTE: "),
        ({"PETITIONS_PORT": "x"}, "petitions: PETITIONS_PORT: must be a whole number"),
        ({"LOG_LEVEL": "loud"}, "LOG_LEVEL: must be one of"),
    ],
)
def test_a_setting_that_cannot_work_is_named(
    environment: dict[str, str],
    variables: dict[str, str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(environment | variables, monkeypatch)
    assert run_all() == 2
    assert capsys.readouterr().err.startswith(complaint)


def test_a_port_that_is_taken_is_named(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        use(environment | {"TIERS_PORT": str(port)}, monkeypatch)
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{port}: address already in use"):
            run_all()


def use(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set environment variables, and keep the configuration of logging."""
    monkeypatch.setattr(all_services, "configure_logging", lambda level, render: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
