"""Calendar windows follow the server's clock, even if the local clock is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from headgate import AsyncLimiter, Limiter, StoreUnavailable, calendar, concurrent, fixed_window
from headgate.clock import WallClock
from headgate.stores import port_parameters
from headgate.stores.redis import RedisStore, codec
from headgate.stores.redis.codec import Operation, ScriptCall
from headgate.testing import FakeClock
from headgate.testing.servers import RedisServer
from tests.integration.redis.cluster import running_cluster

RULES = (calendar("50/year"), fixed_window("100/hour"))
YEAR_US = 366 * 86_400_000_000


@pytest.fixture(params=[-3 * YEAR_US, 5 * YEAR_US], ids=["behind", "ahead"])
def wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The local clock, years behind the server or ahead of it."""
    clock = FakeClock((WallClock().now_us() + request.param) / 1_000_000)
    monkeypatch.setattr(port_parameters, "WallClock", lambda: clock)
    return clock


@pytest.fixture
def round_trips(server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:

        def count() -> int:
            stats: Any = client.info("commandstats")
            calls: int = stats.get("cmdstat_evalsha", {"calls": 0})["calls"]
            return calls

        yield count


def test_server_clock_selects_the_window(server: RedisServer, wrong_clock: FakeClock) -> None:
    with Limiter(*RULES, name="x", store=server.url, on_store_error="raise") as limiter:
        limiter.hit("alice")
        limiter.record("alice", 9)
        hold = limiter.hold("alice", 30)
        assert limiter.check("alice", 0).results[0].remaining == 10
        hold.settle(5)
        assert limiter.check("alice", 0).results[0].remaining == 35


def test_corrected_windows_are_remembered(
    server: RedisServer, wrong_clock: FakeClock, round_trips: Any
) -> None:
    with Limiter(*RULES, name="x", store=server.url, on_store_error="raise") as limiter:
        limiter.reset("alice")
        before = round_trips()
        limiter.hit("alice")
        assert round_trips() - before == 2
        for _ in range(5):
            limiter.hit("alice")
        assert round_trips() - before == 7


def test_confirm_with_a_wrong_window_is_retried_without_side_effects(
    server: RedisServer, wrong_clock: FakeClock, round_trips: Any
) -> None:
    with Limiter(*RULES, name="x", store=server.url, on_store_error="raise") as limiter:
        hold = limiter.hold("alice", 20)
        wrong_clock.advance_us(-3 * YEAR_US)
        before = round_trips()
        assert hold.confirm(25)
        assert round_trips() - before == 2
        assert [result.remaining for result in limiter.check("alice", 0).results] == [25, 75]


async def test_calls_of_tasks_with_a_wrong_window_are_retried(
    server: RedisServer, wrong_clock: FakeClock
) -> None:
    limiter = AsyncLimiter(*RULES, name="x", store=server.url, on_store_error="raise")
    async with limiter:
        decisions = await asyncio.gather(*(limiter.hit("alice") for _ in range(80)))
        assert sum(map(bool, decisions)) == 50


def test_in_a_cluster_each_slot_is_retried(wrong_clock: FakeClock) -> None:
    rules = (
        calendar("50/year", scope="user"),
        calendar("60/month", scope="*"),
        concurrent(9, lease="60s", scope="team"),
    )
    who = {"user": "alice", "team": "north"}
    with running_cluster("redis") as cluster, RedisStore(cluster.url, cluster=True) as store:
        limiter = Limiter(*rules, name="x", store=store, on_store_error="raise")
        hold = limiter.hold(who, 5)
        assert [result.remaining for result in limiter.check(who, 0).results] == [45, 55, 4]
        assert hold.renew()
        hold.release()
        assert [result.remaining for result in limiter.check(who, 0).results] == [50, 60, 9]


def test_a_server_whose_clock_keeps_jumping_is_unavailable(server: RedisServer, name: str) -> None:
    """A call is retried once: nothing was charged, and its caller waits."""
    plan = codec.plans((calendar("5/day"),)).own
    call = plan.decide(Operation.HIT, (b"key",), 1, 0)
    wrong = call.body[:3] + plan.decide(Operation.HIT, (b"key",), 1, None).body[3:27] + call.body[27:]
    with RedisStore(server.url) as store:
        engine = store._threads.at(store.endpoint)
        with pytest.raises(StoreUnavailable, match="EDGES"):
            engine.call(ScriptCall((b"key",), wrong, lambda _: wrong), time.monotonic() + 30)
