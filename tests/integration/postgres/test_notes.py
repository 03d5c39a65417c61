"""Notes in a real database: races, removal of expired rows, and databases of an earlier version."""

from __future__ import annotations

import asyncio
import threading

import psycopg
import pytest

from headgate import AsyncLimiter
from headgate.keys import note_key
from headgate.stores.postgres import PostgresStore, migrate

PATIENT = 60.0

NOTE = "SELECT headgate_note_v1(%b, %b, %s, false, NULL)"


def row_of(connection: psycopg.Connection, name: str) -> tuple[bytes, int] | None:
    query = (
        "SELECT note, expires - (extract(epoch FROM clock_timestamp()) * 1000000)::bigint "
        "FROM headgate_notes WHERE key = %b"
    )
    found: tuple[bytes, int] | None = connection.execute(query, (note_key("headgate", name),)).fetchone()
    return found


async def test_note_is_kept_for_the_requested_time(
    url: str, name: str, connection: psycopg.Connection
) -> None:
    async with PostgresStore(url, deadline=PATIENT) as store:
        await store.note(name, "text", 90)
        await store.note(name, "another", 9_000)
        note, left = row_of(connection, name) or (b"", 0)
        assert note == b"text"
        assert 0 < left <= 90_000_000
        connection.execute(
            "UPDATE headgate_notes SET expires = 0 WHERE key = %b", (note_key("headgate", name),)
        )
        assert await store.get_note(name) is None
        assert await store.note(name, "another", 3_000_000_000) == "another"
        assert await store.get_note(name) == "another"


async def test_noting_the_same_text_again_extends_its_lifetime(
    url: str, name: str, connection: psycopg.Connection
) -> None:
    async with PostgresStore(url, deadline=PATIENT) as store:
        for seconds in (90, 9_000, 90):
            assert await store.note(name, "text", seconds) == "text"
    _, left = row_of(connection, name) or (b"", 0)
    assert 90_000_000 < left <= 9_000_000_000


async def test_expired_rows_are_removed_by_later_notes(empty_url: str) -> None:
    migrate(empty_url)
    with psycopg.connect(empty_url, autocommit=True) as connection:
        async with PostgresStore(empty_url, deadline=PATIENT) as store:
            for number in range(20):
                await store.note(f"old {number}", "text", 60)
            connection.execute("UPDATE headgate_notes SET expires = 0")
            for number in range(10):
                await store.note(f"new {number}", "text", 60)
            rows = connection.execute("SELECT key FROM headgate_notes").fetchall()
            assert sorted(rows) == [(note_key("headgate", f"new {number}"),) for number in range(10)]


async def test_removal_skips_locked_rows(empty_url: str) -> None:
    """A locked row is left to a later call."""
    migrate(empty_url)
    async with PostgresStore(empty_url, deadline=PATIENT) as store:
        await store.note("old", "text", 60)
        with psycopg.connect(empty_url) as connection:
            connection.execute("UPDATE headgate_notes SET expires = 0")
            connection.commit()
            connection.execute("SELECT FROM headgate_notes FOR UPDATE")
            assert await store.note("new", "text", 60) == "text"


def test_waiting_writer_gets_the_note_of_the_first_writer(url: str, name: str) -> None:
    """At READ COMMITTED, the waiting statement does not see the new row by itself."""
    key = note_key("headgate", name)
    told: list[bytes] = []

    def second() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            waiting.set()
            told.append(connection.execute(NOTE, (key, b"second", 60_000_000)).fetchone()[0])  # type: ignore[index]

    waiting = threading.Event()
    thread = threading.Thread(target=second)
    with psycopg.connect(url) as first, psycopg.connect(url, autocommit=True) as observer:
        assert first.execute(NOTE, (key, b"first", 60_000_000)).fetchone() == (b"first",)
        thread.start()
        assert waiting.wait(PATIENT)
        while not observer.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall():
            assert thread.is_alive()
        first.commit()
        thread.join(PATIENT)
    assert told == [b"first"]


def test_second_writer_decides_after_a_rollback(url: str, name: str) -> None:
    key = note_key("headgate", name)
    with psycopg.connect(url) as first, psycopg.connect(url, autocommit=True) as second:
        first.execute(NOTE, (key, b"first", 60_000_000))
        first.rollback()
        assert second.execute(NOTE, (key, b"second", 60_000_000)).fetchone() == (b"second",)


def test_another_isolation_level_is_refused(url: str, name: str) -> None:
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.InvalidTransactionState):
            connection.execute(NOTE, (note_key("headgate", name), b"text", 60_000_000))


@pytest.mark.parametrize("prepare", [True, False])
async def test_notes_and_decisions_take_turns_on_one_connection(url: str, name: str, prepare: bool) -> None:
    async with PostgresStore(url, deadline=PATIENT, prepare=prepare) as store:
        limiter = AsyncLimiter("50/minute", name=name, store=store)
        work = [
            limiter.hit("a") if number % 2 else store.note(f"{name}{number}", "text", 60)
            for number in range(200)
        ]
        answers = await asyncio.gather(*work)
        assert answers[::2] == ["text"] * 100
        assert sum(bool(answer) for answer in answers[1::2]) == 50
        assert len(store._tasks._by_loop) == 1
