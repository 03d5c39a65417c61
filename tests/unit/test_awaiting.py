"""Answers of an async limiter before they are awaited: they behave like coroutines, but their truth value is an error."""

from __future__ import annotations

import asyncio
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import AsyncHold, AsyncLimiter, Decision, RateLimited
from headgate.testing import FakeClock

Ask = Callable[[AsyncLimiter], Any]

ASKS: dict[str, Ask] = {
    "hit": lambda limiter: limiter.hit("ada"),
    "check": lambda limiter: limiter.check("ada"),
    "hold": lambda limiter: limiter.hold("ada"),
    "wait": lambda limiter: limiter.wait("ada"),
}

each_ask = pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)


@pytest.fixture
def limiter(clock: FakeClock) -> AsyncLimiter:
    return AsyncLimiter("3/minute", clock=clock)


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the warnings of a block, including warnings of collected objects."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
        gc.collect()
        messages += [str(warning.message) for warning in found]


# --- Without await -----------------------------------------------------------------------------------------------------


@each_ask
async def test_unawaited_answer_has_no_truth_value(limiter: AsyncLimiter, ask: Ask) -> None:
    hint = r"missing await: write `if await limiter\.hit\(key\):`"
    with warned() as messages:
        answer = ask(limiter)
        with pytest.raises(TypeError, match=hint):
            bool(answer)
        with pytest.raises(RuntimeError, match="already awaited"):
            await answer
    assert messages == []
    assert (await limiter.check("ada", 0)).remaining == 3


@each_ask
async def test_unawaited_hit_warns_like_a_coroutine(limiter: AsyncLimiter, ask: Ask) -> None:
    with warned() as messages:
        ask(limiter)
    assert len(messages) == 1
    assert messages[0].endswith("was never awaited")
    assert (await limiter.check("ada", 0)).remaining == 3


@each_ask
async def test_an_answer_can_be_closed(limiter: AsyncLimiter, ask: Ask) -> None:
    with warned() as messages:
        ask(limiter).close()
    assert messages == []
    assert (await limiter.check("ada", 0)).remaining == 3


# --- With await --------------------------------------------------------------------------------------------------------


async def in_group(answer: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(answer)
    return task.result()


WAYS: dict[str, Callable[[Any], Any]] = {
    "await": lambda answer: answer,
    "create_task": lambda answer: asyncio.create_task(answer),
    "ensure_future": lambda answer: asyncio.ensure_future(answer),
    "wait_for": lambda answer: asyncio.wait_for(answer, 30),
    "shield": lambda answer: asyncio.shield(answer),
    "TaskGroup": in_group,
}


@each_ask
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_an_answer_can_be_awaited_in_every_way(
    limiter: AsyncLimiter, ask: Ask, way: Callable[[Any], Any]
) -> None:
    answer = await way(ask(limiter))
    assert isinstance(answer, (Decision, AsyncHold))
    assert answer


async def test_answers_can_be_gathered(limiter: AsyncLimiter) -> None:
    answers = await asyncio.gather(*(limiter.hit("ada") for _ in range(5)))
    assert [answer.allowed for answer in answers] == [True] * 3 + [False] * 2


@each_ask
def test_an_event_loop_can_run_an_answer(limiter: AsyncLimiter, ask: Ask) -> None:
    assert asyncio.run(ask(limiter))


@each_ask
async def test_answer_is_recognized_as_a_coroutine(limiter: AsyncLimiter, ask: Ask) -> None:
    answer = ask(limiter)
    assert inspect.isawaitable(answer)
    assert asyncio.iscoroutine(answer)
    await answer


async def test_task_of_an_answer_can_be_cancelled_and_printed(limiter: AsyncLimiter) -> None:
    await limiter.hit("ada", 3)
    limiter._clock.asleep = lambda seconds: asyncio.sleep(30)  # type: ignore[method-assign]
    task = asyncio.create_task(limiter.wait("ada"))
    await asyncio.sleep(0)
    assert "PendingCall" in repr(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_task_cancelled_before_it_runs_charges_nothing(limiter: AsyncLimiter) -> None:
    task = asyncio.create_task(limiter.hit("ada"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await limiter.check("ada", 0)).remaining == 3


@each_ask
async def test_answer_can_be_awaited_only_once(limiter: AsyncLimiter, ask: Ask) -> None:
    answer = ask(limiter)
    await answer
    with pytest.raises(RuntimeError, match="already awaited"):
        await answer
    assert (await limiter.check("ada", 0)).remaining in (2, 3)  # a check takes nothing


async def test_errors_are_raised_when_an_answer_is_awaited(limiter: AsyncLimiter) -> None:
    waiting = limiter.wait("ada", 3)
    assert await waiting
    refused = limiter.wait("ada", timeout=0)
    with pytest.raises(RateLimited):
        await refused


async def test_a_hold_is_taken_once_whether_it_is_awaited_or_entered(limiter: AsyncLimiter) -> None:
    async with limiter.hold("ada") as entered:
        assert (await limiter.check("ada", 0)).remaining == 2
    async with await limiter.hold("ada") as awaited:
        assert (await limiter.check("ada", 0)).remaining == 1
    assert isinstance(entered, AsyncHold)
    assert isinstance(awaited, AsyncHold)


async def test_a_decision_and_a_hold_have_a_truth_value(limiter: AsyncLimiter) -> None:
    assert await limiter.hit("ada", 3)
    assert not await limiter.hit("ada")
    assert not await limiter.hold("ada")
