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
    Decision,
    Limiter,
    RateLimited,
    StoreMisconfigured,
    StoreUnavailable,
    concurrent,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.outage.policies import local
from headgate.stores.redis import RedisStore
from headgate.stores.remote.batching import MOST_PER_BATCH
from headgate.stores.request import Request
from headgate.testing.servers import RedisServer, find_free_port
from tests.integration.redis.proxy import Proxy

pytestmark = pytest.mark.usefixtures("deadlines")

DEADLINE = 0.25
"""Seconds until a call to a hanging server times out."""


def until(condition: Callable[[], object]) -> None:
    """Return when a condition is true; fail if that takes much too long."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"


async def until_async(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not await condition():
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


@each_way_to_break
async def test_an_outage_costs_each_task_one_failed_call_at_most(
    server: RedisServer, break_it: Callable[[RedisServer], Callable[[], object]]
) -> None:
    """All of them wait for the same round trip, and so for the same timeout."""
    async with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        AsyncLimiter("5/hour", name="x", store=store) as limiter,
    ):
        await limiter.hit("warm")
        stop = asyncio.Event()
        failed = [0] * 64

        async def caller(number: int) -> None:
            while not stop.is_set():
                before = limiter.health.degraded
                available = limiter.health.available
                decision = await limiter.hit(f"user {number}")
                assert isinstance(decision, Decision)
                failed[number] += available and decision.degraded
                await asyncio.sleep(0)
                assert limiter.health.degraded >= before

        callers = [asyncio.ensure_future(caller(number)) for number in range(64)]
        mend = await asyncio.to_thread(break_it, server)
        await until_async(_degraded(limiter, 10_000))
        assert limiter.health.outages == 1
        await asyncio.to_thread(mend)
        await until_async(_available(limiter))
        stop.set()
        await asyncio.gather(*callers)
        assert max(failed) == 1
        assert limiter.health.outages == 1
        assert limiter.health.failures == sum(failed)


def _degraded(limiter: AsyncLimiter, answers: int) -> Callable[[], Any]:
    async def reached() -> bool:
        await asyncio.sleep(0)
        return limiter.health.degraded >= answers

    return reached


def _available(limiter: AsyncLimiter) -> Callable[[], Any]:
    async def available() -> bool:
        await asyncio.sleep(0)
        return limiter.health.available

    return available


def test_limiters_on_one_store_share_one_failed_call(server: RedisServer) -> None:
    with RedisStore(server.url, deadline=DEADLINE) as store:
        limiters = [Limiter("5/hour", name=f"limiter {i}", store=store) for i in range(5)]
        assert all(limiter.hit("alice") for limiter in limiters)
        server.pause()
        assert all(limiter.hit("alice").degraded for limiter in limiters)
        assert limiters[0].health.failures == 1
        server.resume()


def test_a_server_that_was_never_there_costs_one_failed_call() -> None:
    with Limiter("5/hour", name="x", store=f"redis://127.0.0.1:{find_free_port()}") as limiter:
        assert all(limiter.hit("alice").degraded for _ in range(100))
        assert limiter.health.failures == 1


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


def test_server_that_cannot_write_stays_unavailable(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It can be read, but a probe also counts something."""
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter("5/hour", name="x", store=store) as limiter,
    ):
        limiter.hit("alice")
        server.command("CONFIG", "SET", "maxmemory", "1")
        assert limiter.hit("alice").degraded
        server.command("CONFIG", "RESETSTAT")
        until(lambda: server.command("INFO", "commandstats").count(b"cmdstat_evalsha:calls=6"))
        assert not limiter.health.available
        assert limiter.hit("alice").degraded
        assert (limiter.health.outages, limiter.health.failures) == (1, 1)
        assert len(caplog.records) == 1
        server.command("CONFIG", "SET", "maxmemory", "0")
        until(lambda: limiter.health.available)
        assert not limiter.hit("alice").degraded
        assert len(caplog.records) == 2


# --- Policies --------------------------------------------------------------------------------------------------------


def down() -> str:
    return f"redis://127.0.0.1:{find_free_port()}"


def test_failure_policy_open_admits() -> None:
    with Limiter("2/hour", name="x", store=down(), on_store_error="open") as limiter:
        decisions = [limiter.hit("alice") for _ in range(5)]
        assert all(decision.allowed and decision.degraded for decision in decisions)
        assert limiter.check("alice").degraded
        with limiter.hold("alice") as hold:
            hold.settle(2)
        limiter.record("alice")


