"""Races of tasks for the same units."""

from __future__ import annotations

import asyncio
import random

from headgate import AsyncHold, AsyncLimiter, Decision, Rule, concurrent
from headgate.clock import WallClock
from headgate.stores.base import Store
from headgate.testing.contract.base import Contract, each_kind
from headgate.testing.contract.blocking import BlockingStore
from headgate.testing.contract.races import SLOTS, RaceTally, check_tally

PLACES = 5

HOLDS = 400

TASKS = 256


class TaskRaceTests(Contract):
    """Tasks race for slots: exactly as many are admitted as there are slots."""

    def open_store(self) -> Store:
        return BlockingStore(self.make_store())

    @property
    def blocking(self) -> BlockingStore:
        """The store under test, with its event loop."""
        assert isinstance(self.store, BlockingStore)
        return self.store

    def async_limiter(self, *rules: Rule, name: str | None = None) -> AsyncLimiter:
        """Return an asynchronous limiter on the store; it shares counts with `limiter` of the same name."""
        name = name or self.limiter(*rules).name
        clock = None if self.own_time else self.clock
        return AsyncLimiter(*rules, name=name, store=self.blocking.store, clock=clock)

    @each_kind
    def test_racing_tasks_get_exactly_the_limit(self, kind: str) -> None:
        self.require("exact")
        limiter = self.async_limiter(self.rule(kind, SLOTS))

        async def race() -> int:
            answers = await asyncio.gather(*(limiter.hit("a") for _ in range(TASKS)))
            return sum(answer.allowed for answer in answers)

        assert self.blocking.run(race()) == SLOTS

    def test_tasks_racing_for_places_never_exceed_the_limit(self) -> None:
        self.need("concurrent", "moves")
        self.require("exact")
        limiter, tally = self.async_limiter(concurrent(PLACES, lease="60s")), RaceTally()

        async def work() -> bool:
            hold = await limiter.hold("a")
            if hold:
                tally.add(1)
                await hold.renew()
                tally.add(-1)
            await hold.release()
            return hold.allowed

        async def race() -> list[bool]:
            return await asyncio.gather(*(work() for _ in range(64)))

        assert sum(self.blocking.run(race())) >= PLACES
        assert tally.most <= PLACES
        assert self.limiter(*limiter.rules, name=limiter.name).check("a", 0).remaining == PLACES

    def test_holds_with_a_timeout_all_get_a_place(self) -> None:
        self.need("concurrent", "moves")
        self.require("exact")
        rule, tally = concurrent(PLACES, lease="1h"), RaceTally()
        clock = None if self.own_time else WallClock()
        limiter = AsyncLimiter(rule, name="timeouts", store=self.blocking.store, clock=clock)

        async def work() -> None:
            async with limiter.hold("a", timeout=3600):
                tally.add(1)
                await asyncio.sleep(0)
                tally.add(-1)

        async def race() -> int:
            tasks = [asyncio.ensure_future(work()) for _ in range(40)]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(error) for error in ended} <= {type(None), asyncio.CancelledError}
            return (await limiter.check("a", 0)).remaining or 0

        assert self.blocking.run(race()) == PLACES
        assert tally.most <= PLACES

    def test_a_cancelled_renewal_loses_no_place(self) -> None:
        self.need("concurrent", "moves")
        self.require("exact")
        limiter = self.async_limiter(concurrent(HOLDS, lease="60s"))

        async def work(pauses: int) -> None:
            hold = await limiter.hold("a")
            renewal = asyncio.ensure_future(hold.renew())
            for _ in range(pauses):
                await asyncio.sleep(0)
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
            await hold.release()

        async def race() -> None:
            await asyncio.gather(*(work(number % 9) for number in range(HOLDS)))

        self.blocking.run(race())
        assert self.limiter(*limiter.rules, name=limiter.name).check("a", 0).remaining == HOLDS

    def test_cancelling_the_heartbeat_task_after_the_work_loses_no_place(self) -> None:
        self.need("concurrent", "moves")
        self.require("exact")
        limiter = self.async_limiter(concurrent(PLACES, lease="60s"))

        async def keep_renewing(hold: AsyncHold) -> None:
            while await hold.renew():  # noqa: ASYNC110  # no event exists to wait for
                await asyncio.sleep(0)

        async def work(pauses: int) -> bool:
            async with limiter.hold("a") as hold:
                heartbeat = asyncio.ensure_future(keep_renewing(hold))
                for _ in range(pauses):
                    await asyncio.sleep(0)
                heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            return hold.allowed

        async def run() -> list[bool]:
            return [await work(number % 13) for number in range(10 * PLACES)]

        assert all(self.blocking.run(run()))
        assert self.limiter(*limiter.rules, name=limiter.name).check("a", 0).remaining == PLACES

    @each_kind
    def test_tasks_racing_with_holds_never_exceed_the_limit(self, kind: str) -> None:
        self.require("exact")
        rule = self.rule(kind, SLOTS)
        limiter = self.async_limiter(rule)
        tally = RaceTally()

        async def hold_and_settle(chance: random.Random) -> None:
            for _ in range(2):
                cost = chance.randint(1, 5)
                if hold := await limiter.hold("a", cost):
                    tally.add(cost)
                    kept = chance.choice((0, 0, chance.randint(0, cost)))
                    await asyncio.sleep(0)
                    tally.add(kept - cost)
                    await hold.settle(kept)

        async def race() -> None:
            await asyncio.gather(*(hold_and_settle(random.Random(number)) for number in range(TASKS)))

        self.blocking.run(race())
        check_tally(self.limiter(rule, name=limiter.name), rule, tally)

    @each_kind
    def test_cancelled_callers_do_not_let_others_exceed_the_limit(self, kind: str) -> None:
        """The call may have been charged or not; in both cases admissions never exceed the slots."""
        self.require("exact")
        rule = self.rule(kind, SLOTS)
        limiter = self.async_limiter(rule)

        async def race() -> int:
            racers = [asyncio.ensure_future(limiter.hit("a")) for _ in range(TASKS)]
            await asyncio.sleep(0)
            for racer in racers[::3]:
                racer.cancel()
            answers = await asyncio.gather(*racers, return_exceptions=True)
            return sum(answer.allowed for answer in answers if isinstance(answer, Decision))

        won = self.blocking.run(race())
        left = self.limiter(rule, name=limiter.name).check("a", 0).remaining
        assert left is not None
        assert won + left <= SLOTS

    @each_kind
    def test_a_limiter_works_in_a_second_event_loop(self, kind: str) -> None:
        limiter = self.async_limiter(self.rule(kind, 5))

        async def hit() -> int | None:
            return (await limiter.hit("a")).remaining

        seen = []
        for _ in range(3):
            seen.append(self.blocking.run(hit()))
            self.blocking.change_loop()
        assert seen == [4, 3, 2]
