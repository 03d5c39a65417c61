"""What was decided before now: bounded, written once, and kept over restarts."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from headgate_server.history import MAX_BYTES, SECONDS_KEPT, DecisionHistory
from headgate_server.wire import Figures, History, HistoryStep, Tick
from tests.server.support import Server, problem


def tick(at: int, seconds: int = 1, **limiters: Figures) -> Tick:
    return Tick(at, limiters, {}, [], [], seconds=seconds)


def seconds(history: DecisionHistory) -> list[int]:
    return [second.time for second in msgspec.json.decode(history.seconds.whole(), type=History).ticks]


def test_seconds_are_bounded_in_number() -> None:
    history = DecisionHistory()
    for at in range(SECONDS_KEPT + 5):
        history.add(tick(at, login=Figures(1)))
    assert seconds(history) == list(range(5, SECONDS_KEPT + 5))


def test_seconds_are_bounded_in_bytes_and_written_once() -> None:
    history = DecisionHistory()
    many = {f"a limiter with a name of its own {number:05}": Figures(1) for number in range(2_000)}
    for at in range(50):
        history.add(tick(at, **many))
    assert len(history.seconds.whole()) <= MAX_BYTES + 100
    assert seconds(history)[-1] == 49
    assert history.seconds.whole() is history.seconds.whole()


def test_what_did_nothing_takes_no_room() -> None:
    history = DecisionHistory()
    history.add(tick(7, busy=Figures(3, 2, 1, 1), idle=Figures()))
    assert history.seconds.whole() == b'{"ticks":[{"time":7,"limiters":{"busy":[3,2,1,1]}}]}'


def test_an_hour_and_a_day_are_rings_of_steps() -> None:
    history = DecisionHistory()
    for at in range(0, 2 * 86_400, 30):
        history.add(tick(at, login=Figures(1)))
    hour, day = history.range("hour"), history.range("day")
    assert hour is not None
    assert day is not None
    assert history.range("week") is None
    assert (hour.step, len(hour.steps), day.step, len(day.steps)) == (60, 60, 900, 96)
    assert hour.steps[-1] == HistoryStep(2 * 86_400 - 60, 2, {"login": (2, 0, 0, 0)})
    assert day.steps[0] == HistoryStep(86_400, 30, {"login": (30, 0, 0, 0)})


def test_a_tick_after_missing_ones_is_about_their_seconds_too() -> None:
    history = DecisionHistory()
    history.add(tick(60, login=Figures(10)))
    history.add(tick(65, seconds=5, login=Figures(50)))
    assert history.seconds.whole() == (
        b'{"ticks":[{"time":60,"limiters":{"login":[10,0,0,0]}},'
        b'{"time":65,"limiters":{"login":[50,0,0,0]},"seconds":5}]}'
    )
    hour = history.range("hour")
    assert hour is not None
    assert hour.steps == [HistoryStep(60, 6, {"login": (60, 0, 0, 0)})]
    history.add(tick(119, seconds=1_000))  # the machine slept
    assert hour.steps[0].seconds == 60


def test_steps_that_are_too_old_go_even_after_a_pause() -> None:
    history = DecisionHistory()
    history.add(tick(0, login=Figures(1)))
    history.add(tick(3_600, login=Figures(1)))
    hour = history.range("hour")
    assert hour is not None
    assert [step.time for step in hour.steps] == [3_600]


def test_a_clock_that_is_set_back_leaves_the_order() -> None:
    history = DecisionHistory()
    for at in (*range(7_190, 7_210), 3_600 + 50):
        history.add(tick(at, login=Figures(1)))
    assert seconds(history) == [3_650]
    history.add(tick(3_670, login=Figures(1)))
    history.add(tick(3_669, login=Figures(1)))  # by a second
    assert seconds(history) == [3_650, 3_669]
    for name, begin in (("hour", [3_600, 3_660]), ("day", [3_600])):
        found = history.range(name)
        assert found is not None
        assert [step.time for step in found.steps] == begin


def test_a_file_from_the_future_leaves_the_order(tmp_path: Path) -> None:
    before, after = DecisionHistory(), DecisionHistory()
    before.keep_in(tmp_path / "history")
    for at in (100, 10_000):
        before.add(tick(at, login=Figures(1)))
    before.save()
    after.keep_in(tmp_path / "history")
    after.add(tick(200, login=Figures(1)))
    assert seconds(after) == [100, 200]


def test_it_is_kept_over_a_restart(tmp_path: Path) -> None:
    before, after = DecisionHistory(), DecisionHistory()
    before.keep_in(tmp_path / "history")
    before.add(tick(120, login=Figures(4, 1)))
    before.save()
    after.keep_in(tmp_path / "history")
    after.add(tick(121, login=Figures(1)))
    assert seconds(after) == [120, 121]
    hour = after.range("hour")
    assert hour is not None
    assert hour.steps == [HistoryStep(120, 2, {"login": (5, 1, 0, 0)})]
    assert [path.name for path in tmp_path.iterdir()] == ["history"]


def test_a_file_that_cannot_be_used_is_said_once_and_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "history").write_bytes(b"something else")
    history = DecisionHistory()
    with caplog.at_level(logging.WARNING):
        history.keep_in(tmp_path / "history")
    assert "cannot read the history" in caplog.text
    history.keep_in(tmp_path / "missing" / "history")
    caplog.clear()
    history.save()
    history.save()
    assert len(caplog.records) == 1
    (tmp_path / "missing").mkdir()
    history.save()
    assert (tmp_path / "missing" / "history").exists()


async def test_the_api_tells_ranges() -> None:
    server = Server()
    await server.hit()
    await server.app._tick(600)
    answer = (await server.client.get("/v1/history/day")).json()
    assert answer == {"step": 900, "steps": [{"time": 0, "seconds": 1, "limiters": {"login": [1, 0, 0, 0]}}]}
    assert "/v1/history/hour" in problem(await server.client.get("/v1/history/week"), 404)
