"""Calendar windows follow the database's clock, even if the local clock is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from headgate import AsyncLimiter, Limiter, calendar, concurrent, fixed_window
from headgate.clock import WallClock
from headgate.stores.port_parameters import ServerTime
from headgate.stores.postgres import PostgresStore

PATIENT = 60.0
YEAR = timedelta(days=366)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore(url, deadline=PATIENT) as store:
        yield store


@pytest.fixture(params=[timedelta(0), -3 * YEAR, 3 * YEAR, timedelta(hours=-30)])
def corrections(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set the clock of this machine wrong, and return the corrections by the database."""
    wrong_by = request.param // timedelta(microseconds=1)
    right, correct = WallClock.now_us, ServerTime.correct
    said: list[int] = []

    def correcting(self: ServerTime, now: int) -> None:
        said.append(now)
        correct(self, now)

    monkeypatch.setattr(WallClock, "now_us", lambda self: right(self) + wrong_by)
    monkeypatch.setattr(ServerTime, "correct", correcting)
    return said


def test_database_clock_selects_the_window(store: PostgresStore, name: str, corrections: list[int]) -> None:
    limiter = Limiter(calendar("10/year"), name=name, store=store, on_store_error="raise")
    now = datetime.now(UTC)
    end = datetime(now.year + 1, 1, 1, tzinfo=UTC)
    for units in range(1, 5):
        decision = limiter.hit("a")
        assert (decision.allowed, decision.remaining) == (True, 10 - units)
        assert decision.reset_after is not None
        assert abs(now + timedelta(seconds=decision.reset_after) - end) < timedelta(minutes=5)
    hold = limiter.hold("a", 3)
    assert hold.confirm(2)
    assert limiter.check("a", 0).remaining == 4
    assert len(corrections) <= 1  # the correction is remembered


async def test_only_calls_with_a_wrong_window_are_sent_again(
    url: str, name: str, corrections: list[int]
) -> None:
    async with PostgresStore(url, deadline=PATIENT) as store:
        days = AsyncLimiter(
            calendar("1000/day", timezone="Asia/Tokyo"),
            fixed_window("1000/day"),
            name=name,
            store=store,
            on_store_error="raise",
        )
        others = AsyncLimiter("1000/day", name=f"{name}-other", store=store, on_store_error="raise")
        calls = [limiter.hit("a") for _ in range(20) for limiter in (days, others)]
        assert all(await asyncio.gather(*calls))
        looked = (await days.check("a", 0)).results
        assert [result.remaining for result in looked] == [980, 980]
        assert (await others.check("a", 0)).remaining == 980


def test_hold_on_place_and_calendar_is_charged_once(
    store: PostgresStore, name: str, corrections: list[int]
) -> None:
    limiter = Limiter(
        concurrent(2, lease="60s"), calendar("10/month"), name=name, store=store, on_store_error="raise"
    )
    first, second = limiter.hold("a"), limiter.hold("a")
    assert (bool(first), bool(second), bool(limiter.hold("a"))) == (True, True, False)
    assert first.renew()
    first.settle(1)
    second.release()
    assert [result.remaining for result in limiter.check("a", 0).results] == [2, 9]
