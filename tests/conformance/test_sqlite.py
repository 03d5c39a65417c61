"""The SQLite store keeps every promise, in one file that threads and processes share."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from headgate import Limiter, SQLiteStore
from headgate.testing import FakeClock, StoreContract
from headgate.testing.contract.base import Contract
from headgate.testing.contract.replay import ReplayTests
from headgate.testing.contract.times import TimeTests
from tests.conformance.writer import NOW, RULES


class SQLiteContract(Contract):
    effort = 0.3

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """One file for all tests, because creating one takes longer than most tests."""
        return tmp_path_factory.mktemp("sqlite") / "limits.db"

    @pytest.fixture(autouse=True)
    def _use(self, database: Path) -> None:
        self.path = database

    def dump(self) -> object:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute("SELECT * FROM headgate_states ORDER BY id").fetchall()


class TestSQLiteAtGivenTimes(SQLiteContract, ReplayTests, TimeTests):
    def make_store(self) -> SQLiteStore:
        return SQLiteStore(self.path)


class TestSQLiteByItsOwnClock(SQLiteContract, StoreContract):
    own_time = True

    def make_store(self) -> SQLiteStore:
        return SQLiteStore(self.path, clock=self.clock)


@pytest.mark.parametrize("written", [1, 7, 40, 100, 333])
def test_a_killed_writer_leaves_complete_states(tmp_path: Path, written: int) -> None:
    """Acknowledged writes are counted; at most one unfinished write is counted too, in all rules or in none."""
    path = tmp_path / "limits.db"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.conformance.writer", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as writer:
        assert writer.stdout is not None
        for _ in range(written):
            assert writer.stdout.readline()
        writer.kill()
        acknowledged = written + len(writer.stdout.readlines())
    with SQLiteStore(path) as store:
        answer = Limiter(*RULES, name="killed", store=store).check("a", 0, now=NOW)
        counts = {1_000_000 - result.remaining for result in answer.results}
        assert counts in ({acknowledged}, {acknowledged + 1})
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_fresh_rows_are_removed_during_writes(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "limits.db"
    with SQLiteStore(path, clock=clock) as store, closing(sqlite3.connect(path)) as connection:
        limiter = Limiter("3/minute", name="rows", store=store)
        for number in range(2_000):
            limiter.hit(f"key {number}")
            clock.advance(1)
        assert connection.execute("SELECT count(*) FROM headgate_states").fetchone()[0] < 500
