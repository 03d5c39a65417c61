"""CPU time of one decision, per rule kind, with one key and with many, admitted and refused; sync and async."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contenders import (
    ASYNC_CONTENDERS,
    CONTENDERS,
    FLOOR,
    FULL_PEERS,
    HEADGATE,
    KINDS,
    OWN_ASYNC,
    Driver,
    Rule,
)
from benchmarks.harness import (
    Panel,
    Progress,
    Result,
    Runner,
    Scale,
    Section,
    Target,
    each,
    interleave,
    notes,
    number,
    table,
    time_awaits,
    time_calls,
    worst_of,
)

LIVE_BUCKETS = 10
"""A sliding window is measured with so many of its 60 buckets in use, not freshly made."""
BUCKET_SECONDS = 1.0
PREPARATION_SECONDS = 35
"""What a refused sliding window may take to prepare and sample; counters of two windows must not roll over meanwhile."""


@dataclass(frozen=True)
class Case:
    """One column of a table."""

    kind: str
    many: bool
    refused: bool

    def __str__(self) -> str:
        return f"{'many keys' if self.many else '1 key'}, {'refused' if self.refused else 'admitted'}"

    def rule(self, scale: Scale) -> Rule:
        """Return a rule under which nothing changes its mind during the samples."""
        sliding = self.kind == "sliding_window"
        if self.refused:
            limit = LIVE_BUCKETS if sliding else 5
        elif self.many:
            limit = 100  # of an hour: nothing is given back, so that no key is forgotten, during the samples
        else:
            # A log keeps every call, so an endless limit would measure an endless log.
            limit = (scale.rounds + 2) * scale.calls // 10 if self.kind == "sliding_log" else 1_000_000
        period = round(60 * BUCKET_SECONDS) if sliding else 3600
        return Rule(self.kind, limit, period, scale.keys if self.many else 1, self.refused)

    def sampled(self, scale: Scale) -> list[str]:
        """Return the key of each call of a sample."""
        calls = scale.calls // 10 if self.kind == "sliding_log" else scale.calls
        if not self.many:
            return ["user:0"] * calls
        return random.Random(7).sample([f"user:{i}" for i in range(scale.keys)], calls)

    @property
    def passes(self) -> int:
        """How often each sampled key is hit before the samples."""
        if self.kind == "sliding_window":
            return LIVE_BUCKETS
        return 5 if self.refused else 1


CASES = [Case(kind, many, refused) for kind in KINDS for many in (False, True) for refused in (False, True)]
ASYNC_CASES = [case for case in CASES if case.kind != "sliding_log"]
STEPS = len(CASES) + len(ASYNC_CASES)

Build = Callable[[Rule], Driver]
Results = Mapping[Case, dict[str, Result]]


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure synchronous decisions, then asynchronous ones."""
    yield _sync_section({case: _measure(case, CONTENDERS, scale, progress) for case in CASES}, scale)
    # Fresh sliding windows here: the cheaper the decision, the more an await weighs. Peers only with one key.
    yield _async_section(
        {
            case: _measure(
                case, OWN_ASYNC if case.many else ASYNC_CONTENDERS, scale, progress, bucket_seconds=0
            )
            for case in ASYNC_CASES
        }
    )


class Trial:
    """One contender in one case."""

    def __init__(self, driver: Driver, loop: asyncio.Runner) -> None:
        self.driver, self.loop = driver, loop

    def fill(self, keys: Sequence[str]) -> Trial:
        """Take one unit of each key."""
        take = self.driver.fill or self.driver.hit

        async def take_all() -> None:
            for key in keys:
                answer = take(key)
                if inspect.isawaitable(answer):
                    await answer

        self.loop.run(take_all())
        return self

    def sampler(self, keys: Sequence[str], refused: bool) -> Runner:
        """Return what takes a sample, after making sure that the calls are answered as the case says."""
        answer = self.driver.hit(keys[-1])
        if inspect.isawaitable(answer):
            answer = self.loop.run(_wait_for(answer))
        if self.driver.allowed(answer) is refused:
            raise RuntimeError(f"answered {answer} where it should {'refuse' if refused else 'admit'}")
        if self.driver.awaits:
            return lambda: self.loop.run(time_awaits(self.driver.hit, keys))
        return lambda: time_calls(self.driver.hit, keys)


async def _wait_for(answer: Awaitable[object]) -> object:
    return await answer


