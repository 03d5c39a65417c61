"""A thread or task that makes random calls of limiters and records them.

Real and simulated threads and tasks run the same code. In a thread its coroutine never suspends, so `run_at_once` can run
it to completion.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from random import Random
from typing import Any, NamedTuple, Protocol

from headgate import CostTooHigh, RateLimited, StoreError
from tests.faults.recording import Recorder
from tests.faults.traffic import Subject

OPEN_HOLDS = 3
"""Maximum number of open holds of one actor. It abandons further holds, like a crashed process."""


class Interrupted(Exception):
    """An exception from a signal handler."""


class Host(Protocol):
    """The process of an actor.

    Attributes:
        subjects: Definitions of the limiters, by name.
        limiters: The limiters, by name; a reload replaces them.
        recorder: The recorder of the calls.
        in_tasks: Whether actors are tasks rather than threads.
        policy: The failure policy of the limiters.
        is_certain: Whether a settlement or reset was certainly carried out if it raised no exception.
        quotas: Whether calls may pass the argument `quota`.
        waits: The share of `wait` among hits.
        resets: The share of calls that reset a key.
        exits: Whether calls must be tasks in `calls`, because the process cancels them when it exits.
        calls: The calls in progress, in the order of their start.
    """

    subjects: dict[str, Subject]
    limiters: dict[str, Any]
    recorder: Recorder
    in_tasks: bool
    policy: str
    is_certain: bool
    quotas: bool
    waits: float
    resets: float
    exits: bool
    calls: dict[asyncio.Future[Any], None]

    def now(self) -> int:
        """Return the time of the store's clock in microseconds."""

    def is_over(self) -> bool:
        """Return whether actors must stop; called once per call."""

    def pick_key(self, rng: Random) -> str:
        """Return the name of a key."""

    def key(self, name: str) -> str:
        """Return the key in the store for the name of a key."""

    def cancels(self, operation: str) -> float:
        """Return the share of calls that are cancelled."""

    def interruptible(self) -> AbstractContextManager[object]:
        """Return a context in which `Interrupted` may be raised."""

    async def rest(self, rng: Random) -> None:
        """Wait between two calls."""

    async def fail(self, operation: str, start: int, error: StoreError) -> None:
        """Record the error of a call, and wait briefly."""


class OpenHold(NamedTuple):
    """A hold, and the limiter, the key and the number of its call."""

    hold: Any
    name: str
    key: str
    number: int


