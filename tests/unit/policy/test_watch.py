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
from headgate.policy.live import PolicyFile
from tests.unit.policy.conftest import Author

NEVER = 3600.0
OFTEN = 0.001
PATIENCE = 30.0
"""Seconds after which a test has failed that waits for something to be noticed."""


@contextmanager
def changing(live: LivePolicy) -> Iterator[threading.Event]:
    """Wait at the end of a block until the policy has changed."""
    changed = threading.Event()
    live.on_change(changed.set)
    yield changed
    assert changed.wait(PATIENCE)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


# --- The file ------------------------------------------------------------------------------------------------------------


def test_every_way_of_changing_a_file_is_noticed(author: Author, tmp_path: Path) -> None:
    author.limit("5/minute")
    file = PolicyFile(author.path, None)
    file.read()
    assert not file.has_changed()
    before = author.path.stat()

    author.limit("6/minute")
    os.utime(author.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.has_changed(), "same size, same time"
    file.read()
    assert not file.has_changed()

    replacement = tmp_path / "new.toml"
    replacement.write_text('[limiters.login]\nrules = ["7/minute"]\n')
    replacement.replace(author.path)
    assert file.has_changed(), "replaced, as editors do"
    file.read()

    author.path.unlink()
    assert file.has_changed(), "gone"
    with pytest.raises(PolicyError, match="No such file"):
        file.read()
    assert not file.has_changed(), "still gone"


def test_a_swapped_link_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: file -> ..data/file, ..data -> a folder per version."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "headgate.toml").write_text(f'[limiters.login]\nrules = ["{version}/minute"]')
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "headgate.toml").symlink_to("data/headgate.toml")
    file = PolicyFile(tmp_path / "headgate.toml", None)
    assert file.read().limiters["login"].rules[0].quota.limit == 1
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").replace(tmp_path / "data")
    assert file.has_changed()
    assert file.read().limiters["login"].rules[0].quota.limit == 2


# --- Threads -------------------------------------------------------------------------------------------------------------


def test_a_thread_notices_a_change(author: Author) -> None:
    author.limit("5/minute")
    live = LivePolicy.from_file(author.path)
    with live.watch(OFTEN):
        with changing(live):
            author.limit("6/minute")
        assert live["login"].rules[0].quota.limit == 6


def test_a_thread_that_was_stopped_looks_no_more(author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    author.limit("5/minute")
    live = LivePolicy.from_file(author.path)
    watching = live.watch(OFTEN)
    watching.stop()
    assert "headgate-policy" not in [thread.name for thread in threading.enumerate()]


def test_a_thread_can_be_stopped_from_another_one_and_more_than_once(author: Author) -> None:
    author.limit("5/minute")
    live = LivePolicy.from_file(author.path)
    watching = live.watch(NEVER)
    with ThreadPoolExecutor() as pool:
        pool.submit(watching.stop).result(PATIENCE)
    assert not watching._thread.is_alive()
    watching.stop()


def test_a_thread_can_be_stopped_by_whom_it_tells_of_a_change(author: Author) -> None:
    author.limit("5/minute")
    live = LivePolicy.from_file(author.path)
    errors: list[Exception] = []

    def stop() -> None:
        try:
            watching.stop()
        except RuntimeError as error:
            errors.append(error)

    live.on_change(stop)
    watching = live.watch(OFTEN)
    author.limit("6/minute")
    watching._thread.join(PATIENCE)
    assert not watching._thread.is_alive()
    assert errors == []
    watching.stop()


@pytest.mark.parametrize("every", [0, -1, float("nan"), float("inf"), 1e300, "1", None, timedelta(seconds=1)])
async def test_a_pause_is_one_that_a_thread_can_wait_for(author: Author, every: Any) -> None:
    author.limit("5/minute")
    with pytest.raises(ConfigError, match="every= is seconds above 0"):
        LivePolicy.from_file(author.path).watch(every)
    with pytest.raises(ConfigError, match="every= is seconds above 0"):
        async with asyncio.timeout(PATIENCE):
            await AsyncLivePolicy.from_file(author.path).watch(every)


# --- Tasks ---------------------------------------------------------------------------------------------------------------


@contextmanager
def watched(live: AsyncLivePolicy, every: float) -> Iterator[asyncio.Task[None]]:
    task = asyncio.create_task(live.watch(every))
    try:
        yield task
    finally:
        task.cancel()


async def test_a_task_notices_a_change(author: Author) -> None:
    author.limit("5/minute")
    live, changed = AsyncLivePolicy.from_file(author.path), asyncio.Event()
    live.on_change(changed.set)
    with watched(live, OFTEN):
        author.limit("6/minute")
        async with asyncio.timeout(PATIENCE):
            await changed.wait()
    assert live["login"].rules[0].quota.limit == 6


async def test_only_a_file_can_be_watched() -> None:
    policy = parse_policy('[limiters.login]\nrules = ["5/minute"]')
    with pytest.raises(PolicyError, match="from_file"):
        await AsyncLivePolicy(policy).watch()
    with pytest.raises(PolicyError, match="from_file"):
        LivePolicy(policy).watch()


# --- What is said --------------------------------------------------------------------------------------------------------


def test_an_error_is_logged_once_and_what_puts_it_right_too(
    author: Author, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headgate")
    author.limit("5/minute")
    live = LivePolicy.from_file(author.path)
    author.limit("5/fortnight")
    live._look()
    live._look()
    author.write('[limiters.login]\n# still not right\nrules = ["5/fortnight"]')
    live._look()
    assert len(errors_in(caplog)) == 2
    assert all("the policy stays as it was: " in line and "fortnight" in line for line in errors_in(caplog))
    author.path.unlink()
    live._look()
    live._look()
    assert len(errors_in(caplog)) == 3
    assert live.last_error is not None
    caplog.clear()
    author.limit("5/minute")
    live._look()
    assert live.last_error is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{author.path} was read again: nothing has changed"


@pytest.mark.parametrize("broken", ["headgate.policy.live.parse_policy", "headgate.policy.live.read_policy"])
def test_an_unexpected_error_does_not_end_watching_either(
    author: Author, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    author.limit("5/minute")
    live = LivePolicy.from_file(author.path)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("redis://ada:s3cret@host")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        author.limit("6/minute")
        live._look()
        live._look()
    (line,) = errors_in(caplog)
    assert line.startswith("the policy stays as it was")
    assert live.last_error is not None
    assert live.last_error.startswith("ZeroDivisionError(")
    assert "s3cret" not in live.last_error
    assert live["login"].rules[0].quota.limit == 5
    author.limit("7/minute")
    live._look()
    assert live.last_error is None
    assert live["login"].rules[0].quota.limit == 7
