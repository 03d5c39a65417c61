"""Real servers that die, hang, restart or lose replies, under threads and tasks. Timeouts are counted, never measured."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headgate import AsyncLimiter, Limiter, StoreUnavailable, concurrent, fixed_window
from headgate.outage.policies import local
from headgate.stores.postgres import PostgresStore, migrate
from headgate.stores.redis import RedisStore
from headgate.stores.request import Request
from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import RedisServer, answers_ping
from tests.faults.proxy import FaultProxy
from tests.integration.deadlines import PATIENCE
from tests.integration.waiting import until, until_async
from tests.unit.flavours import Flavour, done

pytestmark = pytest.mark.usefixtures("deadlines")

AnyServer = RedisServer | PostgresServer
Break = Callable[[AnyServer], Callable[[], object]]

DEADLINE = 0.25
"""Seconds until a call to a hanging server times out."""


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, AnyServer]]:
    """Servers that write everything to disk before they answer."""
    persistent = ("--appendonly", "yes", "--appendfsync", "always")
    with RedisServer(options=persistent) as redis, PostgresServer() as postgres:
        migrate(postgres.url)
        yield {"redis": redis, "postgres": postgres}


@pytest.fixture(params=["redis", "postgres"])
def server(request: pytest.FixtureRequest, servers: dict[str, AnyServer]) -> Iterator[AnyServer]:
    """A server that the test may leave broken."""
    found = servers[request.param]
    yield found
    found.resume()
    if not (isinstance(found, RedisServer) and answers_ping(found.port)):
        found.start()


def store_on(server: AnyServer, deadline: float = PATIENCE, port: int | None = None) -> Any:
    """Return a store; its connections may go through a proxy."""
    url = server.url if port is None else server.url.replace(f":{server.port}/", f":{port}/")
    if isinstance(server, RedisServer):
        return RedisStore(url, deadline=deadline)
    return PostgresStore(url, deadline=deadline, durable=True)


def is_available_again(limiter: Limiter) -> bool:
    try:
        return not limiter.hit("probe").degraded
    except StoreUnavailable:
        return False


def break_by_killing(server: AnyServer) -> Callable[[], object]:
    server.kill()
    return server.start


def break_by_pausing(server: AnyServer) -> Callable[[], object]:
    server.pause()
    return server.resume


# --- One failed call per outage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("break_it", [break_by_killing, break_by_pausing])
def test_an_outage_costs_one_failed_call(server: AnyServer, name: str, break_it: Break) -> None:
    with store_on(server, DEADLINE) as store, Limiter("5/hour", name=name, store=store) as limiter:
        for outage in (1, 2):
            until(lambda: is_available_again(limiter))
            mend = break_it(server)
            for _ in range(300):
                decision = limiter.hit("alice")
                assert decision.allowed
                assert decision.degraded
            # Long enough for several probes: no caller waits for them.
            end = time.monotonic() + 3 * DEADLINE
            while time.monotonic() < end:
                assert limiter.hit("alice").degraded
            assert limiter.health.failures == outage
            mend()
            until(lambda: is_available_again(limiter))
            assert (limiter.health.outages, limiter.health.failures) == (outage, outage)


def test_threads_under_load_survive_kills_and_restarts(server: AnyServer, name: str) -> None:
    # A killed server is noticed at once, so a long deadline avoids timeouts of threads that wait for each other.
    with store_on(server) as store, Limiter("100000/hour", name=name, store=store) as limiter:
        stop = threading.Event()
        trouble: list[BaseException] = []

        def caller() -> None:
            try:
                while not stop.is_set():
                    limiter.hit("alice")
            except BaseException as error:  # noqa: BLE001  # seen by the test
                trouble.append(error)

        callers = [threading.Thread(target=caller) for _ in range(4)]
        for thread in callers:
            thread.start()
        try:
            for outage in range(1, 4):
                until(lambda: limiter.health.available)
                server.kill()
                until(lambda: not limiter.health.available)
                server.start()
                until(lambda: limiter.health.available)
                assert limiter.health.outages == outage
                # At most one pending call per thread when the server was killed.
                assert limiter.health.failures <= outage * len(callers)
        finally:
            stop.set()
            for thread in callers:
                thread.join()
        assert trouble == []


async def test_a_restart_between_calls_fails_no_call(server: AnyServer, name: str, flavour: Flavour) -> None:
    """The connection is found closed before anything is sent on it, and the script is loaded again."""
    async with store_on(server) as store:
        limiter = flavour("10/day", name=name, store=store, on_store_error="raise")
        for expected in (9, 8, 7):
            assert (await done(limiter.hit("a"))).remaining == expected
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        if isinstance(server, PostgresServer):
            assert (await done(limiter.hit("a"))).remaining == 6
            server.restart()  # an event loop notices it only after the next call has started
        assert await done(limiter.hit("a"))
        assert (limiter.health.failures, limiter.health.degraded) == (0, 0)


async def test_idle_limiter_notices_that_its_server_is_back(
    server: AnyServer, name: str, flavour: Flavour
) -> None:
    async with store_on(server) as store:
        limiter = flavour("1000/hour", name=name, store=store, on_store_error="closed")
        await done(limiter.hit("alice"))
        server.kill()
        assert (await done(limiter.hit("alice"))).degraded
        assert not limiter.health.available
        await asyncio.to_thread(server.start)
        await until_async(lambda: limiter.health.available)
        assert limiter.health.failures == 1
        assert not (await done(limiter.hit("alice"))).degraded


# --- Short deadlines ----------------------------------------------------------------------------------------------------


async def test_short_deadline_affects_only_its_own_call(
    server: AnyServer, name: str, flavour: Flavour
) -> None:
    async with store_on(server) as store:
        tight = flavour("1000/hour", name=name, store=store, deadline=0.003)
        closed = flavour("1000/hour", name=name, store=store, on_store_error="closed")
        await done(tight.ping())
        await done(closed.hit("alice"))
        server.pause()
        try:
            for _ in range(3):
                assert (await done(tight.hit("alice"))).degraded
        finally:
            server.resume()
        assert tight.health.available
        assert tight.health.outages == 0
        for _ in range(20):
            assert not (await done(closed.hit("alice"))).degraded


async def test_hanging_server_is_detected_despite_a_short_deadline(
    server: AnyServer, name: str, flavour: Flavour
) -> None:
    async with store_on(server, 0.2) as store:
        limiter = flavour("1000/hour", name=name, store=store, deadline=0.003)
        await done(limiter.ping())
        server.pause()
        try:
            # One call may not be enough: if this process is late to send it, it says nothing about the server.
            async with asyncio.timeout(PATIENCE):
                while limiter.health.available:
                    assert (await done(limiter.hit("alice"))).degraded
        finally:
            server.resume()
        await until_async(lambda: limiter.health.available)


# --- Counts -------------------------------------------------------------------------------------------------------------


def test_failure_policy_local_limits_requests_during_an_outage(server: AnyServer, name: str) -> None:
    """No period admits more than the limit plus, once per process, the local share."""
    with (
        store_on(server, DEADLINE) as store,
        Limiter("10/hour", name=name, store=store, on_store_error=local(0.5)) as limiter,
    ):
        admitted = sum(limiter.hit("alice").allowed for _ in range(4))
        server.pause()
        during = [limiter.hit("alice") for _ in range(100)]
        assert all(decision.degraded for decision in during)
        assert sum(decision.allowed for decision in during) == 5
        server.resume()
        until(lambda: is_available_again(limiter))
        after = sum(limiter.hit("alice").allowed for _ in range(100))
        # The first failed call may have been counted before the server hung.
        assert admitted + after in (9, 10)


async def test_a_call_whose_reply_is_lost_is_charged_once(
    server: AnyServer, name: str, flavour: Flavour
) -> None:
    rules = (fixed_window("10/day"),)
    with FaultProxy(server.port) as proxy:
        async with store_on(server, port=proxy.port) as store:
            is_async = flavour is AsyncLimiter
            gate = store.bind_async(name, rules) if is_async else store.bind(name, rules)
            decide = gate.decide if is_async else partial(asyncio.to_thread, gate.decide)
            await decide(Request("hit", "a"))
            proxy.mode = "lose replies"
            with pytest.raises(StoreUnavailable):
                await decide(Request("hit", "a"))
            assert proxy.lost.wait(PATIENCE)
            proxy.mode = "forward"
            assert (await decide(Request("hit", "a")))[0].remaining == 7


def test_hold_keeps_its_place_if_the_reply_to_a_renewal_is_lost(server: AnyServer, name: str) -> None:
    with FaultProxy(server.port) as proxy, store_on(server, port=proxy.port) as store:
        gate = store.bind(name, (concurrent(1, lease="1h"),))
        _, receipts = gate.decide(Request("hold", "alice"))
        proxy.mode = "lose replies"
        with pytest.raises(StoreUnavailable):
            gate.decide(Request("renew", "alice", (1,), replaces=receipts))
        assert proxy.lost.wait(PATIENCE)
        proxy.mode = "forward"
        assert gate.decide(Request("renew", "alice", (1,), replaces=receipts))[0]
        gate.refund(receipts, 1, None)
        assert gate.decide(Request("peek", "alice", 0))[0].remaining == 1
