"""`hold` with a timeout, and `wait` for `concurrent` rules: a release wakes the waiters in order of arrival."""

from __future__ import annotations

import asyncio
import threading
from math import inf
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Hook,
    Limiter,
    MemoryStore,
    RateLimited,
    StoreOverloaded,
    concurrent,
    sliding_log,
    sliding_window,
)
from headgate.policy import AsyncLivePolicy
from headgate.testing import FakeClock
from tests.unit.flavours import done

Flavour = type[Limiter] | type[AsyncLimiter]
PATIENCE = 10  # seconds after which a test that hangs fails


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake-up ends a sleep."""
    monkeypatch.setattr("headgate._fair_queue.POLL_EVERY", 1e6)


@pytest.fixture
def frequent_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate._fair_queue.POLL_EVERY", 0.001)


@pytest.fixture
def frequent_renewal(monkeypatch: pytest.MonkeyPatch, frequent_polling: None) -> None:
    """A waiter tries again after a moment."""
    for module in ("_async.waiting", "stores.queues"):
        monkeypatch.setattr(f"headgate.{module}.RENEW_EVERY", 0.001)
    monkeypatch.setattr("headgate._fair_queue.LOOK_EVERY", 0.001)
    monkeypatch.setattr("headgate.stores.queues.POLL_EVERY", 0.001)


class Refusals(Hook):
    """Counts refused holds, and lets a test wait for their number."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def decided(self, call: Any, decision: Any, seconds: float) -> None:
        if not decision:
            with self._changed:
                self.count += 1
                self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, PATIENCE)

    async def await_for(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.count < count:  # noqa: ASYNC110  # a hook has no event for tasks
                await asyncio.sleep(0)


def places(limit: int = 1, **options: Any) -> Any:
    return concurrent(limit, lease="60s", **options)


async def free_places(limiter: Any, key: Any = "gpt") -> int:
    found: int = (await done(limiter.check(key, 0))).remaining
    return found


@pytest.mark.usefixtures("no_polling")
async def test_fifty_tasks_share_five_places() -> None:
    refusals = Refusals()
    model = AsyncLimiter(places(5), hooks=[refusals])
    running, most = 0, 0

    async def work() -> None:
        nonlocal running, most
        async with model.hold("gpt", timeout=PATIENCE):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(work() for _ in range(50)))
    assert most == 5
    assert await free_places(model) == 5
    assert refusals.count <= 150, "no busy loop: a few tries for each task"


@pytest.mark.usefixtures("no_polling")
def test_release_wakes_threads_in_order_of_arrival() -> None:
    refusals = Refusals()
    limiter = Limiter(places(), hooks=[refusals])
    first = limiter.hold("gpt")
    served: list[int] = []

    def work(number: int) -> None:
        with limiter.hold("gpt", timeout=PATIENCE):
            served.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads):
        thread.start()
        # The first sleeps after two refusals; the others check once whether to queue at all.
        refusals.wait_for(number + 2)
    first.release()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(served) == list(range(8))
    assert served[0] == 0


@pytest.mark.parametrize("end", ["release", "settle", "confirm"])
@pytest.mark.usefixtures("no_polling")
async def test_every_end_of_a_hold_wakes_a_waiter(end: str) -> None:
    refusals = Refusals()
    limiter = AsyncLimiter(places(), hooks=[refusals])
    first = await limiter.hold("gpt")
    waiting = asyncio.create_task(done(limiter.hold("gpt", timeout=PATIENCE)))
    await refusals.await_for(2)
    await (first.settle(1) if end == "settle" else getattr(first, end)())
    async with asyncio.timeout(PATIENCE):
        assert await waiting


@pytest.mark.usefixtures("no_polling")
async def test_release_of_another_key_wakes_a_waiter_for_a_shared_place() -> None:
    refusals = Refusals()
    limiter = AsyncLimiter(places(scope="*"), sliding_window("9/minute", scope="user"), hooks=[refusals])
    first = await limiter.hold({"user": "ada"})
    waiting = [asyncio.create_task(done(limiter.hold({"user": name}, timeout=PATIENCE))) for name in "bcd"]
    await refusals.await_for(6)
    await first.release()
    async with asyncio.timeout(PATIENCE):
        for task in waiting:
            await (await task).release()


