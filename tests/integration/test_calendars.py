"""Calendar windows follow the clock of the server, even if the local clock is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headgate import AsyncLimiter, Limiter, calendar, concurrent, fixed_window
from headgate.clock import WallClock
from headgate.stores import open_store
from headgate.stores.port_parameters import ServerTime
from headgate.stores.redis import RedisStore
from tests.integration.redis.cluster import running_cluster

YEAR = timedelta(days=366)


class LocalClock:
    """The clock of this machine.

    Attributes:
        ahead: Its error.
        corrections: The times that servers answered, because a call had another window.
    """

    def __init__(self, ahead: timedelta) -> None:
        self.ahead = ahead
        self.corrections: list[int] = []


@pytest.fixture(params=[timedelta(0), -3 * YEAR, 3 * YEAR, timedelta(hours=-30)], ids=str)
def local_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LocalClock:
    """A clock that is wrong, except in the first case."""
    clock, now_us, correct = LocalClock(request.param), WallClock.now_us, ServerTime.correct

    def correcting(self: ServerTime, now: int) -> None:
        clock.corrections.append(now)
        correct(self, now)

    monkeypatch.setattr(
        WallClock, "now_us", lambda self: now_us(self) + clock.ahead // timedelta(microseconds=1)
    )
    monkeypatch.setattr(ServerTime, "correct", correcting)
    return clock


@pytest.fixture(params=["redis", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    store = open_store(request.getfixturevalue(f"headgate_{request.param}_url"))
    yield store
    store.close()


def test_clock_of_the_server_selects_the_window(store: Any, name: str, local_clock: LocalClock) -> None:
    rules = (calendar("50/year"), fixed_window("100/day"))
    limiter = Limiter(*rules, name=name, store=store, on_store_error="raise")
    now = datetime.now(UTC)
    decision = limiter.hit("a")
    reset_after = decision.results[0].reset_after
    assert reset_after is not None
    assert abs(now + timedelta(seconds=reset_after) - datetime(now.year + 1, 1, 1, tzinfo=UTC)) < timedelta(
        minutes=5
    )
    limiter.record("a", 9)
    hold = limiter.hold("a", 30)
    assert limiter.check("a", 0).results[0].remaining == 10
    hold.settle(5)
    assert limiter.check("a", 0).results[0].remaining == 35
    assert len(local_clock.corrections) <= 1, "the correction is remembered"


def test_confirm_with_a_wrong_window_is_retried_without_side_effects(
    store: Any, name: str, local_clock: LocalClock
) -> None:
    rules = (calendar("50/year"), fixed_window("100/week"))
    limiter = Limiter(*rules, name=name, store=store, on_store_error="raise")
    hold = limiter.hold("a", 20)
    local_clock.ahead -= 3 * YEAR
    local_clock.corrections.clear()
    assert hold.confirm(25)
    assert len(local_clock.corrections) == 1
    assert [result.remaining for result in limiter.check("a", 0).results] == [25, 75]


def test_hold_on_place_and_calendar_is_charged_once(store: Any, name: str, local_clock: LocalClock) -> None:
    rules = (concurrent(2, lease="60s"), calendar("10/month"))
    limiter = Limiter(*rules, name=name, store=store, on_store_error="raise")
    first, second = limiter.hold("a"), limiter.hold("a")
    assert (bool(first), bool(second), bool(limiter.hold("a"))) == (True, True, False)
    assert first.renew()
    first.settle(1)
    second.release()
    assert [result.remaining for result in limiter.check("a", 0).results] == [2, 9]


async def test_only_calls_with_a_wrong_window_are_sent_again(
    store: Any, name: str, local_clock: LocalClock
) -> None:
    rules = (calendar("50/day", timezone="Asia/Tokyo"), fixed_window("1000/week"))
    days = AsyncLimiter(*rules, name=name, store=store, on_store_error="raise")
    others = AsyncLimiter("1000/day", name=f"{name}-other", store=store, on_store_error="raise")
    decisions = await asyncio.gather(*(limiter.hit("a") for _ in range(80) for limiter in (days, others)))
    assert sum(map(bool, decisions)) == 50 + 80
    assert [result.remaining for result in (await days.check("a", 0)).results] == [0, 950]
    assert (await others.check("a", 0)).remaining == 920
    await store.aclose()


@pytest.mark.parametrize("local_clock", [-3 * YEAR], indirect=True)
def test_calls_in_a_cluster_are_sent_again(local_clock: LocalClock) -> None:
    rules = (
        calendar("50/year"),
        calendar("60/month"),
        concurrent(9, lease="60s"),
    )
    with running_cluster("redis") as cluster, RedisStore(cluster.url, cluster=True) as store:
        limiter = Limiter(*rules, name="x", store=store, on_store_error="raise")
        hold = limiter.hold("alice", 5)
        assert [result.remaining for result in limiter.check("alice", 0).results] == [45, 55, 4]
        assert hold.renew()
        hold.release()
        assert [result.remaining for result in limiter.check("alice", 0).results] == [50, 60, 9]
