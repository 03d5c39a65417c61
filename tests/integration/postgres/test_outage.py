"""Troubles that only a database has: locks, terminated sessions, too many connections, read-only transactions."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus

from headgate import (
    AsyncLimiter,
    Decision,
    Limiter,
    StoreMisconfigured,
    StoreUnavailable,
    fixed_window,
)
from headgate.errors import StoreError
from headgate.stores.postgres import PostgresStore, migrate
from headgate.stores.postgres.peer import AsyncPostgresWire, PostgresWire
from headgate.stores.remote.batching import MOST_PER_BATCH
from headgate.stores.remote.peer import Receiver
from headgate.stores.request import Request
from headgate.testing.postgres_server import PostgresServer
from tests.integration.deadlines import PATIENCE, Deadlines
from tests.integration.postgres.conftest import execute
from tests.integration.waiting import until, until_async

pytestmark = pytest.mark.usefixtures("deadlines")

DEADLINE = 0.5
"""Seconds until a call to a hanging server times out."""


@pytest.fixture
def store(server: PostgresServer) -> Iterator[PostgresStore]:
    with PostgresStore(server.url, namespace=secrets.token_hex(8), deadline=DEADLINE) as store:
        yield store


def test_call_times_out_if_it_cannot_get_a_lock(
    server: PostgresServer, store: PostgresStore, deadlines: Deadlines
) -> None:
    gate = store.bind("lock", (fixed_window("10/day"),))
    gate.decide(Request("hit", "a"))
    with psycopg.connect(server.url) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(headgate_lock_number_v1(key)) FROM headgate_states")
        deadlines.count = True
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            gate.decide(Request("hit", "a"))
        deadlines.count = False
        assert gate.decide(Request("peek", "a", 0))[0].remaining == 9  # a check does not wait for locks


async def test_lost_connection_does_not_touch_a_reused_file_descriptor(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As soon as libpq has closed the file, the next connection of the same event loop gets its number."""
    wires: list[PostgresWire] = []
    begin = AsyncPostgresWire.__init__

    def seen(self: AsyncPostgresWire, wire: PostgresWire, receiver: Receiver) -> None:
        wires.append(wire)
        begin(self, wire, receiver)

    monkeypatch.setattr(AsyncPostgresWire, "__init__", seen)
    async with PostgresStore(server.url, namespace=secrets.token_hex(8), deadline=PATIENCE) as store:
        limiter = AsyncLimiter("50/day", name="async", store=store)
        assert not (await limiter.hit("a")).degraded
        (wire,) = wires
        with psycopg.connect(server.url) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (wire.pgconn.backend_pid,))
            await until_async(lambda: wire.pgconn.status != ConnStatus.OK)
        writers: list[asyncio.StreamWriter] = []
        while wire.fileno not in {writer.get_extra_info("socket").fileno() for writer in writers}:
            writers += [(await asyncio.open_connection(sock=end))[1] for end in socket.socketpair()]
        assert not (await limiter.hit("a")).degraded
        for writer in writers:
            writer.close()
            await writer.wait_closed()
    assert caplog.messages == []


def test_notification_on_an_idle_connection_does_not_close_it(
    server: PostgresServer, store: PostgresStore
) -> None:
    limiter = Limiter("10/day", name="news", store=store)
    limiter.hit("a")
    wire = store._threads._dispatcher._wire
    execute(wire, b"LISTEN news")
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("NOTIFY news")
    until(lambda: wire.wait(0))
    assert limiter.hit("a").remaining == 8
    assert store._threads._dispatcher._wire is wire


@pytest.mark.parametrize("flavour", ["threads", "tasks"])
async def test_call_terminated_by_the_database_is_retried(server: PostgresServer, flavour: str) -> None:
    async with PostgresStore(server.url, namespace=secrets.token_hex(8), deadline=PATIENCE) as store:
        hit = hitting(store, flavour, name="ended")
        assert (await hit("a")).remaining == 9
        with psycopg.connect(server.url, autocommit=True) as other, psycopg.connect(server.url) as holder:
            holder.execute("SELECT pg_advisory_xact_lock(headgate_lock_number_v1(key)) FROM headgate_states")
            call = asyncio.ensure_future(hit("a"))
            waiting = "FROM pg_stat_activity WHERE application_name = 'headgate' AND wait_event_type = 'Lock'"
            await until_async(lambda: other.execute(f"SELECT pid {waiting}").fetchone() is not None)
            other.execute(f"SELECT pg_terminate_backend(pid) {waiting}")
            holder.rollback()
            assert (await call).remaining == 8


