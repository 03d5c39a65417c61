"""Decisions in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from headgate import ConfigError, CostTooHigh, Limiter, StoreUnavailable, sliding_window
from headgate.hooks import Call
from headgate.observe import LogHook
from headgate.testing import FakeClock

NAME = "headgate.decisions"

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the lines so far; DEBUG lines only if a test enables that level."""
    caplog.set_level(logging.INFO, NAME)
    return lambda: [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_a_refusal_is_one_structured_line(caplog: pytest.LogCaptureFixture, lines: Lines) -> None:
    clock = FakeClock()
    rule = sliding_window("1/minute", buckets=1000)
    limiter = Limiter(rule, name="login", clock=clock, hooks=[LogHook(keys="plain")])
    limiter.hit("alice")
    refused = limiter.hit("alice", tier="pro")
    [line] = lines()
    assert line == (
        "WARNING refused limiter=login key=alice cost=1 tier=pro rule=per-minute remaining=0 "
        f"retry_after={refused.retry_after} swallowed=0"
    )
    record = vars(caplog.records[0])
    assert record["headgate_event"] == "refused"
    assert record["headgate_retry_after"] == refused.retry_after
    assert record["headgate_limiter"] == "login"


def test_admissions_are_logged_at_debug_and_checks_are_not_logged(
    caplog: pytest.LogCaptureFixture, lines: Lines
) -> None:
    limiter = Limiter("1/minute", hooks=[LogHook(keys="none")])
    caplog.set_level(logging.DEBUG, NAME)
    limiter.hit("alice")
    limiter.check("alice")
    assert lines() == ["DEBUG admitted limiter=- key=- cost=1 tier=- rule=per-minute remaining=0"]


def test_lines_above_the_rate_are_swallowed_and_counted(lines: Lines) -> None:
    clock = FakeClock()
    hook = LogHook(rate="3/s burst 3", clock=clock)
    limiter = Limiter("0/minute", hooks=[hook])
    for _ in range(100):
        limiter.hit("alice")
    assert len(lines()) == 3
    assert hook.swallowed == 97
    clock.advance(1)
    limiter.hit("alice")
    assert lines()[-1].endswith("swallowed=97")
    limiter.hit("alice")
    assert lines()[-1].endswith("swallowed=0")


def test_without_a_rate_nothing_is_swallowed(lines: Lines) -> None:
    limiter = Limiter("0/minute", hooks=[LogHook(rate=None)])
    for _ in range(100):
        limiter.hit("alice")
    assert len(lines()) == 100


def test_lines_below_the_log_level_are_not_counted_as_swallowed(
    caplog: pytest.LogCaptureFixture, lines: Lines
) -> None:
    caplog.set_level(logging.CRITICAL, NAME)
    hook = LogHook(rate="1/hour")
    limiter = Limiter("0/minute", hooks=[hook])
    for _ in range(3):
        limiter.hit("alice")
    assert (lines(), hook.swallowed) == ([], 0)


def test_different_keys_have_different_digests(lines: Lines) -> None:
    limiter = Limiter("0/minute", hooks=[LogHook()])
    for key in ("alice", "alice", "bob", b"alice"):
        limiter.hit(key)
    shown = [line.split("key=")[1].split()[0] for line in lines()]
    assert shown[0] == shown[1]
    assert len(set(shown)) == 3
    assert "alice" not in "".join(lines())
    assert all(len(digest) == 8 for digest in shown)


def test_each_hook_has_different_digests(lines: Lines) -> None:
    for hook in (LogHook(), LogHook()):
        Limiter("0/minute", hooks=[hook]).hit("alice")
    first, second = lines()
    assert first != second


def test_scoped_keys_are_logged_with_their_scope(lines: Lines) -> None:
    limiter = Limiter(sliding_window("0/minute", scope="user"), hooks=[LogHook(keys="plain")])
    limiter.hit({"user": "alice"})
    limiter.hit({"user": b"\x01"})
    assert "key=user:alice " in lines()[0]
    assert "key=\"user:b'\\\\x01'\" " in lines()[1]


def test_key_cannot_forge_a_log_line(lines: Lines) -> None:
    limiter = Limiter("0/minute", hooks=[LogHook(keys="plain")])
    limiter.hit("x\nWARNING refused limiter=admin", tier="a b=c")
    [line] = lines()
    assert "\n" not in line
    assert "key='x\\nWARNING refused limiter=admin'" in line
    assert "tier='a b=c'" in line


def test_plain_keys_are_redacted(lines: Lines) -> None:
    limiter = Limiter("0/minute", hooks=[LogHook(keys="plain")])
    limiter.hit("redis://user:s3cret@host")
    assert "s3cret" not in lines()[0]


def test_store_failures_are_logged_without_credentials(lines: Lines) -> None:
    call = Call("login", "hit", "alice", 1, None)
    hook = LogHook(keys="none")
    hook.failed(call, StoreUnavailable("redis://user:s3cret@host is down"), 0.1)
    hook.failed(call, CostTooHigh(6, 5, "burst"), 0.0)
    hook.failed(call, ConfigError("a bug of the caller's, which is raised to them"), 0.0)
    assert lines() == [
        (
            "ERROR failed limiter=login key=- cost=1 tier=- operation=hit "
            "error='StoreUnavailable: redis://***@host is down' swallowed=0"
        ),
        "WARNING refused limiter=login key=- cost=1 tier=- rule=burst capacity=5 swallowed=0",
    ]


def test_degraded_decision_is_marked_in_the_log(lines: Lines) -> None:
    limiter = Limiter("1/minute")
    limiter.hit("a")
    LogHook().decided(Call("", "hit", "a", 1, None), limiter.hit("a").as_degraded(), 0.0)
    assert "degraded=True" in lines()[0]


def test_custom_logger_and_level(caplog: pytest.LogCaptureFixture) -> None:
    own = logging.getLogger("own")
    with caplog.at_level(logging.INFO, "own"):
        Limiter("0/minute", hooks=[LogHook(own, level=logging.INFO)]).hit("a")
    assert [(record.name, record.levelname) for record in caplog.records] == [("own", "INFO")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"level": "WARNING"},
            "level, as logging.WARNING, must be a whole number from 0 to 1000, not 'WARNING'",
        ),
        ({"level": True}, "level, as logging.WARNING, must be a whole number from 0 to 1000, not True"),
        ({"logger": "own"}, "logger is what getLogger returns, not 'own'"),
        ({"logger": logging.Logger}, "logger is what getLogger returns, not <class 'logging.Logger'>"),
    ],
)
def test_invalid_logger_and_level_are_refused(options: dict[str, Any], message: str) -> None:
    """A failing hook is logged only once, so later refusals would not be logged."""
    with pytest.raises(ConfigError) as caught:
        LogHook(**options)
    assert str(caught.value) == message


def test_unknown_keys_option_is_refused() -> None:
    with pytest.raises(ConfigError):
        LogHook(keys="hashed")  # type: ignore[arg-type]
