"""Notes in memory and in SQLite: their number, their removal and the error of a full store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headgate import (
    Limiter,
    MemoryStore,
    SQLiteStore,
    StoreConflict,
    StoreError,
    StoreUnavailable,
)
from headgate.keys import note_key, storage_key, storage_prefix
from headgate.rules import sliding_window
from headgate.stores.kv import KVStore, MemoryKV
from headgate.testing import FakeClock


def test_stores_report_that_they_keep_notes() -> None:
    assert MemoryStore().notes is not None
    assert KVStore(MemoryKV()).notes is None


@pytest.mark.parametrize("name", ["", "8:headgate", "t", "5:login18:rulealice", "\ud800", "x" * 200])
def test_names_of_states_and_notes_never_collide(name: str) -> None:
    """After the namespace, the name of a state continues with a length, and the name of a note with a letter."""
    found = note_key("headgate", name)
    assert found.startswith(b"8:headgatenote:")
    prefix = storage_prefix("headgate", "ote:", sliding_window("5/minute", name="n"))
    assert storage_key(prefix, name)[len("8:headgate") :][:1].isdigit()


# --- Memory -----------------------------------------------------------------------------------------------------------


async def test_expired_notes_are_removed_by_the_same_number_of_new_notes() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    for number in range(1_000):
        await store.note(f"burst {number}", "text", 60)
    clock.advance(60)
    for number in range(1_000):
        await store.note(f"later {number}", "text", 60)
    assert len(store._notes) == 1_000


async def test_full_store_refuses_new_notes_and_keeps_live_notes() -> None:
    clock = FakeClock()
    store = MemoryStore(max_notes=3, clock=clock)
    for number in range(3):
        await store.note(f"note {number}", "first", 60)
    with pytest.raises(StoreError, match="max_notes="):
        await store.note("one more", "text", 60)
    assert [await store.note(f"note {number}", "second", 60) for number in range(3)] == ["first"] * 3
    assert await store.get_note("one more") is None
    clock.advance(60)
    assert await store.note("one more", "text", 60) == "text"


async def test_replaced_note_is_kept_after_its_first_expiry() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    for number in range(5):  # more than one call removes
        await store.note(f"early {number}", "text", 1)
    await store.note("a", "first", 2)
    clock.advance(2)
    assert await store.note("a", "second", 60) == "second"
    for number in range(10):
        await store.note(f"other {number}", "text", 60)
    assert await store.get_note("a") == "second"


async def test_notes_do_not_count_as_keys() -> None:
    store = MemoryStore(max_keys=1)
    for number in range(10):
        await store.note(f"note {number}", "text", 60)
    assert len(store) == 0
    assert Limiter("1/minute", name="a", store=store).hit("alice")
    assert store.overflowed == 0


async def test_closed_memory_store_has_no_notes() -> None:
    store = MemoryStore()
    await store.note("a", "text", 60)
    store.close()
    assert await store.get_note("a") is None
    assert await store.note("a", "another", 60) == "another"


# --- SQLite -----------------------------------------------------------------------------------------------------------


async def test_rows_of_expired_notes_are_removed_during_use(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "limits.db"
    async with SQLiteStore(path, clock=clock) as store:
        for number in range(300):
            await store.note(f"note {number}", "text", 60)
            clock.advance(1)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM headgate_notes").fetchone()[0] <= 61


async def test_file_of_an_earlier_version_gets_a_notes_table(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    with SQLiteStore(path) as store:
        Limiter("5/minute", name="old", store=store).hit("alice")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE headgate_notes")
    async with SQLiteStore(path) as store:
        assert await store.note("a", "text", 60) == "text"
        assert Limiter("5/minute", name="old", store=store).check("alice", 0).remaining == 4


async def test_namespaces_separate_notes(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    async with SQLiteStore(path, namespace="one") as one, SQLiteStore(path, namespace="two") as two:
        assert await one.note("a", "first", 60) == "first"
        assert await two.note("a", "second", 60) == "second"


async def test_row_with_an_invalid_note_is_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    async with SQLiteStore(path) as store:
        await store.note("a", "text", 60)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("UPDATE headgate_notes SET note = x'ff'")
        with pytest.raises(StoreConflict):
            await store.get_note("a")
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("UPDATE headgate_notes SET note = 7")
        with pytest.raises(StoreConflict):
            await store.note("a", "text", 60)


async def test_closed_or_locked_file_raises_store_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    store = SQLiteStore(path, timeout=0)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable):
            await store.note("a", "text", 60)
        assert await store.get_note("a") is None
    await store.aclose()
    with pytest.raises(StoreUnavailable):
        await store.get_note("a")
