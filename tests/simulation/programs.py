"""Random limiters, and random programs that call them in several simulated processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headgate import (
    AsyncLimiter,
    CostTooHigh,
    RateLimited,
    Rule,
    StoreError,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from tests.faults.history import HistoryCall, RuleSpec, VerdictSeen
from tests.simulation.loop import Process, SimulatedLoop

DEADLINE = 1.0
"""Seconds."""
DAY_US = 86_400_000_000
ROOMY = 1000
"""More places than any rule has, and the highest limit that every kind of rule may have on a shared store."""
LONG_LEASE_US = 600_000_000
"""Places of such a lease are compared with the holds that are open in the end."""


@dataclass(frozen=True)
class Subject:
    """A limiter that is called.

    Attributes:
        name: Its name.
        rules: Its rules.
        others: The same rules with other limits, in force after a reload.
        roomy: The same rules with limits that are never reached, to read the counts.
        specs: The rules as the checker needs to know them.
        quota: A quota for some calls, by rule name.
    """

    name: str
    rules: tuple[Rule, ...]
    others: tuple[Rule, ...]
    roomy: tuple[Rule, ...]
    specs: tuple[RuleSpec, ...]
    quota: dict[str, str] | None
    has_scopes: bool
    has_places: bool

    def key(self, name: str) -> Any:
        return {"user": name} if self.has_scopes else name

    def cost(self, units: int) -> Any:
        """Return a cost for every rule alike, by unit if the rules count several."""
        names = {rule.unit for rule in self.rules}
        return units if len(names) == 1 else dict.fromkeys(names, units)


def random_subject(rng: Random, name: str) -> Subject:
    """Return a limiter with one to three rules of any kind."""
    kinds = [rng.choice(KINDS) for _ in range(rng.choice((1, 1, 2, 3)))]
    has_scopes = rng.random() < 0.3
    rules, others, roomy, specs = [], [], [], []
    quota: dict[str, str] = {}
    has_own_unit = rng.random() < 0.3
    for i, kind in enumerate(kinds):
        limit = rng.randrange(3, 30) * rng.choice((1, 1, 20))
        seconds = rng.choice((1, 2, 5))
        scope = rng.choice(("user", "*")) if has_scopes else None
        more: dict[str, Any] = {"name": f"{kind}-{i}", "scope": scope}
        if has_own_unit and i and kind != "concurrent":
            more["unit"] = "tokens"
        limits = [limit, limit + rng.randrange(1, 9), max(1, limit - 2), limit + 3]
        rule, spec = KINDS_OF[kind](limits, seconds, more, rng)
        rules.append(rule(limits[0], limits[1]))
        others.append(rule(limits[2], limits[1]))
        roomy.append(rule(ROOMY, ROOMY))
        specs.append(RuleSpec(**{**spec, "limits": tuple(limits), "shared": scope == "*"}))
        if kind in ("fixed_window", "sliding_log", "sliding_window"):
            quota[more["name"]] = f"{limits[3]}/{seconds}s"
    has_places = "concurrent" in kinds
    return Subject(
        name, tuple(rules), tuple(others), tuple(roomy), tuple(specs), quota or None, has_scopes, has_places
    )


def _windows(make: Any, kind: str) -> Any:
    def of(limits: list[int], seconds: int, more: dict[str, Any], rng: Random) -> Any:
        period = f"{seconds}s"
        extra = {"buckets": rng.choice((4, 10))} if kind == "sliding_window" else {}
        spec = {"kind": kind, "period_us": seconds * 1_000_000, **extra}
        return (
            lambda limit, pro: make(f"{limit}/{period}", tiers={"pro": f"{pro}/{period}"}, **extra, **more)
        ), spec

    return of


def _bucket(limits: list[int], seconds: int, more: dict[str, Any], rng: Random) -> Any:
    burst = rng.randrange(3, 20) * rng.choice((1, 1, 20))
    spec = {"kind": "token_bucket", "period_us": seconds * 1_000_000, "bursts": (burst, burst)}

    def rule(limit: int, pro: int) -> Rule:
        return token_bucket(
            f"{limit}/{seconds}s", burst=burst, tiers={"pro": f"{pro}/{seconds}s burst {burst}"}, **more
        )

    return rule, spec


def _concurrent(limits: list[int], seconds: int, more: dict[str, Any], rng: Random) -> Any:
    lease = rng.choice((LONG_LEASE_US, LONG_LEASE_US, seconds * 500_000))
    spec = {"kind": "concurrent", "period_us": lease}
    return (
        lambda limit, pro: concurrent(limit, lease=f"{lease // 1000}ms", tiers={"pro": pro}, **more)
    ), spec


def _calendar(limits: list[int], seconds: int, more: dict[str, Any], rng: Random) -> Any:
    limits[:] = [limit * 4 for limit in limits]
    spec = {"kind": "fixed_window", "period_us": DAY_US}  # days of UTC are windows from the epoch on
    return (lambda limit, pro: calendar(f"{limit}/day", tiers={"pro": f"{pro}/day"}, **more)), spec


KINDS_OF: dict[str, Any] = {
    "fixed_window": _windows(fixed_window, "fixed_window"),
    "sliding_window": _windows(sliding_window, "sliding_window"),
    "sliding_log": _windows(sliding_log, "sliding_log"),
    "token_bucket": _bucket,
    "concurrent": _concurrent,
    "calendar": _calendar,
}
KINDS = (*KINDS_OF, "concurrent", "concurrent")


@dataclass
class Recorder:
    """The calls of all processes, as they see them.

    Attributes:
        errors: Calls that failed: when they began and ended, and why.
        surprises: Exceptions that no call may raise.
    """

    now_us: Callable[[], int]
    calls: dict[tuple[int, int], HistoryCall] = field(default_factory=dict)
    errors: list[tuple[int, int, str, str]] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)

    def begin(self, worker: int, *about: Any, hold: int | None = None) -> tuple[int, int]:
        number = len(self.calls)
        operation, limiter, key, cost = about
        self.calls[worker, number] = HistoryCall(
            worker, number, operation, limiter, key, cost, self.now_us(), None, "unknown", (), hold
        )
        return worker, number

    def finish(self, call: tuple[int, int], outcome: str, decision: Any = None) -> None:
        verdicts = (
            tuple(VerdictSeen(*fields[:4]) for fields in decision.fields) if decision is not None else ()
        )
        self.calls[call] = self.calls[call]._replace(end=self.now_us(), outcome=outcome, verdicts=verdicts)

    def finish_with(self, call: tuple[int, int], answer: Any, *, is_certain: bool = True) -> None:
        """Finish a call with its answer; `is_certain` tells whether a settlement that raised nothing was done."""
        operation = self.calls[call].operation
        if operation == "record":
            self.finish(call, "unknown" if answer.degraded else "done")
        elif operation == "settle":
            self.finish(call, "done" if is_certain else "unknown")
        else:
            decision = getattr(answer, "decision", answer)
            outcome = "unknown" if decision.degraded else "admitted" if decision.allowed else "refused"
            self.finish(call, outcome, None if decision.degraded else decision)


@dataclass(frozen=True)
class Plan:
    """Parameters of the programs of one run.

    Attributes:
        actors: The number of tasks of each process.
        calls: The number of calls of each task.
        cancels: The share of calls that are cancelled.
        thinks: Seconds that a task waits between two calls, at most.
        policy: The failure policy.
        bursts: How many hits are made at once now and then.
        exits: Whether processes end in good order in the middle of their calls.
        is_certain: Whether a settlement that raises nothing was certainly done.
    """

    actors: int
    calls: int
    cancels: float
    thinks: float
    policy: str
    bursts: int
    exits: bool
    is_certain: bool


class Program:
    """A simulated process with its own store, limiters and tasks."""

    def __init__(
        self,
        loop: SimulatedLoop,
        process: Process,
        number: int,
        store: Any,
        subjects: list[Subject],
        plan: Plan,
        recorder: Recorder,
    ) -> None:
        self.loop = loop
        self.process = process
        self.number = number
        self.store = store
        self.plan = plan
        self.rng = Random(loop.rng.random())
        self.subjects = {subject.name: subject for subject in subjects}
        self.recorder = recorder
        self.limiters: dict[str, AsyncLimiter] = {}
        self.reload(others=False)
        self._holds: list[tuple[Any, Subject, str, int]] = []
        self.is_stopping = False

    def reload(self, *, others: bool) -> None:
        """Put the rules, or the same with other limits, in force."""
        self.limiters = {
            name: AsyncLimiter(
                *(subject.others if others else subject.rules),
                name=name,
                store=self.store,
                on_store_error=self.plan.policy,
            )
            for name, subject in self.subjects.items()
        }

    async def run(self) -> None:
        """Make all calls."""
        actors = [asyncio.ensure_future(self._act()) for _ in range(self.plan.actors)]
        if self.plan.exits:
            await asyncio.wait(
                actors, timeout=self.rng.random() * self.plan.calls * max(self.plan.thinks, 0.001)
            )
            self.is_stopping = True
            for actor in actors:
                actor.cancel()
            await asyncio.sleep(0)
            await self.store.aclose()
        for outcome in await asyncio.gather(*actors, return_exceptions=True):
            if isinstance(outcome, Exception):
                self.recorder.surprises.append(repr(outcome))

    async def _act(self) -> None:
        rng = self.rng
        for _ in range(self.plan.calls):
            if self._holds and rng.random() < 0.5:
                await self._end_a_hold()
            elif self.plan.bursts and rng.random() < 0.1:
                await asyncio.gather(*(self._decide() for _ in range(rng.randrange(2, self.plan.bursts))))
            else:
                await self._decide()
            if rng.random() < 0.7:
                await asyncio.sleep(rng.random() * self.plan.thinks)

    async def _decide(self) -> None:
        rng = self.rng
        subject = rng.choice(list(self.subjects.values()))
        key = rng.choice(("a", "a", "b", f"p{self.number}"))
        units = rng.choice((1, 1, 1, 2, 3))
        choice = rng.random()
        operation = "check" if choice < 0.1 else "hold" if subject.has_places or choice < 0.5 else "hit"
        if choice > 0.95 and not subject.has_places:
            operation = "record"
        elif choice > 0.9 and operation == "hit":
            operation = "wait"
        arguments: dict[str, Any] = {}
        if rng.random() < 0.2:
            arguments["tier"] = "pro"
        elif rng.random() < 0.1 and subject.quota:
            arguments["quota"] = subject.quota
        if operation == "wait":
            arguments["timeout"] = rng.choice((0.05, 0.5))
        limiter, cost = self.limiters[subject.name], subject.cost(units)
        made = await self._call(
            operation,
            subject,
            key,
            units,
            lambda: getattr(limiter, operation)(subject.key(key), cost, **arguments),
        )
        if operation == "hold" and made is not None and made[0].allowed and rng.random() < 0.9:
            self._holds.append((made[0], subject, key, made[1]))

    async def _end_a_hold(self) -> None:
        rng = self.rng
        entry = hold, subject, key, number = self._holds.pop(rng.randrange(len(self._holds)))
        cost = self.recorder.calls[self.number, number].cost
        choice = rng.random()
        if choice < 0.3 and subject.has_places:
            await self._call("renew", subject, key, cost, hold.renew, number)
            self._holds.append(entry)  # whatever came of it, the hold is open
        elif choice < 0.5:
            made = await self._call(
                "confirm", subject, key, cost, lambda: hold.confirm(subject.cost(cost)), number
            )
            if made is not None and not made[0].allowed:
                self._holds.append(entry)
        else:
            final = rng.choice((0, 0, cost, rng.randrange(cost + 2)))
            await self._call("settle", subject, key, final, lambda: hold.settle(subject.cost(final)), number)

    async def _call(
        self,
        operation: str,
        subject: Subject,
        key: str,
        cost: int,
        make: Callable[[], Awaitable[Any]],
        hold: int | None = None,
    ) -> tuple[Any, int] | None:
        """Make a call and record it; return its answer and number if it was answered."""
        recorder = self.recorder
        recorded = "hits" if operation == "wait" else operation
        call = recorder.begin(self.number, recorded, subject.name, key, cost, hold=hold)
        start = recorder.calls[call].start
        answer: Any = None
        begun = []

        async def work() -> Any:
            begun.append(True)
            return await make()

        try:
            task = asyncio.ensure_future(work())
            if self.rng.random() < self.plan.cancels:
                self._cancel_later(task)
            answer = await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                # It was answered before; only this task was cancelled.
                recorder.finish_with(call, task.result(), is_certain=self.plan.is_certain)
            else:
                recorder.finish(call, "cancelled" if begun else "nothing")
            if self.is_stopping:
                raise
            return None
        except CostTooHigh:
            recorder.finish(call, "nothing")
            return None
        except RateLimited:  # a policy that refuses hides whether the store has charged an earlier attempt
            recorder.finish(call, "nothing" if self.plan.policy == "raise" else "unknown")
            return None
        except StoreError as error:
            recorder.finish(call, "unknown")
            recorder.errors.append((start, recorder.now_us(), type(error).__name__, f"{operation}: {error}"))
            await asyncio.sleep(0.003)
            return None
        except Exception as error:  # noqa: BLE001
            recorder.finish(call, "unknown")
            recorder.surprises.append(f"{operation} raised {error!r}")
            return None
        recorder.finish_with(call, answer, is_certain=self.plan.is_certain)
        return answer, call[1]

    def _cancel_later(self, task: asyncio.Future[Any]) -> None:
        """Cancel a call at some await: after some turns of the event loop, or after some time."""
        if self.rng.random() < 0.5:
            self.loop.call_later(self.rng.random() ** 2 * 0.002, task.cancel)
        else:
            self._cancel_after(task, self.rng.randrange(30))

    def _cancel_after(self, task: asyncio.Future[Any], turns: int) -> None:
        if turns:
            self.loop.call_soon(self._cancel_after, task, turns - 1)
        else:
            task.cancel()
