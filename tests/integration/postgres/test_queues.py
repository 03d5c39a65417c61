"""Queues of waiting calls in a real database: rights, poolers, lost connections, removal of old rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
from psycopg import ConnectionInfo

from headgate import Limiter
from headgate._concurrency import Event
from headgate.stores.postgres import PostgresStore, migrate
from headgate.stores.remote import listener
from tests.integration.postgres.test_migrations import role_on
from tests.integration.queues import (
    ONE_PLACE,
    PATIENCE,
    SOON,
    PostgresWorld,
    place_of,
    queue_of,
    set_pauses,
    take_and_release,
    until_asleep,
    until_queued,
)
from tests.integration.waiting import until

LISTENERS = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"


@pytest.fixture
def empty_world(empty_url: str) -> Iterator[PostgresWorld]:
    """A separate database."""
    migrate(empty_url)
    with closing(PostgresWorld(empty_url)) as world:
        yield world


def test_role_without_rights_on_tickets_releases_places_and_waits_without_order(
    empty_url: str, empty_world: PostgresWorld, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = empty_world.limiter(name)
    event = Event()
    waiting._queues.enter(place_of(waiting), waiting._queues.new_ticket(event), 1)
    grant = "GRANT SELECT, INSERT, UPDATE, DELETE ON headgate_states"
    with role_on(empty_url, grant) as url, PostgresStore(url) as store, caplog.at_level(logging.WARNING):
        limiter = Limiter(ONE_PLACE, name=name, store=store, on_store_error="raise")
        limiter.hold("ada").release()
        hold = limiter.hold("ada")
        assert hold.confirm()
        limiter.reset("ada")
        take_and_release(limiter)
    assert "in any order" in caplog.text
    assert "headgate_tickets" in caplog.text


def test_new_tickets_remove_those_of_dead_queues(empty_world: PostgresWorld, name: str) -> None:
    limiter = empty_world.limiter(name)
    events = [Event() for _ in range(30)]
    tickets = [limiter._queues.new_ticket(event) for event in events]
    for number in range(20):
        queue = queue_of(limiter, str(number))
        limiter._queues.enter(queue, tickets[number], 1)
        empty_world.expire(queue, tickets[number], 100)
    for ticket in tickets[20:]:
        limiter._queues.enter(queue_of(limiter), ticket, 1)
    with psycopg.connect(empty_world.url) as connection:
        rows = connection.execute("SELECT ticket FROM headgate_tickets").fetchall()
    assert sorted(ticket for (ticket,) in rows) == sorted(tickets[20:])


@pytest.mark.parametrize("prepare", [True, False])
def test_waiters_behind_a_pooler_poll(
    empty_world: PostgresWorld, name: str, monkeypatch: pytest.MonkeyPatch, prepare: bool
) -> None:
    """A pooler reports a different process number. A session that listens would be handed to other clients."""
    monkeypatch.setattr(ConnectionInfo, "backend_pid", 1)
    set_pauses(monkeypatch, SOON)
    with (
        psycopg.connect(empty_world.url, autocommit=True) as connection,
        PostgresStore(empty_world.url, prepare=prepare) as store,
        ThreadPoolExecutor(4) as pool,
    ):
        limiter = empty_world.limiter(name, store=store)
        held = empty_world.limiter(name).hold("ada")
        waiting = [pool.submit(take_and_release, limiter) for _ in range(4)]
        until_queued(empty_world, queue_of(limiter), 4)
        assert connection.execute(LISTENERS).fetchall() == []
        held.release()
        for each in waiting:
            each.result(PATIENCE)
        assert connection.execute(LISTENERS).fetchall() == []


def test_lost_connection_of_the_listener_is_replaced(
    empty_world: PostgresWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "RETRY_AFTER", SOON)
    limiter, other = empty_world.limiter(name), empty_world.limiter(name)
    held = other.hold("ada")
    with psycopg.connect(empty_world.url, autocommit=True) as connection, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take_and_release, limiter)
        until_asleep(empty_world, limiter)
        ((first,),) = connection.execute(LISTENERS).fetchall()
        connection.execute("SELECT pg_terminate_backend(%s)", (first,))
        until(lambda: connection.execute(LISTENERS).fetchall() not in ([], [(first,)]))
        held.release()
        waiting.result(PATIENCE)


def test_another_isolation_level_is_refused(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.InvalidTransactionState):
            connection.execute("SELECT headgate_queue_v1('a', 'b', 1, 1)")
