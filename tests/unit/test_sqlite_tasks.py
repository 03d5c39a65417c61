"""Tasks on an SQLite store: calls whose caller is cancelled, and calls while the store is closed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import AsyncLimiter, SQLiteStore, StoreUnavailable
from headgate.stores.sqlite import _SQLiteGate


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore(tmp_path / "limits.db") as store:
        yield store


@pytest.fixture
def limiter(store: SQLiteStore) -> AsyncLimiter:
    return AsyncLimiter("100/hour", name="x", store=store)


class BusyWorker:
    """Keeps the thread of the store busy until it is released, so that all other calls are queued behind it."""

    def __init__(self, store: SQLiteStore) -> None:
        self._end = threading.Event()
        self._running = store.start_in_worker(self._end.wait)

    def finish(self) -> None:
        self._end.set()


async def cancelled(call: Any) -> None:
    """Start a call, and cancel it while it waits."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def counted(limiter: AsyncLimiter) -> int:
    return 100 - ((await limiter.check("alice", 0)).remaining or 0)


async def test_cancelled_record_is_still_written(store: SQLiteStore, limiter: AsyncLimiter) -> None:
    worker = BusyWorker(store)
    await cancelled(limiter.record("alice", 7))
    worker.finish()
    assert await counted(limiter) == 7


@pytest.mark.parametrize(("cost", "left"), [(0, 0), (3, 3), (9, 9)])
async def test_cancelled_settle_is_still_written(
    store: SQLiteStore, limiter: AsyncLimiter, cost: int, left: int
) -> None:
    hold = await limiter.hold("alice", 7)
    worker = BusyWorker(store)
    await cancelled(hold.settle(cost))
    worker.finish()
    assert await counted(limiter) == left


async def test_cancelled_reset_is_still_done(store: SQLiteStore, limiter: AsyncLimiter) -> None:
    await limiter.hit("alice", 7)
    worker = BusyWorker(store)
    await cancelled(limiter.reset("alice"))
    worker.finish()
    assert await counted(limiter) == 0


@pytest.mark.parametrize("operation", ["hit", "hold"])
async def test_cancelled_call_that_has_not_started_is_not_run(
    store: SQLiteStore, limiter: AsyncLimiter, operation: str
) -> None:
    worker = BusyWorker(store)
    await cancelled(getattr(limiter, operation)("alice", 7))
    worker.finish()
    assert await counted(limiter) == 0


async def test_cancelled_hold_that_has_started_is_released(
    store: SQLiteStore, limiter: AsyncLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    decide = _SQLiteGate._decide

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return decide(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_SQLiteGate, "_decide", slowly)
        task = asyncio.ensure_future(limiter.hold("alice", 7))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    go_on.set()
    await limiter.record("bob")  # runs after the hold, and before or after its release
    await limiter.record("bob")
    assert await counted(limiter) == 0


async def test_holds_cancelled_at_any_time_leave_no_units_charged(limiter: AsyncLimiter) -> None:
    """Regression: 2,973 of 11,000 holds stayed charged."""
    chance = random.Random(7)
    for _ in range(40):
        tasks = [asyncio.ensure_future(_hold_and_release(limiter)) for _ in range(25)]
        for task in tasks:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if chance.random() < 0.8:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await limiter.record("bob")
    await limiter.record("bob")
    assert await counted(limiter) == 0


async def _hold_and_release(limiter: AsyncLimiter) -> None:
    async with limiter.hold("alice") as hold:
        await asyncio.sleep(0)
        await hold.release()


async def test_error_after_a_cancellation_is_logged(
    store: SQLiteStore,
    limiter: AsyncLimiter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*args: object) -> None:
        raise StoreUnavailable("the disk is full")

    worker = BusyWorker(store)
    with monkeypatch.context() as patch:
        patch.setattr(_SQLiteGate, "_record", fails)
        await cancelled(limiter.record("alice", 7))
        worker.finish()
        await limiter.check("alice")
    assert "could not be completed: the disk is full" in caplog.text


async def test_close_waits_for_pending_calls(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "limits.db")
    limiter = AsyncLimiter("100/hour", name="x", store=store)
    worker = BusyWorker(store)
    await cancelled(limiter.record("alice", 7))
    closing = asyncio.ensure_future(store.aclose())
    await asyncio.sleep(0)
    worker.finish()
    await closing
    with pytest.raises(StoreUnavailable, match="closed"):
        await limiter.hit("alice")
    with SQLiteStore(tmp_path / "limits.db") as again:
        assert await counted(AsyncLimiter("100/hour", name="x", store=again)) == 7


def test_pending_call_completes_after_its_event_loop_ends(store: SQLiteStore, limiter: AsyncLimiter) -> None:
    async def leave() -> BusyWorker:
        worker = BusyWorker(store)
        task = asyncio.ensure_future(limiter.record("alice", 7))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await task
        return worker

    asyncio.run(leave()).finish()
    assert asyncio.run(counted(limiter)) == 7
