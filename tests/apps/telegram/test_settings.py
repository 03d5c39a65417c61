"""Settings of the bot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product

import pytest

from headgate import ConfigError
from headgate_services.common.settings import explained_errors
from headgate_services.telegram import TelegramSettings, create_app

REQUIRED = {"TELEGRAM_BOT_TOKEN": "1:token", "TELEGRAM_WEBHOOK_SECRET": "s3cret"}

NOT_POSITIVE_INTEGERS = ["", " ", "0", "-1", "10abc", "1.5", "1e3", "1_000", "٣", "0x10", "9" * 5000, "NaN"]


def read(environment: dict[str, str]) -> TelegramSettings:
    with explained_errors():
        return TelegramSettings(**environment)


def settings_of(environment: dict[str, str]) -> TelegramSettings:
    """Return the settings of a bot with these variables besides the required ones."""
    return read(REQUIRED | environment)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *product(("RATE_LIMIT_MAX", "RATE_LIMIT_WINDOW_MS"), NOT_POSITIVE_INTEGERS),
        ("RATE_LIMIT_MAX", str(2**53)),  # too large to count with
        ("RATE_LIMIT_WINDOW_MS", str(367 * 24 * 3_600_000)),
    ],
)
def test_a_number_that_is_none_falls_back_to_the_default_with_a_warning(
    name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """TX-4."""
    settings = settings_of({name: text})
    assert (settings.rate_limit_max, settings.rate_limit_window_ms) == (20, 3_600_000)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert name in record.getMessage()


def test_numbers_are_read(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"RATE_LIMIT_MAX": " 3 ", "RATE_LIMIT_WINDOW_MS": "007", "AGENT_TIMEOUT": "+5"}
    settings = settings_of(environment)
    assert (settings.rate_limit_max, settings.rate_limit_window_ms, settings.agent_timeout) == (3, 7, 5)
    assert caplog.text == ""


@pytest.mark.parametrize("blank", ["", " "])
def test_another_blank_variable_counts_as_unset(blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = settings_of({})
    for name in ("RATE_LIMIT_KV", "RATE_LIMIT_REPLIES", "TELEGRAM_API_BASE"):
        monkeypatch.setenv(name, blank)
    assert settings_of({}) == usual


def test_an_address_is_read(caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of({"HOST": " ::1 ", "PORT": "9000"})
    assert (settings.host, settings.port, caplog.text) == ("::1", 9000, "")
    settings = settings_of({"HOST": " ", "PORT": "65536"})
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert "PORT='65536'" in caplog.text


def test_an_unknown_algorithm_falls_back_to_the_default_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert settings_of({"RATE_LIMIT_ALGORITHM": "leaky"}).rate_limit_algorithm == "fixed_window"
    assert "RATE_LIMIT_ALGORITHM='leaky'" in caplog.text
    strict = settings_of({"RATE_LIMIT_ALGORITHM": " Sliding_Window "})
    assert strict.rate_limit_algorithm == "sliding_window"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("42", {"42"}),
        (" 42 ,43,\t44\n", {"42", "43", "44"}),
        ("42,,43,", {"42", "43"}),
        ("", set()),
        (" , ", set()),
    ],
)
def test_the_list_of_users(text: str, ids: set[str]) -> None:
    assert settings_of({"ALLOWED_USER_IDS": text}).allowed_user_ids == ids


@pytest.mark.parametrize("text", ["abc,@bob", "42,@bob", "42 43", "-42", "٤٢"])
def test_a_user_who_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ALLOWED_USER_IDS: .* is not a user id"):
        settings_of({"ALLOWED_USER_IDS": text})


def test_a_bot_that_nobody_may_use_says_so(
    make_settings: Callable[..., TelegramSettings], caplog: pytest.LogCaptureFixture
) -> None:
    create_app(make_settings(ALLOWED_USER_IDS="", RATE_LIMIT_KV="memory://"))
    assert "nobody may use the bot" in caplog.text


@pytest.mark.parametrize("missing", sorted(REQUIRED))
@pytest.mark.parametrize("text", [None, "", "  "])
def test_an_empty_secret_or_token_is_refused(missing: str, text: str | None) -> None:
    environment = {name: value for name, value in REQUIRED.items() if name != missing}
    with pytest.raises(ConfigError, match=missing):
        read(environment if text is None else environment | {missing: text})


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"RATE_LIMIT_KV": "dynamodb://table"}, "dynamodb"),
        ({"RATE_LIMIT_KV": "cloudflare"}, "account"),
        ({"AGENT_URL": "http://agent", "AGENT_HANDLER": "a:b"}, "AGENT_URL: is set as well as AGENT_HANDLER"),
        ({"AGENT_HANDLER": "no.such.module:function", "RATE_LIMIT_KV": "memory://"}, "no"),
        ({"AGENT_HANDLER": "json:no_such_function", "RATE_LIMIT_KV": "memory://"}, "no_such_function"),
        ({"RATE_LIMIT_REPLIES": "often"}, "RATE_LIMIT_REPLIES: .*often"),
        ({"AGENT_HANDLER": "math:pi", "RATE_LIMIT_KV": "memory://"}, "not a function"),
        ({"AGENT_HANDLER": ":x", "RATE_LIMIT_KV": "memory://"}, "package.module:function"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_start(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        create_app(settings_of(environment))


def test_secrets_are_not_shown() -> None:
    environment = {"RATE_LIMIT_KV": "redis://:sesame@host", "CLOUDFLARE_API_TOKEN": "cf-token"}
    shown = repr(settings_of(environment))
    for secret in ("1:token", "s3cret", "sesame", "cf-token"):
        assert secret not in shown


@pytest.mark.parametrize("name", ["AGENT_URL", "TELEGRAM_API_BASE", "CLOUDFLARE_API_BASE"])
@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "agent.example.org/in",
        "ftp://agent",
        "http://",
        "https:///in",
        "http://h:x/",
        "http://h:99999/",
        "//h",
    ],
)
def test_an_address_that_is_not_of_the_web_is_refused(name: str, url: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: "):
        settings_of({name: url})


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/in", "HTTPS://agent.example.org", "http://[::1]:8080/a?b=c"]
)
def test_an_address_of_the_web_is_accepted(url: str) -> None:
    assert settings_of({"AGENT_URL": url}).agent_url == url
