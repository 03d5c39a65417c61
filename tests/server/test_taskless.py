"""Coroutines that run without a task."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from headgate_server.http.taskless import run_without_task
from tests.server.support import turn_until


@pytest.fixture
def under_way() -> set[Any]:
    return set()


@pytest.mark.parametrize("turns", range(3))
async def test_cancellation_is_raised_in_the_coroutine(under_way: set[Any], turns: int) -> None:
    """Also in the turn in which it has begun."""
    seen: list[type[BaseException]] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            await asyncio.Event().wait()
        except BaseException as error:
            seen.append(type(error))
            raise

    run_without_task(work(), asyncio.get_running_loop(), under_way)
    for _ in range(turns):
        await asyncio.sleep(0)
    [waiting] = under_way
    waiting.cancel()
    await turn_until(lambda: not under_way)
    assert seen == [asyncio.CancelledError]


async def test_two_coroutines_may_await_one_future(under_way: set[Any]) -> None:
    loop = asyncio.get_running_loop()
    awaited, seen = loop.create_future(), list[int]()

    async def work() -> None:
        seen.append(await awaited)

    for _ in range(2):
        run_without_task(work(), loop, under_way)
    awaited.set_result(1)
    await turn_until(lambda: not under_way)
    assert seen == [1, 1]


async def test_cancelled_coroutine_may_still_wait(under_way: set[Any]) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("tidied")

    run_without_task(work(), asyncio.get_running_loop(), under_way)
    [waiting] = under_way
    waiting.cancel()
    await turn_until(lambda: not under_way)
    assert seen == ["tidied"]


async def test_context_variables_are_isolated(under_way: set[Any]) -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[str] = []

    async def work(name: str) -> None:
        token = request.set(name)
        await asyncio.sleep(0)
        seen.append(request.get())
        request.reset(token)
        seen.append(request.get())

    for name in ("a", "b"):
        run_without_task(work(name), asyncio.get_running_loop(), under_way)
    assert request.get() == "none"
    await turn_until(lambda: not under_way)
    assert seen == ["a", "none", "b", "none"]