@pytest.mark.usefixtures("no_polling")
async def test_waiter_for_two_kinds_of_places_forwards_a_wake_up() -> None:
    refusals = Refusals()
    limiter = AsyncLimiter(
        places(1, scope="*", name="all"),
        concurrent(1, lease="90s", scope="user", name="own"),
        hooks=[refusals],
    )
    first = await limiter.hold({"user": "ada"})

    async def work(user: str) -> None:
        async with limiter.hold({"user": user}, timeout=PATIENCE):
            await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        for user in ("ada", "bob", "ada", "bob"):
            tasks.create_task(work(user))
        await refusals.await_for(4)
        await first.release()


async def test_timeout_raises_the_refusal(flavour: Flavour) -> None:
    limiter = flavour(places())
    hold = await done(limiter.hold("gpt"))
    with pytest.raises(RateLimited) as caught:
        await done(limiter.hold("gpt", timeout=0.01))
    assert caught.value.decision.denied_by == "concurrent"
    await done(hold.release())
    assert await free_places(limiter) == 1
    assert await done(limiter.hold("gpt", timeout=0))


@pytest.mark.parametrize("steps", range(1, 13))
async def test_cancelled_waiter_holds_nothing_and_lets_the_next_one_pass(steps: int) -> None:
    """At any time of the cancellation, also at the same time as the release."""
    limiter = AsyncLimiter(places())
    first = await limiter.hold("gpt")
    cancelled, last = (asyncio.create_task(done(limiter.hold("gpt", timeout=PATIENCE))) for _ in range(2))
    for _ in range(steps):
        await asyncio.sleep(0)
    await first.release()
    for _ in range(steps // 3):
        await asyncio.sleep(0)
    was_running = cancelled.cancel()
    ended = (await asyncio.gather(cancelled, return_exceptions=True))[0]
    assert isinstance(ended, asyncio.CancelledError) == was_running
    if not was_running:
        await ended.release()
    async with asyncio.timeout(PATIENCE):
        await (await last).release()
    assert await free_places(limiter) == 1


async def test_end_of_a_lease_admits_the_waiter(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(places(), clock=clock)
    start = clock.now_us()
    await done(limiter.hold("gpt"))
    assert await done(limiter.hold("gpt", timeout=60))
    assert clock.now_us() == start + 60_000_000


async def test_hold_waits_for_a_window_like_wait_does(flavour: Flavour, clock: FakeClock) -> None:
    limiter = flavour(sliding_log("1/minute"), places(5), clock=clock)
    start = clock.now_us()
    await done(limiter.hold("gpt"))
    with pytest.raises(RateLimited):
        await done(limiter.hold("gpt", timeout=59))
    assert clock.now_us() == start, "refused at once, because waiting would take longer"
    assert await done(limiter.hold("gpt", timeout=60))
    assert clock.now_us() == start + 60_000_000


async def test_permanent_refusal_is_raised_at_once(flavour: Flavour) -> None:
    with pytest.raises(RateLimited, match="never admitted"):
        await done(flavour(places(0)).hold("gpt", timeout=inf))


async def test_now_cannot_be_combined_with_a_timeout(flavour: Flavour) -> None:
    with pytest.raises(ConfigError, match="either now= or timeout="):
        await done(flavour(places()).hold("gpt", now=1.0, timeout=1))


@pytest.mark.usefixtures("frequent_polling")
async def test_release_through_another_limiter_is_noticed() -> None:
    """As if another process had released it."""
    store = MemoryStore()
    limiter, other = (AsyncLimiter(places(), name="model", store=store) for _ in range(2))
    hold = await other.hold("gpt")
    waiting = asyncio.create_task(done(limiter.hold("gpt", timeout=PATIENCE)))
    await asyncio.sleep(0)
    await hold.release()
    assert await waiting


@pytest.mark.usefixtures("no_polling")
async def test_wait_ends_when_a_place_is_free_and_does_not_keep_it() -> None:
    refusals = Refusals()
    limiter = AsyncLimiter(places(), sliding_window("9/minute", name="window"), hooks=[refusals])
    hold = await limiter.hold("gpt")
    waiting = asyncio.create_task(done(limiter.wait("gpt", timeout=PATIENCE)))
    await refusals.await_for(2)
    await hold.release()
    assert await waiting
    left = await limiter.check("gpt", 0)
    assert [result.remaining for result in left.results] == [1, 8]


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{folder}/limits.db"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("PLACE", 'PLACE, "600/minute"'),
        ('PLACE, "600/minute"', "PLACE"),
        ("PLACE", '{kind = "concurrent", quota = 1, lease = "60s", name = "renamed"}'),
        ('"1/hour"', '"9/hour", PLACE'),
    ],
)
@pytest.mark.usefixtures("frequent_renewal")
async def test_waiter_goes_on_by_a_policy_with_other_rules(
    tmp_path: Path, store: str, before: str, after: str
) -> None:
    file = tmp_path / "headgate.toml"

    def write(rules: str, store: str) -> None:
        rules = rules.replace("PLACE", '{kind = "concurrent", quota = 1, lease = "60s"}')
        file.write_text(f'[limiters.model]\nstore = "{store}"\nrules = [{rules}]\n')

    write(before, store.format(folder=tmp_path))
    refusals = Refusals()
    async with AsyncLivePolicy.from_file(file, hooks=[refusals]) as live:
        hold = await live["model"].hold("gpt")
        waiting = asyncio.create_task(done(live["model"].hold("gpt", timeout=7200)))
        await refusals.await_for(2)
        write(after, "memory://")
        assert live.reload()
        taken = await live["model"].hold("gpt")
        await refusals.await_for(refusals.count + 2)
        assert not waiting.done()
        await taken.release()
        await hold.release()
        async with asyncio.timeout(PATIENCE):
            assert await waiting