def test_failure_policy_closed_refuses() -> None:
    with Limiter("2/hour", name="x", store=down(), on_store_error="closed") as limiter:
        decision = limiter.hit("alice")
        assert not decision
        assert decision.degraded
        assert decision.retry_after == 1
        with pytest.raises(RateLimited), limiter.hold("alice"):
            raise AssertionError("was entered")


def test_failure_policy_raise_raises_without_waiting_after_the_first_failure(server: RedisServer) -> None:
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter("2/hour", name="x", store=store, on_store_error="raise") as limiter,
    ):
        limiter.hit("alice")
        server.pause()
        for _ in range(100):
            with pytest.raises(StoreUnavailable):
                limiter.hit("alice")
        assert limiter.health.failures == 1
        server.resume()


@pytest.mark.parametrize("policy", ["open", "closed", local()])
def test_reset_raises_with_every_failure_policy(policy: Any) -> None:
    with Limiter("2/hour", name="x", store=down(), on_store_error=policy) as limiter:
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                limiter.reset("alice")


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


def test_local_holds_are_released_locally(server: RedisServer) -> None:
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter("10/hour", name="x", store=store, on_store_error=local(0.5)) as limiter,
    ):
        on_server = limiter.hold("alice", 3)
        server.pause()
        limiter.hit("somebody")  # notices the outage
        in_memory = limiter.hold("alice", 5)
        assert in_memory.decision.degraded
        assert not limiter.hit("alice")
        in_memory.release()
        assert limiter.check("alice").remaining == 4
        server.resume()
        until(lambda: is_available_again(limiter))
        assert limiter.check("alice", 0).remaining == 7
        on_server.release()
        assert limiter.check("alice", 0).remaining == 10


def test_hold_taken_during_an_outage_is_not_released_on_the_server(server: RedisServer) -> None:
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter("10/hour", name="x", store=store, on_store_error=local(1.0)) as limiter,
    ):
        limiter.hit("alice", 6)
        server.pause()
        limiter.hit("somebody")
        in_memory = limiter.hold("alice", 5)
        server.resume()
        until(lambda: is_available_again(limiter))
        in_memory.release()
        assert limiter.check("alice", 0).remaining == 4


def test_units_stay_counted_if_a_release_fails(server: RedisServer) -> None:
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter("10/hour", name="x", store=store) as limiter,
    ):
        hold = limiter.hold("alice", 3)
        server.kill()
        assert hold.release() == 0
        assert limiter.health.failures == 1
        assert hold.release() == 0
        assert limiter.health.failures == 1


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


async def test_a_batch_whose_reply_is_lost_is_charged_once(server: RedisServer, proxy: Proxy) -> None:
    async with AsyncLimiter("5/hour", name="x", store=proxy.url) as limiter:
        await limiter.hit("warm")
        proxy.lose_replies()
        decisions = await asyncio.gather(*(limiter.hit(f"user {i}") for i in range(MOST_PER_BATCH)))
        assert all(decision.degraded for decision in decisions)
        left = [await asyncio.to_thread(remaining, server, f"user {i}") for i in range(MOST_PER_BATCH)]
        assert left == [4] * MOST_PER_BATCH


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


def test_each_availability_change_is_logged_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "headgate")
    with (
        RedisStore(server.url, deadline=DEADLINE) as store,
        Limiter("5/hour", name="x", store=store) as limiter,
    ):
        for _ in range(2):
            limiter.hit("alice")
            server.kill()
            for _ in range(500):
                limiter.hit("alice")
            server.start()
            until(lambda: is_available_again(limiter))
    messages = [record.getMessage() for record in caplog.records]
    assert [("is unavailable" in message, "is back after" in message) for message in messages] == [
        (True, False),
        (False, True),
    ] * 2


def test_conflicts_are_logged_once_and_are_not_an_outage(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        redis.Redis.from_url(server.url) as client,
        Limiter("5/hour", name="x", store=server.url, on_store_error="closed") as limiter,
    ):
        limiter.hit("alice")
        [key] = client.keys("*alice*")  # type: ignore[union-attr,misc]
        client.delete(key)
        client.lpush(key, "something else")
        for _ in range(10):
            assert limiter.hit("alice").degraded
            assert not limiter.hit("bob").degraded or limiter.hit("bob").remaining == 0
        assert limiter.health.available
        assert len(caplog.records) == 1


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
