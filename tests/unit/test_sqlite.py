"""The SQLite store: its file, shared use, removal of rows, and errors."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Limiter,
    MemoryStore,
    SQLiteStore,
    StoreConflict,
    StoreUnavailable,
    calendar,
    concurrent,
    fixed_window,
    open_async_store,
    open_store,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.clock import SteadyClock
from headgate.stores import check_url
from headgate.stores.base import REENTERED
from headgate.stores.kv import SQLiteKV, open_kv
from headgate.stores.sqlite_file import switch_to_wal
from headgate.testing import FakeClock
from headgate.testing.contract.races import in_threads
from tests.unit.flavours import done
from tests.unit.processes import (
    Interruptions,
    all_succeeded,
    fork,
    forking,
    in_child,
)

pytestmark = forking

Flavour = type[Limiter] | type[AsyncLimiter]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "limits.db"


def counted(path: Path) -> dict[bytes, tuple[int, ...]]:
    """Return the states in the file."""
    connection = sqlite3.connect(path)
    try:
        return {
            row: struct.unpack(f"<{len(state) // 8}q", state)
            for row, state in connection.execute("SELECT id, state FROM headgate_states")
        }
    finally:
        connection.close()


# --- File ------------------------------------------------------------------------------------------------------------


def test_a_url_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, file in (
        ("sqlite:///relative.db", "relative.db"),
        (f"sqlite:///{tmp_path}/absolute.db", "absolute.db"),
        ("SQLite:///with%20space.db", "with space.db"),
    ):
        with Limiter("2/minute", name="x", store=url) as limiter:
            limiter.hit("ada")
        assert len(counted(tmp_path / file)) == 1


def test_memory_database_is_deleted_with_its_store() -> None:
    with Limiter("1/minute", name="x", store="sqlite:///:memory:") as limiter:
        assert limiter.hit("ada")
        assert not limiter.hit("ada")
    with Limiter("1/minute", name="x", store="sqlite:///:memory:") as limiter:
        assert limiter.hit("ada")


@pytest.mark.parametrize("url", ["sqlite:limits.db", "sqlite://limits.db", "sqlite:///", "sqlite:", "sqlite"])
def test_error_for_a_url_without_a_file_suggests_valid_urls(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"write 'sqlite:///relative/path\.db', 'sqlite:////absolute/path\.db'"
    ):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    ["", "limits.db", "mysql://host/db", "file:limits.db", None, Path("limits.db"), b"redis://:secret@host"],
)
def test_error_for_an_unknown_scheme_suggests_valid_schemes(url: Any) -> None:
    for opener in (open_store, open_async_store, check_url, open_kv):
        with pytest.raises(ConfigError, match=r"'memory://'.*'sqlite:///limits\.db'"):
            opener(url)


def test_urls_open_the_embedded_stores() -> None:
    assert isinstance(open_store("memory://"), MemoryStore)
    assert isinstance(open_async_store("MEMORY://"), MemoryStore)
    with SQLiteStore.from_url("sqlite:///:memory:") as store:
        assert store.path == ":memory:"


def test_error_names_the_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        SQLiteStore(tmp_path / "missing" / "limits.db")
    assert f"there is no folder {tmp_path / 'missing'}" in str(caught.value)
    assert isinstance(caught.value.__cause__, sqlite3.Error)


def test_folder_instead_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="unable to open database file"):
        SQLiteStore(tmp_path)


@pytest.mark.parametrize("path", [None, 5, "", b"limits.db", "sqlite:///limits.db", SQLiteStore], ids=repr)
def test_invalid_path_is_refused(path: Any) -> None:
    for kind in (SQLiteStore, SQLiteKV):
        with pytest.raises(
            ConfigError, match=r"^path is that of a file, like 'limits.db', or ':memory:', not "
        ):
            kind(path)


def test_guarantees_of_the_store(path: Path) -> None:
    with SQLiteStore(path) as store:
        guarantees = store.guarantees
    assert guarantees.exact
    assert guarantees.durable
    assert guarantees.shared
    assert "nothing when a process dies" in guarantees.may_lose


# --- Shared use ------------------------------------------------------------------------------------------------------


def test_namespaces_and_limiter_names_separate_counts(path: Path, clock: FakeClock) -> None:
    with SQLiteStore(path, clock=clock) as store, SQLiteStore(path, clock=clock, namespace="b") as other:
        limiters = [
            Limiter("1/minute", name=n, store=s) for n, s in (("x", store), ("y", store), ("x", other))
        ]
        assert all(limiter.hit("ada") for limiter in limiters)
        assert not any(limiter.hit("ada") for limiter in limiters)


def test_processes_can_open_a_new_file_at_the_same_time(path: Path) -> None:
    """Switching a new file to WAL ignores the busy timeout: it does not wait for processes that do the same."""
    for attempt in range(3):
        file = path.with_name(f"{attempt}.db")
        start_r, start_w = os.pipe()

        def work(file: Path = file, start: int = start_r) -> bool:
            os.read(start, 1)
            with SQLiteStore(file) as store:
                return Limiter("100/minute", name="x", store=store).hit("ada").allowed

        children = [fork(work) for _ in range(6)]
        os.write(start_w, b"go" * 6)
        assert all_succeeded(*children)
        os.close(start_r)
        os.close(start_w)


# --- Removal of rows -------------------------------------------------------------------------------------------------


def test_record_with_a_zero_limit_leaves_no_row(path: Path, clock: FakeClock) -> None:
    """There is no bucket, so nothing could ever drain."""
    with SQLiteStore(path, clock=clock) as store:
        limiter = Limiter(token_bucket("0/minute"), name="x", store=store)
        limiter.record("ada", 5)
        assert not limiter.hit("ada")
        assert counted(path) == {}


def test_a_released_or_reset_state_leaves_no_row(path: Path, clock: FakeClock) -> None:
    with SQLiteStore(path, clock=clock) as store:
        limiter = Limiter("5/minute", "50/hour", name="x", store=store)
        limiter.hold("ada").release()
        assert counted(path) == {}
        limiter.hit("ada")
        assert len(counted(path)) == 2
        limiter.reset("ada")
        assert counted(path) == {}


def test_state_with_an_explicit_time_is_kept_one_more_hour_of_store_time(
    path: Path, clock: FakeClock
) -> None:
    with SQLiteStore(path, clock=clock) as store:
        limiter = Limiter("1/minute", name="x", store=store)

        def clean() -> None:
            for number in range(200):
                limiter.hit(f"{clock.now} {number}")

        assert limiter.hit("ada", now=60.0)
        clock.advance(3_600 + 59)
        clean()
        assert not limiter.hit("ada", now=60.0)
        clock.advance(5)
        clean()
        assert limiter.hit("ada", now=60.0)


# --- Concurrent use, and errors ---------------------------------------------------------------------------------------


@pytest.fixture
def writer(path: Path) -> Iterator[sqlite3.Connection]:
    """Another connection that keeps a write transaction open."""
    with SQLiteStore(path):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        yield other
        other.close()


@pytest.mark.usefixtures("writer")
async def test_locked_file_raises_store_unavailable_and_charges_nothing(
    flavour: Flavour, path: Path, clock: FakeClock
) -> None:
    with SQLiteStore(path, timeout=0, clock=clock) as store:
        limiter = flavour("5/minute", name="x", store=store)
        for call in (limiter.hit, limiter.hold, limiter.record, limiter.reset):
            with pytest.raises(StoreUnavailable, match="database is locked"):
                await done(call("ada"))
        assert (await done(limiter.check("ada"))).remaining == 4, "looking does not wait for others"
    assert counted(path) == {}


def test_locked_new_file_raises_store_unavailable(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE theirs (x)")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match="database is locked"):
        SQLiteStore(path, timeout=0)
    other.close()


def test_switch_to_wal_calls_pause_while_the_file_is_locked(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other, closing(sqlite3.connect(path)) as own:
        other.execute("BEGIN IMMEDIATE")
        switch_to_wal(own.execute, 60, pause=lambda seconds: other.execute("ROLLBACK"))
        assert own.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_call_waits_for_a_writer_until_the_timeout(path: Path, writer: sqlite3.Connection) -> None:
    with SQLiteStore(path, timeout=60) as store:
        limiter = Limiter("5/minute", name="x", store=store)
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(bool(limiter.hit("ada"))))
        thread.start()
        writer.execute("ROLLBACK")
        thread.join()
        assert results == [True]


def test_file_of_another_format_is_not_overwritten(path: Path) -> None:
    path.write_bytes(b"not a database, but somebody's work " * 100)
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match="file is not a database"):
        SQLiteStore(path)
    assert path.read_bytes() == before


def test_table_with_unexpected_columns_is_an_error(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE headgate_states (who TEXT, count INTEGER)")
    connection.close()
    with SQLiteStore(path) as store, pytest.raises(StoreUnavailable, match="no such column"):
        Limiter("5/minute", name="x", store=store).hit("ada")


RULES = {
    "fixed_window": fixed_window("5/minute"),
    "sliding_window": sliding_window("5/minute"),
    "sliding_log": sliding_log("5/minute"),
    "token_bucket": token_bucket("5/minute"),
    "concurrent": concurrent(5, lease="60s"),
    "calendar": calendar("5/day"),
}


@pytest.mark.parametrize("kind", RULES)
@given(numbers=st.lists(st.integers(0, 5) | st.integers(-(2**63), 2**63 - 1), max_size=9))
@example(numbers=[])
@example(numbers=[1])
@example(numbers=[1, 2])
@example(numbers=[1, 1, 1, 0, 0, 0, 0])
@example(numbers=[2**53 - 1] * 3)
def test_row_with_random_numbers_is_a_state_or_a_conflict(kind: str, numbers: list[int]) -> None:
    with SQLiteStore(":memory:") as store:
        limiter = Limiter(RULES[kind], name="x", store=store)
        operations = ["check", "hold", "record", "release", "confirm"]
        if kind == "concurrent":
            operations.remove("record")
        for operation in operations:
            hold = limiter.hold("ada")
            store.transact(
                lambda connection: connection.execute(
                    "UPDATE headgate_states SET state = ?", (struct.pack(f"<{len(numbers)}q", *numbers),)
                ),
                write=True,
            )
            call = getattr(hold, operation, None) or partial(getattr(limiter, operation), "ada")
            with suppress(StoreConflict, CostTooHigh):
                call()
            limiter.reset("ada")


@pytest.mark.parametrize("garbage", [b"garbage", "text", 5, b"", bytes(8), bytes(16), bytes(32)])
def test_row_with_an_invalid_state_is_a_conflict(path: Path, garbage: object) -> None:
    with SQLiteStore(path) as store:
        limiter = Limiter("5/minute", name="x", store=store)
        limiter.hit("ada")
        store.transact(
            lambda connection: connection.execute("UPDATE headgate_states SET state = ?", (garbage,)),
            write=True,
        )
        with pytest.raises(StoreConflict, match="does not hold a state"):
            limiter.hit("ada")
        assert limiter.hit("bob"), "other keys are not affected"
        limiter.reset("ada")
        assert limiter.hit("ada")


def test_exception_from_a_signal_handler_leaves_no_lock_or_transaction_open(
    path: Path, interruptions: Interruptions
) -> None:
    """Like Ctrl-C in a notebook, or the soft timeout of a worker: the limiter must still work afterwards.

    Every call counts in both rules or in none, so they agree in the end.
    """
    times, chance = count(1_700_000_000_000_000_000, 1000), random.Random(7)
    with (
        SQLiteStore(path, clock=SteadyClock(times.__next__)) as store,
        closing(sqlite3.connect(path, 0)) as other,
    ):
        rules = sliding_window("1000000/hour"), fixed_window("1000000/day")
        limiter = Limiter(*rules, name="x", store=store)
        calls: list[Callable[[], object]] = [
            lambda: limiter.hit("ada"),
            lambda: limiter.hold("ada", 2).release(),
            lambda: limiter.hit("ada", 999_600) and limiter.reset("ada"),
            lambda: limiter.check("ada"),
            lambda: limiter.record("ada"),
            lambda: limiter.reset("bob"),
        ]
        for number, _ in enumerate(interruptions(lambda: chance.choice(calls)())):
            other.execute("BEGIN IMMEDIATE")
            other.rollback()
            assert number % 50 or in_threads(1, lambda _: bool(limiter.check("ada", 0))) == [True]
        counts = [[result.remaining for result in limiter.hit("ada", cost).results] for cost in (0, 1)]
        assert counts[0][0] == counts[0][1]
        assert counts[1] == [units - 1 for units in counts[0]]


class InterruptingClock(FakeClock):
    """Runs a function when it is read, in the middle of a call."""

    interrupt: Callable[[], object] | None = None

    def now_us(self) -> int:
        interrupt, self.interrupt = self.interrupt, None  # once
        if interrupt is not None:
            interrupt()
        return super().now_us()


@pytest.mark.parametrize("outer", ["hit", "hold", "check", "record"])
def test_reentrant_call_is_refused_at_once(path: Path, outer: str) -> None:
    """Waiting for the interrupted call would never end, and counting between two of its steps would be wrong."""
    clock = InterruptingClock()
    with SQLiteStore(path, clock=clock) as store:
        limiter = Limiter("5/minute", name="x", store=store)
        hold, errors = limiter.hold("ada"), []

        def inside() -> None:
            for call in (limiter.hit, limiter.check, limiter.record, limiter.hold, limiter.reset):
                try:
                    call("ada")
                except StoreUnavailable as error:
                    errors.append(str(error))
            try:
                hold.release()
            except StoreUnavailable as error:
                errors.append(str(error))

        clock.interrupt = inside
        getattr(limiter, outer)("ada")
        assert len(errors) == 6
        assert all(REENTERED in error for error in errors)
        assert limiter.check("ada", 0).remaining == (4 if outer == "check" else 3), (
            "only the outer call counted"
        )
        assert limiter.hit("ada"), "and the limiter goes on"


# --- Closing, forks and event loops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_used", [True, False])
async def test_closed_store_raises_store_unavailable(flavour: Flavour, path: Path, is_used: bool) -> None:
    store = SQLiteStore(path)
    limiter = flavour("5/minute", name="x", store=store)
    if is_used:
        await done(limiter.hit("ada"))
    for _ in range(2):
        await store.aclose() if flavour is AsyncLimiter else store.close()
    for call in (limiter.hit, limiter.check, limiter.record, limiter.hold, limiter.reset):
        with pytest.raises(StoreUnavailable, match="the store was closed"):
            await done(call("ada"))


async def test_async_calls_run_in_one_thread_of_the_store(path: Path, clock: FakeClock) -> None:
    async with SQLiteStore(path, clock=clock) as store:
        limiter = AsyncLimiter("100/minute", name="x", store=store)
        await asyncio.gather(*(limiter.hit("ada") for _ in range(50)))
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("headgate-sqlite")]
        assert len(names) == 1


def test_child_process_never_uses_the_connection_of_its_parent(path: Path) -> None:
    """SQLite forbids it: the child would treat the locks of the parent as its locks, and drop them when it closes."""
    with SQLiteStore(path) as store:
        parents = store._connection
        limiter = Limiter("4/hour", name="x", store=store)

        def work() -> bool:
            limiter.hit("ada")
            return store._connection is not None and store._connection is not parents

        assert in_child(work)
        assert store._connection is parents


def test_fork_while_other_threads_write_leaves_no_lock_held(path: Path, hasty_threads: None) -> None:
    with SQLiteStore(path) as store:
        limiter, stop = Limiter("1000000/hour", name="x", store=store), threading.Event()

        def work() -> None:
            while not stop.wait(0.000_1):  # otherwise this thread takes the lock again before others get it
                for _ in range(5):
                    limiter.hit("ada")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert all(in_child(lambda: limiter.hit("ada").allowed) for _ in range(5))
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_close_in_the_child_process_does_not_affect_the_parent(path: Path) -> None:
    with SQLiteStore(path) as store:
        limiter = Limiter("4/hour", name="x", store=store)
        limiter.hit("ada")

        def work() -> bool:
            limiter.hit("ada")
            store.close()
            return True

        assert in_child(work)
        assert limiter.hit("ada").remaining == 1