class Actor:
    """One thread or task."""

    def __init__(self, host: Host, rng: Random) -> None:
        self._host = host
        self._random = rng
        self._holds: list[OpenHold] = []

    async def run(self) -> None:
        """Make one call after another until the host is over."""
        while not self._host.is_over():
            if self._holds and self._random.random() < 0.45:
                await self._use_hold()
            else:
                await self.decide()
            await self._host.rest(self._random)

    async def give_back(self) -> None:
        """Release all open holds."""
        while self._holds:
            hold, name, key, number = self._holds.pop()
            none = self._host.subjects[name].cost(0)
            await self.call("settle", name, key, 0, partial(hold.settle, none), number)

    async def decide(self) -> None:
        """Make a random call of a random limiter."""
        rng, host = self._random, self._host
        name = rng.choice(list(host.subjects))
        subject, key = host.subjects[name], host.pick_key(rng)
        operation = self._operation(subject)
        arguments: dict[str, Any] = {}
        if operation == "reset":
            await self.call(
                "reset", name, key, 0, partial(host.limiters[name].reset, subject.key(host.key(key)))
            )
            return
        choice = rng.random()
        if choice < 0.2:
            arguments["tier"] = "pro"
        elif choice < 0.3 and subject.quotas and host.quotas:
            arguments["quota"] = rng.choice(subject.quotas)
        if operation == "wait":
            arguments["timeout"] = rng.choice((0.05, 0.5))
        units = rng.choice((1, 1, 1, 1, 2, 3))
        method = getattr(host.limiters[name], operation)
        call = partial(method, subject.key(host.key(key)), subject.cost(units), **arguments)
        await self._make(operation, name, key, units, call)

    async def _make(self, operation: str, name: str, key: str, units: int, call: Callable[[], Any]) -> None:
        answer = await self.call(operation, name, key, units, call)
        if operation == "hold" and answer is not None and len(self._holds) < OPEN_HOLDS:
            hold, number = answer
            if hold.allowed:
                self._holds.append(OpenHold(hold, name, key, number))

    def _operation(self, subject: Subject) -> str:
        choice, host = self._random.random(), self._host
        if choice < 0.1:
            return "check"
        if choice < 0.12 and subject.records:
            return "record"
        if choice > 1 - host.resets:
            return "reset"
        if subject.has_places or choice < 0.4:
            return "hold"
        return "wait" if self._random.random() < host.waits else "hit"

    async def _use_hold(self) -> None:
        """Confirm, renew, settle or drop a hold."""
        rng = self._random
        entry = hold, name, key, number = rng.choice(self._holds)
        subject = self._host.subjects[name]
        units = hold.cost if isinstance(hold.cost, int) else next(iter(hold.cost.values()))
        choice = rng.random()
        if choice < 0.04:
            self._holds.remove(entry)  # abandoned, as if its process had crashed
        elif choice < 0.3:
            cost = rng.choice((units, units, units + 1))
            answer = await self.call(
                "confirm", name, key, cost, lambda: hold.confirm(subject.cost(cost)), number
            )
            if answer is None or answer[0].allowed:
                self._holds.remove(entry)
        elif choice < 0.5 and subject.has_places:
            await self.call("renew", name, key, units, hold.renew, number)
        else:
            self._holds.remove(entry)
            cost = rng.choice((0, 0, rng.randrange(units + 1), units + 1))
            await self.call("settle", name, key, cost, lambda: hold.settle(subject.cost(cost)), number)

    async def call(
        self, operation: str, name: str, key: str, cost: int, make: Callable[[], Any], hold: int | None = None
    ) -> tuple[Any, int] | None:
        """Make a call and record it; return its answer and its number if the store made a decision."""
        host, start = self._host, self._host.now()
        number = host.recorder.begin(operation, name, key, cost, start, hold)
        outcome, answer, failure, fields = "unknown", None, None, ()
        try:
            answer = await self._answer(operation, make)
            outcome, fields = self._read(operation, answer)
        except NotStarted:
            outcome = "nothing"
        except asyncio.CancelledError:
            outcome = "cancelled"
        except CostTooHigh:
            outcome = "nothing"
        except RateLimited as error:
            # After a refusal by the failure policy or an overload it is unknown whether the store charged.
            is_certain = host.policy == "raise" and not error.decision.degraded
            outcome = "nothing" if is_certain else "unknown"
        except Interrupted:
            pass
        except StoreError as error:  # includes StoreOverloaded, after which the call may have been sent late
            failure = error
        host.recorder.finish(number, outcome, host.now(), fields)
        if failure is not None:
            await host.fail(operation, start, failure)
        return (answer, number) if outcome in ("admitted", "refused") else None

    def _read(self, operation: str, answer: Any) -> tuple[str, Any]:
        """Return the outcome of a call that returned, and the answers of the rules."""
        if operation in ("settle", "reset"):
            return ("done" if self._host.is_certain else "unknown"), ()
        decision = getattr(answer, "decision", answer)
        if decision.degraded:
            return "unknown", ()
        if operation == "record":
            return "done", ()
        return ("admitted" if decision.allowed else "refused"), decision.fields

    async def _answer(self, operation: str, make: Callable[[], Any]) -> Any:
        host, rng = self._host, self._random
        if not host.in_tasks:
            with host.interruptible():
                return make()
        is_cancelled = rng.random() < host.cancels(operation)
        if not is_cancelled and not host.exits:
            return await make()
        begun: list[bool] = []
        task = asyncio.ensure_future(_begin(make, begun))
        host.calls[task] = None
        if is_cancelled:
            cancel_later(task, rng)
        try:
            return await task
        except asyncio.CancelledError:
            if begun:
                raise
            raise NotStarted from None
        finally:
            del host.calls[task]


class NotStarted(Exception):
    """A call was cancelled before its first step."""


async def _begin(make: Callable[[], Any], begun: list[bool]) -> Any:
    begun.append(True)
    return await make()


def cancel_later(task: asyncio.Future[Any], rng: Random) -> None:
    """Cancel a call at any await: after a random number of loop iterations, or after a random delay."""
    if rng.random() < 0.5:
        asyncio.get_running_loop().call_later(rng.random() ** 2 * 0.002, task.cancel)
    else:
        cancel_after_turns(task, rng)


def cancel_after_turns(task: asyncio.Future[Any], rng: Random) -> None:
    """Cancel a call after a random number of loop iterations."""
    _cancel_after(asyncio.get_running_loop(), task, rng.randrange(rng.choice((3, 8, 30))))


def _cancel_after(loop: asyncio.AbstractEventLoop, task: asyncio.Future[Any], turns: int) -> None:
    if turns:
        loop.call_soon(_cancel_after, loop, task, turns - 1)
    else:
        task.cancel()


def run_at_once(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine that never suspends."""
    with contextlib.suppress(StopIteration):
        work().send(None)
        raise AssertionError("the coroutine suspended")
