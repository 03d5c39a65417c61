"""`bench`: a line for every store, and no remaining counts."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from pathlib import Path

import pytest
import redis

from headgate import StoreUnavailable
from headgate_server.cli import main, stores
from tests.server.cli.conftest import WritePolicy

QUICK = ["bench", "--seconds", "0.05", "--tasks", "4"]
LINE = r"\S+ +[\d,]+ decisions/s   p50 +[\d,.]+ µs   p99 +[\d,.]+ µs"


def test_memory_and_sqlite_are_always_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0
    output, error = capsys.readouterr()
    lines = output.splitlines()
    assert [line.split()[0] for line in lines] == ["memory", "sqlite"]
    assert all(re.fullmatch(LINE, line) for line in lines)
    assert error.splitlines() == [
        "4 concurrent tasks, one rule, 0.05 s per store",
        "measuring memory",
        "measuring sqlite",
    ]


def test_the_sqlite_file_is_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(QUICK) == 0
    assert list(tmp_path.iterdir()) == []


def test_given_stores_are_measured_once_and_left_unchanged(
    write_policy: WritePolicy, headgate_redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(
        'store.url = "sqlite:///limits.db"\n'
        "limiters.a.rules = ['1/s']\nlimiters.b.rules = ['1/s']\n"
        "limiters.c = { rules = ['1/s'], store = 'memory://' }\n"
    )
    named = ["--store", headgate_redis_url, "--store", headgate_redis_url, "--config", "headgate.toml"]
    assert main([*QUICK, *named]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["memory", "sqlite", headgate_redis_url, "sqlite:///limits.db"]
    with redis.Redis.from_url(headgate_redis_url) as client:
        assert list(client.scan_iter("*headgate-bench-*", count=10_000)) == []
    connection = sqlite3.connect("limits.db")
    assert connection.execute("SELECT count(*) FROM headgate_states").fetchone() == (0,)
    connection.close()


def test_an_unreachable_store_is_reported_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*QUICK, "--store", "redis://ada:s3cret@127.0.0.1:1/0"]) == 1
    output, error = capsys.readouterr()
    memory, sqlite, far = output.splitlines()
    assert "decisions/s" in memory
    assert "decisions/s" in sqlite
    assert re.fullmatch(r"redis://\*\*\*@127\.0\.0\.1:1/0  .*Error.*", far)
    assert "s3cret" not in output + error


async def test_an_error_during_the_measurement_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(stores, "_decide", fail)
    with pytest.raises(StoreUnavailable, match="gone"):
        await stores.measure("memory://", 1, 3)


async def test_every_task_decides_at_least_once() -> None:
    assert (await stores.measure("memory://", 0, 2)).decisions == 2


async def test_all_decisions_are_counted() -> None:
    measured = await stores.measure("memory://", 0.01, 2)
    assert measured.decisions == len(measured.latencies) >= 2
    assert measured.latencies == sorted(measured.latencies)


def test_percentiles() -> None:
    measured = stores.Measured(100, 1.0, [1_000 * number for number in range(1, 101)])
    assert (measured.percentile(50), measured.percentile(99)) == (50, 99)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "601"],
        ["--seconds", "nan"],
        ["--seconds", "soon"],
        ["--tasks", "0"],
        ["--tasks", "10001"],
    ],
)
def test_seconds_and_tasks_are_bounded(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert "headgate: argument --" in capsys.readouterr().err