@pytest.mark.parametrize("store", [None, "sqlite:///{folder}/limits.db"])
@pytest.mark.usefixtures("frequent_renewal")
async def test_first_waiter_notices_units_that_are_given_back(tmp_path: Path, store: str | None) -> None:
    refusals = Refusals()
    limiter = AsyncLimiter(
        "1/hour", name="model", store=store and store.format(folder=tmp_path), hooks=[refusals]
    )
    hold = await limiter.hold("gpt")
    waiting = asyncio.create_task(limiter.wait("gpt"))
    await refusals.await_for(1)
    await hold.release()
    async with asyncio.timeout(PATIENCE):
        assert await waiting
    await limiter.aclose()


@pytest.mark.usefixtures("no_polling")
async def test_hold_of_an_older_policy_wakes_a_waiter_of_the_newer_one(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    text = '[limiters.model]\nrules = [{{kind = "concurrent", quota = 1, lease = "60s"}}, "{}/minute"]\n'
    file.write_text(text.format(8))
    refusals = Refusals()
    async with AsyncLivePolicy.from_file(file, hooks=[refusals]) as live:
        hold = await live["model"].hold("gpt")
        waiting = asyncio.create_task(done(live["model"].hold("gpt", timeout=PATIENCE)))
        await refusals.await_for(2)
        file.write_text(text.format(9))
        assert live.reload()
        await hold.release()
        async with asyncio.timeout(PATIENCE):
            assert await waiting


@pytest.mark.usefixtures("frequent_renewal")
async def test_a_busy_process_asks_again_for_the_turn_of_a_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If each such call tried to take units at once, a busy process would be busier still."""
    entered: list[object] = []

    class Entered(Hook):
        """Notes how often the queue was entered before each attempt."""

        def decided(self, call: Any, decision: Any, seconds: float) -> None:
            attempts.append(len(entered))

    async def enter(queue: Any, ticket: Any, priority: int) -> bool:
        entered.append(ticket)
        if len(entered) < 3:
            raise StoreOverloaded("too many calls at once")
        return await enters(queue, ticket, priority)

    attempts: list[int] = []
    async with AsyncLimiter(
        places(), name="a", store=f"sqlite:///{tmp_path}/a.db", hooks=[Entered()]
    ) as limiter:
        enters = limiter._queues.enter
        monkeypatch.setattr(limiter._queues, "enter", enter)
        async with asyncio.timeout(PATIENCE):
            assert await limiter.hold("gpt", timeout=inf)
    assert attempts == [3]
