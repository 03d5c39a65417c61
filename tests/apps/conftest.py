"""Fixtures of all services."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from headgate.testing.postgres_server import PostgresServer, new_database
from headgate_server import cli, kept_result
from tests.apps.processes import is_setting
from tests.apps.timeouts import Timeouts

Command = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(is_setting, list(os.environ)):
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Undo changes of logging by a service that starts in this process."""
    loggers = [logging.getLogger(name) for name in ("", "headgate", "headgate_services", "uvicorn")]
    levels = [logger.level for logger in loggers]
    handlers = list(logging.getLogger().handlers)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.getLogger().handlers[:] = handlers


@pytest.fixture(autouse=True)
def _fresh_readiness() -> Iterator[None]:
    """Query the stores on every request to `/readyz`; `test_health` checks the cache."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kept_result, "KEPT_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_parser() -> Iterator[None]:
    """Build the parser of `headgate` once; it takes longer than most commands."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(cli, "make_parser", cache(cli.make_parser))
        yield


@pytest.fixture
def timeouts() -> Iterator[Timeouts]:
    """Short time limits for databases only while their server is paused or gone."""
    with pytest.MonkeyPatch.context() as patches:  # a test may undo its own
        yield Timeouts(patches)


@pytest.fixture
def empty_url(headgate_postgres_server: str) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    with new_database(headgate_postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def own_server() -> Iterator[PostgresServer]:
    """A PostgreSQL that tests may pause, or kill and start again."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_url(own_server: PostgresServer) -> Iterator[str]:
    """An empty database on `own_server`, which runs again in the end."""
    with new_database(own_server.url) as url:
        try:
            yield url
        finally:
            own_server.resume()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Return a function that runs `headgate` in this process with these settings, and returns the exit code and the output.

    The server is never started: reaching it counts as exit code 0.
    """
    monkeypatch.chdir(tmp_path)
    for function in ("serve", "run_workers"):
        monkeypatch.setattr(f"headgate_services.common.starting.{function}", lambda *args, **options: 0)

    def run(*arguments: str, **variables: object) -> tuple[int, str]:
        with monkeypatch.context() as patches:
            for name, value in variables.items():
                patches.setenv(name, str(value))
            code = cli.main(list(arguments))
        output = capsys.readouterr()
        return code or 0, output.out + output.err

    return run
