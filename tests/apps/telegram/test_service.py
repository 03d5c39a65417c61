"""The service in a process, and its commands."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from headgate_server.cli import main
from tests.apps.processes import service_process
from tests.apps.telegram.bot_api_server import Bot, BotApiServer
from tests.apps.telegram.conftest import SECRET, Start
from tests.apps.telegram.updates import text_update, topic_update

REFUSAL = "You've reached the message limit. Please try again later."


@pytest.fixture
def environment(bot_api: tuple[BotApiServer, str], token: str) -> dict[str, str]:
    return {
        "TELEGRAM_BOT_TOKEN": token,
        "TELEGRAM_WEBHOOK_SECRET": SECRET,
        "TELEGRAM_API_BASE": bot_api[1],
        "ALLOWED_USER_IDS": "42",
        "RATE_LIMIT_MAX": "3",
    }


async def test_the_limit_outlives_a_restart(
    tmp_path: Path,
    start: Start,
    environment: dict[str, str],
    bot: Bot,
    token: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts are in a file: first with the service in this process, then with `headgate run telegram`."""
    monkeypatch.chdir(tmp_path)
    before = await start(kv=None, handler="configured", clock=None, **environment)
    await before.send(text_update(text="one"), text_update(text="two"))
    headers = {"X-Telegram-Bot-Api-Secret-Token": SECRET}
    async with (
        service_process("telegram", tmp_path, **environment) as service,
        httpx.AsyncClient(base_url=service.url) as client,
    ):
        assert (await client.get("/")).text == "OK"
        assert (await client.post("/telegram/webhook", json={})).status_code == 401
        for update in (topic_update(77, text="three"), topic_update(77, text="four")):
            response = await client.post("/telegram/webhook", json=update, headers=headers)
            assert (response.status_code, response.json()) == (200, {"ok": True})
    assert [sent["text"] for sent in bot.sent()] == ["one", "two", "three", REFUSAL]
    log = "".join(service.log)
    assert "user 42 has reached the message limit" in log
    assert token.partition(":")[2] not in log
    assert "Traceback" not in log


class TestCommands:
    @pytest.fixture(autouse=True)
    def in_environment(
        self, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    @pytest.mark.parametrize(
        ("given", "registered"),
        [
            ("https://bot.example.org", "https://bot.example.org/telegram/webhook"),
            ("https://bot.example.org:8443/", "https://bot.example.org:8443/telegram/webhook"),
            ("https://example.org/bots/telegram/webhook", "https://example.org/bots/telegram/webhook"),
        ],
    )
    def test_set_webhook_registers_this_service(
        self, given: str, registered: str, bot: Bot, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["telegram", "set-webhook", given]) == 0
        assert capsys.readouterr().out == "Webhook was set\n"
        assert bot.webhook == {
            "url": registered,
            "secret_token": SECRET,
            "allowed_updates": ["message", "callback_query"],
        }

    @pytest.mark.parametrize("url", ["http://bot.example.org", "bot.example.org", "https://", ""])
    def test_set_webhook_takes_https_addresses_only(
        self, url: str, bot: Bot, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["telegram", "set-webhook", url]) == 1
        assert "https://" in capsys.readouterr().err
        assert bot.calls == []

    @pytest.mark.parametrize("path", ["/custom", "/telegram/webhook/", "/telegram/webhooks"])
    def test_set_webhook_takes_no_path_that_answers_404(
        self, path: str, bot: Bot, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["telegram", "set-webhook", f"https://bot.example.org{path}"]) == 1
        assert "/telegram/webhook only" in capsys.readouterr().err
        assert bot.calls == []

    def test_set_webhook_says_why_telegram_refuses(
        self, bot: Bot, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bot.fail("setWebhook", 400, "Bad Request: bad webhook: Failed to resolve host")
        assert main(["telegram", "set-webhook", "https://bot.example.org"]) == 1
        assert "Failed to resolve host" in capsys.readouterr().err