async def test_cancelled_batch_does_not_fail_the_next_batch(server: PostgresServer) -> None:
    """Each batch is a separate transaction."""
    async with PostgresStore(server.url, namespace=secrets.token_hex(8), deadline=PATIENCE) as store:
        gate = store.bind_async("refused", (fixed_window("1000/day"),))
        await gate.decide(Request("hit", "a"))
        with psycopg.connect(server.url, autocommit=True) as other, psycopg.connect(server.url) as holder:
            holder.execute("SELECT pg_advisory_xact_lock(headgate_lock_number_v1(key)) FROM headgate_states")
            first = asyncio.gather(
                *(gate.decide(Request("hit", "a")) for _ in range(MOST_PER_BATCH)), return_exceptions=True
            )
            waiting = "FROM pg_stat_activity WHERE application_name = 'headgate' AND wait_event_type = 'Lock'"
            await until_async(lambda: other.execute(f"SELECT pid {waiting}").fetchone() is not None)
            others = asyncio.gather(*(gate.decide(Request("hit", "b")) for _ in range(MOST_PER_BATCH)))
            for _ in range(5):
                await asyncio.sleep(0)
            other.execute(f"SELECT pg_cancel_backend(pid) {waiting}")
            assert all(isinstance(error, StoreUnavailable) for error in await first)
            await others
            holder.rollback()
        left = [(await gate.decide(Request("peek", key, 0)))[0].remaining for key in "ab"]
        assert left == [1000 - 1, 1000 - MOST_PER_BATCH]


def hitting(store: PostgresStore, flavour: str, name: str) -> Callable[[str], Awaitable[Decision]]:
    """Return a function that hits `10/day`, from a thread or a task, without a failure policy."""
    rules = (fixed_window("10/day"),)
    threads, tasks = store.bind(name, rules), store.bind_async(name, rules)

    async def hit(key: str) -> Decision:
        request = Request("hit", key)
        answer = tasks.decide(request) if flavour == "tasks" else asyncio.to_thread(threads.decide, request)
        return (await answer)[0]

    return hit


# --- No free connection, read-only --------------------------------------------------------------------------


def test_a_database_without_a_free_connection_is_unavailable_until_there_is_one() -> None:
    settings = {"max_connections": "8", "max_wal_senders": "0"}
    with PostgresServer(settings=settings) as server, ExitStack() as others:
        migrate(server.url)
        for _ in range(int(settings["max_connections"])):
            others.enter_context(psycopg.connect(server.url))
        with PostgresStore(server.url, deadline=DEADLINE) as store:
            strict = Limiter("10/day", name="full", store=store, on_store_error="raise")
            with pytest.raises(StoreUnavailable, match="too many clients"):
                strict.hit("a")
            limiter = Limiter("10/day", name="full", store=store)
            assert limiter.hit("a").degraded
            others.close()
            until(lambda: not limiter.hit("probe").degraded)


@pytest.mark.parametrize("flavour", ["threads", "tasks"])
async def test_read_only_database_still_answers_refusals(server: PostgresServer, flavour: str) -> None:
    name = f"read-only in {flavour}"
    read_only = make_conninfo(server.url, options="-c default_transaction_read_only=on")
    async with (
        PostgresStore(server.url, deadline=PATIENCE) as writing,
        PostgresStore(read_only, deadline=PATIENCE) as reading,
    ):
        writing.bind(name, (fixed_window("10/day"),)).decide(Request("hit", "full", 10))
        hit = hitting(reading, flavour, name)
        with pytest.raises(StoreMisconfigured, match="read-only"):
            await hit("a")
        assert not await hit("full")


def test_store_recovers_when_the_database_is_writable_again(
    server: PostgresServer, store: PostgresStore
) -> None:
    limiter = Limiter("10/day", name="failover", store=store)
    limiter.hit("a")
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
        store._threads._dispatcher._wire.close()  # the setting is for new connections
        assert limiter.hit("a").degraded
        connection.execute("SET default_transaction_read_only = off")
        connection.execute("ALTER DATABASE postgres SET default_transaction_read_only = off")
    until(lambda: not limiter.hit("probe").degraded)
    assert limiter.hit("a").remaining == 8


# --- Secrets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://someone:hunter2@127.0.0.1:1/limits",
        "postgresql://someone@127.0.0.1:1/limits?password=hunter2",
        "host=127.0.0.1 port=1 user=someone password=hunter2 dbname=limits",
    ],
)
def test_credentials_never_appear_in_messages_or_logs(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with PostgresStore(url, deadline=DEADLINE) as store:
        assert Limiter("5/day", name="x", store=store).hit("a").degraded
        with pytest.raises(StoreError) as caught:
            Limiter("5/day", name="x", store=store, on_store_error="raise").reset("a")
        texts = [caplog.text, repr(store), store.endpoint.name]
        error: BaseException | None = caught.value
        while error is not None:
            texts.append(str(error))
            error = error.__cause__
    assert "hunter2" not in "".join(texts)
    assert "PostgreSQL at 127.0.0.1:1/limits" in caplog.text
