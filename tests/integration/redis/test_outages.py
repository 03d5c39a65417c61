"""A store that dies, hangs, refuses or loses replies, under load. Timeouts are counted, never measured."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headgate import (
    AsyncLimiter,
    Limiter,
    StoreMisconfigured,
    StoreUnavailable,
    concurrent,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.outage.policies import local
from headgate.stores.redis import RedisStore
from headgate.stores.request import Request
from headgate.testing.servers import RedisServer
from tests.integration.redis.proxy import Proxy

pytestmark = pytest.mark.usefixtures("deadlines")

DEADLINE = 0.25
"""Seconds until a call to a hanging server times out."""


def until(condition: Callable[[], object]) -> None:
    """Return when a condition is true; fail if that takes much too long."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"


def is_available_again(limiter: Limiter) -> bool:
    try:
        return not limiter.hit("probe").degraded
    except StoreUnavailable:
        return False


def break_by_killing(server: RedisServer) -> Callable[[], object]:
    server.kill()
    return server.start


def break_by_pausing(server: RedisServer) -> Callable[[], object]:
    server.pause()
    return server.resume


each_way_to_break = pytest.mark.parametrize("break_it", [break_by_killing, break_by_pausing])


# --- One timeout per outage -------------------------------------------------------------------------------------------


@each_way_to_break
def test_an_outage_costs_one_failed_call(
    server: RedisServer, break_it: Callable[[RedisServer], Callable[[], object]]
) -> None:
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter("5/hour", name="x", store=store) as limiter,
    ):
        for outage in (1, 2):
            until(lambda: is_available_again(limiter))
            mend = break_it(server)
            for _ in range(1000):
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
            assert limiter.health.failures == outage
            assert limiter.health.outages == outage


def test_threads_under_load_survive_kills_and_restarts(server: RedisServer) -> None:
    # A killed server is noticed at once, so a long deadline avoids timeouts of threads that wait for each other.
    with Limiter("100000/hour", name="x", store=server.url, deadline=30) as limiter:
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


def test_restart_between_calls_fails_no_call(server: RedisServer) -> None:
    """The connection is found closed before anything is sent on it, and the script is loaded again."""
    with Limiter("5/hour", name="x", store=server.url, on_store_error="raise") as limiter:
        limiter.hit("alice")
        server.kill()
        server.start()
        assert limiter.hit("alice").remaining == 4
        assert limiter.health.failures == 0


async def test_restart_between_calls_fails_no_call_of_tasks(server: RedisServer) -> None:
    async with AsyncLimiter("5/hour", name="x", store=server.url, on_store_error="raise") as limiter:
        await limiter.hit("alice")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert (await limiter.hit("alice")).remaining == 4
        assert limiter.health.failures == 0


# --- Policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [sliding_window("10/hour"), sliding_log("10/hour"), token_bucket("10/hour")], ids=str
)
def test_failure_policy_local_limits_requests_during_an_outage(server: RedisServer, rule: Any) -> None:
    """No period admits more than the limit plus, once per process, the local share."""
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter(rule, name="x", store=store, on_store_error=local(0.5)) as limiter,
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


def test_counts_survive_a_kill_with_persistence() -> None:
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with (
        RedisServer("redis", options) as server,
        Limiter("10/hour", name="x", store=server.url, on_store_error="closed") as limiter,
    ):
        assert sum(limiter.hit("alice").allowed for _ in range(7)) == 7
        server.kill()
        assert not limiter.hit("alice")
        server.start()
        until(lambda: is_available_again(limiter))
        assert sum(limiter.hit("alice").allowed for _ in range(20)) == 3


# --- A call is sent at most once -------------------------------------------------------------------------------------


def remaining(server: RedisServer, key: str) -> int | None:
    with Limiter("5/hour", name="x", store=server.url, on_store_error="raise") as limiter:
        return limiter.check(key, 0).remaining


@pytest.mark.parametrize("policy", ["open", "closed", "raise"])
def test_a_reply_lost_after_the_charge_is_charged_once(
    server: RedisServer, proxy: Proxy, policy: Any
) -> None:
    with Limiter("5/hour", name="x", store=proxy.url, on_store_error=policy) as limiter:
        limiter.hit("warm")
        proxy.lose_replies()
        if policy == "raise":
            with pytest.raises(StoreUnavailable):
                limiter.hit("alice")
        else:
            decision = limiter.hit("alice")
            assert decision.degraded
            assert decision.allowed is (policy == "open")
        proxy.await_loss()
        assert remaining(server, "alice") == 4
        proxy.forward_again()
        until(lambda: is_available_again(limiter))
        assert limiter.hit("alice").remaining == 3


def test_retries_of_a_given_client_are_disabled(server: RedisServer, proxy: Proxy) -> None:
    eager = redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 10))
    with RedisStore(eager) as store:
        limiter = Limiter("5/hour", name="x", store=store)
        limiter.hit("warm")
        proxy.lose_replies()
        assert limiter.hit("alice").degraded
        assert remaining(server, "alice") == 4
    eager.close()


def test_hold_keeps_its_place_if_the_reply_to_a_renewal_is_lost(proxy: Proxy) -> None:
    with RedisStore(proxy.url, deadline=30) as store:
        gate = store.bind("renewed", (concurrent(1, lease="1h"),))
        _, receipts = gate.decide(Request("hold", "alice"))
        assert receipts is not None
        proxy.lose_replies()
        with pytest.raises(StoreUnavailable):
            gate.decide(Request("renew", "alice", (1,), replaces=receipts))
        proxy.await_loss()
        proxy.forward_again()
        assert gate.decide(Request("renew", "alice", (1,), replaces=receipts))[0]
        gate.refund(receipts, 1, None)
        assert gate.decide(Request("peek", "alice", 0))[0].remaining == 1


# --- Log messages ----------------------------------------------------------------------------------------------------


SECRET, USER = "s3cr%25t-p%40ss", "some-user"
PLAIN = "s3cr%t-p@ss"


@pytest.mark.parametrize("login", [f":{SECRET}", f"default:{SECRET}", f"{USER}:{SECRET}"])
def test_credentials_never_appear_in_logs_or_exceptions(
    server: RedisServer, caplog: pytest.LogCaptureFixture, login: str
) -> None:
    caplog.set_level(logging.DEBUG)
    url = server.url.replace("//", f"//{login}@")
    server.command("CONFIG", "SET", "requirepass", "another-one")
    texts = []
    with Limiter("5/hour", name="x", store=url, on_store_error="raise") as limiter:
        texts += [repr(limiter), repr(limiter.store), repr(limiter.health)]
        with pytest.raises(StoreMisconfigured) as wrong_password:
            limiter.hit("alice")
        server.kill()
        with pytest.raises(StoreUnavailable) as not_there:
            limiter.hit("alice")
    for error in (wrong_password.value, not_there.value):
        seen: BaseException | None = error
        while seen is not None:
            texts.append(f"{seen!r} {seen}")
            seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    texts += [record.getMessage() for record in caplog.records]
    assert len(caplog.records) == 1
    for text in texts:
        assert PLAIN not in text
        assert SECRET not in text
        assert USER not in text


def test_correct_password_works(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", PLAIN)
    with Limiter(
        "5/hour", name="x", store=server.url.replace("//", f"//:{SECRET}@"), on_store_error="raise"
    ) as it:
        assert it.hit("alice").remaining == 4