def _measure(
    case: Case,
    contenders: Mapping[str, Build],
    scale: Scale,
    progress: Progress,
    bucket_seconds: float = BUCKET_SECONDS,
) -> dict[str, Result]:
    progress.begin(f"{case.kind}: {case}")
    rule, sampled = case.rule(scale), case.sampled(scale)
    own = dict.fromkeys(sampled)
    others = [key for key in (f"user:{i}" for i in range(rule.keys)) if key not in own]
    with asyncio.Runner() as loop:
        trials = each(contenders, lambda build: Trial(build(rule), loop).fill(others))
        if case.refused and case.kind == "sliding_window":
            _await_room_in_window(rule.period)
        for _ in range(case.passes):
            started = time.monotonic()
            trials = each(trials, lambda trial: trial.fill(list(own)))
            if case.kind == "sliding_window":
                time.sleep(max(0, started + bucket_seconds - time.monotonic()))
        runners = each(trials, lambda trial: trial.sampler(sampled, case.refused))
        results = interleave(runners, scale.rounds, progress)
        each(trials, lambda trial: trial.driver.close())
    return results


def _await_room_in_window(period: int) -> None:
    passed = time.time() % period
    if passed > period - PREPARATION_SECONDS:
        time.sleep(period - passed)


def _sync_section(results: Results, scale: Scale) -> Section:
    section = Section("decisions", data=_data(results))
    for kind in KINDS:
        cases = [case for case in results if case.kind == kind]
        section.tables.append(_kind_table(kind, cases, results, scale))
        section.tables.extend(notes(results[case] for case in cases))
        section.panels.append(_panel(kind, cases[0], results[cases[0]]))
    for kinds, floor_bound, peer_bound in (
        (("token_bucket", "fixed_window"), 1.3, 4.0),
        (("sliding_window",), 2.5, 3.0),
    ):
        for kind in kinds:
            cases = [case for case in results if case.kind == kind]
            section.targets.append(_floor_target(kind, floor_bound, cases, results))
            section.targets.extend(
                _peer_target(kind, peer, peer_bound, cases, results) for peer in FULL_PEERS
            )
    return section


def _kind_table(kind: str, cases: Sequence[Case], results: Results, scale: Scale) -> str:
    rows = []
    for name in CONTENDERS:
        found = [results[case][name] for case in cases]
        ratios = [results[case][name].times(results[case][FLOOR]) for case in cases]
        rows.append([name, *(result.cell for result in found), number(_worst(ratios), 2)])
    title = f"{kind}: CPU ns per decision, median; many keys are {scale.keys:,}"
    if kind == "token_bucket":
        title += "; limits has no token bucket, its fixed window stands in"
    return table(title, ["", *map(str, cases), "worst, x floor"], rows)


def _worst(ratios: Iterable[float]) -> float:
    return max((ratio for ratio in ratios if ratio == ratio), default=float("nan"))


def _floor_target(kind: str, bound: float, cases: Sequence[Case], results: Results) -> Target:
    ratios = {case: results[case][HEADGATE].times(results[case][FLOOR]) for case in cases}
    return worst_of(f"{kind} ÷ {FLOOR}", bound, ratios, at_most=True)


def _peer_target(kind: str, peer: str, bound: float, cases: Sequence[Case], results: Results) -> Target:
    ratios = {case: results[case][peer].times(results[case][HEADGATE]) for case in cases}
    return worst_of(f"{peer} ÷ {kind}", bound, ratios, at_most=False)


def _panel(kind: str, case: Case, results: Mapping[str, Result]) -> Panel:
    bars = [
        (name, result.median, number(result.median)) for name, result in results.items() if result.samples
    ]
    return Panel(f"{kind}: CPU time of one decision ({case})", "ns", bars)


def _async_section(results: Results) -> Section:
    ours, sync = f"{HEADGATE} async", HEADGATE
    ratios = {case: results[case][ours].times(results[case][sync]) for case in results}
    rows = [
        [
            f"{case.kind}: {case}",
            *(found.get(name, Result()).cell for name in ASYNC_CONTENDERS),
            number(ratios[case], 2),
        ]
        for case, found in results.items()
    ]
    headers = ["", *ASYNC_CONTENDERS, "async ÷ sync"]
    return Section(
        "async",
        tables=[
            table("await hit(key): CPU ns per decision, median", headers, rows),
            *notes(results.values()),
        ],
        data=_data(results),
        targets=[
            worst_of(
                "AsyncLimiter.hit ÷ Limiter.hit",
                1.3,
                {f"{case.kind}: {case}": ratio for case, ratio in ratios.items()},
                at_most=True,
            )
        ],
    )


def _data(results: Results) -> dict[str, object]:
    return {f"{case.kind}: {case}": found for case, found in results.items()}
