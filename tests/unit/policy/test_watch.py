"""Watching a policy file for changes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headgate import ConfigError
from headgate.policy import AsyncLivePolicy, LivePolicy, PolicyError, parse_policy
from tests.unit.policy.conftest import Author

NEVER = 3600.0
OFTEN = 0.001
PATIENCE = 30.0
"""Seconds after which a waiting test fails."""


@contextmanager
def changing(live: LivePolicy) -> Iterator[threading.Event]:
    """Wait at the end of a block until the policy has changed."""
    changed = threading.Event()
    live.on_change(changed.set)
    yield changed
    assert changed.wait(PATIENCE)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def follow_login(author: Author) -> LivePolicy:
    """Return the live policy of a file with one limiter of 5 per minute."""
    author.limit("5/minute")
    return LivePolicy.from_file(author.path)


def test_a_rewritten_or_replaced_file_is_reloaded(author: Author, tmp_path: Path) -> None:
    live = follow_login(author)
    before = author.path.stat()
    author.limit("6/minute")
    os.utime(author.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time
    live.poll()
    assert live["login"].rules[0].quota.limit == 6
    replacement = tmp_path / "new.toml"
    replacement.write_text('[limiters.login]\nrules = ["7/minute"]\n')
    replacement.replace(author.path)
    live.poll()
    assert live["login"].rules[0].quota.limit == 7


def test_a_swapped_link_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: file -> ..data/file, ..data -> a folder per version."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "headgate.toml").write_text(f'[limiters.login]\nrules = ["{version}/minute"]')
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "headgate.toml").symlink_to("data/headgate.toml")
    live = LivePolicy.from_file(tmp_path / "headgate.toml")
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").replace(tmp_path / "data")
    live.poll()
    assert live["login"].rules[0].quota.limit == 2


def test_a_thread_notices_a_change(author: Author) -> None:
    live = follow_login(author)
    with live.watch(OFTEN):
        with changing(live):
            author.limit("6/minute")
        assert live["login"].rules[0].quota.limit == 6


def test_a_watching_thread_can_be_stopped_by_another_one_and_more_than_once(author: Author) -> None:
    watching = follow_login(author).watch(NEVER)
    with ThreadPoolExecutor() as pool:
        pool.submit(watching.stop).result(PATIENCE)
    assert "headgate-policy" not in [thread.name for thread in threading.enumerate()]
    watching.stop()


def test_a_watching_thread_can_be_stopped_by_a_listener(author: Author) -> None:
    live = follow_login(author)
    stopped: list[threading.Thread] = []

    def stop() -> None:
        watching.stop()
        stopped.append(threading.current_thread())
        has_stopped.set()

    has_stopped = threading.Event()
    live.on_change(stop)
    watching = live.watch(OFTEN)
    author.limit("6/minute")
    assert has_stopped.wait(PATIENCE)
    stopped[0].join(PATIENCE)
    assert not stopped[0].is_alive()


@pytest.mark.parametrize("every", [0, -1, float("nan"), float("inf"), 1e300, "1", None, timedelta(seconds=1)])
async def test_the_pause_must_be_a_positive_number(author: Author, every: Any) -> None:
    author.limit("5/minute")
    with pytest.raises(ConfigError, match="every= is seconds above 0"):
        LivePolicy.from_file(author.path).watch(every)
    with pytest.raises(ConfigError, match="every= is seconds above 0"):
        async with asyncio.timeout(PATIENCE):
            await AsyncLivePolicy.from_file(author.path).watch(every)


async def test_a_task_notices_a_change(author: Author) -> None:
    author.limit("5/minute")
    live, changed = AsyncLivePolicy.from_file(author.path), asyncio.Event()
    live.on_change(changed.set)
    task = asyncio.create_task(live.watch(OFTEN))
    author.limit("6/minute")
    async with asyncio.timeout(PATIENCE):
        await changed.wait()
    task.cancel()
    assert live["login"].rules[0].quota.limit == 6


async def test_only_a_file_can_be_watched() -> None:
    policy = parse_policy('[limiters.login]\nrules = ["5/minute"]')
    with pytest.raises(PolicyError, match="from_file"):
        await AsyncLivePolicy(policy).watch()
    with pytest.raises(PolicyError, match="from_file"):
        LivePolicy(policy).watch()


def test_an_error_and_its_end_are_logged_once(author: Author, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headgate")
    live = follow_login(author)
    author.limit("5/fortnight")
    live.poll()
    live.poll()
    author.write('[limiters.login]\n# still invalid\nrules = ["5/fortnight"]')
    live.poll()
    assert len(errors_in(caplog)) == 2
    assert all("the policy stays as it was: " in line and "fortnight" in line for line in errors_in(caplog))
    author.path.unlink()
    live.poll()
    live.poll()
    assert len(errors_in(caplog)) == 3
    assert live.last_error is not None
    caplog.clear()
    author.limit("5/minute")
    live.poll()
    assert live.last_error is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{author.path} is valid again, without changes"


@pytest.mark.parametrize("broken", ["headgate.policy.live.parse_policy", "headgate.policy.live.read_policy"])
def test_an_unexpected_error_does_not_end_watching(
    author: Author, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    live = follow_login(author)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("redis://ada:s3cret@host")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        author.limit("6/minute")
        live.poll()
        live.poll()
    (line,) = errors_in(caplog)
    assert line.startswith("the policy stays as it was")
    assert live.last_error is not None
    assert live.last_error.startswith("ZeroDivisionError(")
    assert "s3cret" not in live.last_error
    assert live["login"].rules[0].quota.limit == 5
    author.limit("7/minute")
    live.poll()
    assert live.last_error is None
    assert live["login"].rules[0].quota.limit == 7
