"""`python -m benchmarks.redis [--quick]`: decisions a second on a Redis server over loopback, by the wall clock.

The floor is what a careful user writes without any library: redis-py and one EVALSHA of a GCRA script per decision. Every
peer is set up as its documentation says, on the same server, with redis-py underneath; with asyncio, its pool is made large
enough for all tasks. Rounds are interleaved, so that a slow spell of the machine hits all alike.

With many tasks there is a second floor, the best that batching can bring: the same script over the keys of all tasks that
wait, in one call, written by hand.

The server is the one that comes with `headgate[embedded]`, or the one named by HEADGATE_TEST_REDIS_URL, which is emptied.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from benchmarks.contenders import HEADGATE
from benchmarks.crowd import race
from benchmarks.harness import (
    FULL,
    QUICK,
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
    target_table,
    worst_of,
    write_chart,
    write_json,
)

FLOOR = "floor: EVALSHA"
ONE_SCRIPT = "floor: one script for all"
LIMIT = 1_000_000_000
HOUR = 3600
TASKS = (1, 64, 256)
CROWD = 32
STEPS = 2 + len(TASKS)

GCRA = """
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local new = tat + tonumber(ARGV[1])
if new - now > tonumber(ARGV[2]) then return {0, 0, new - now - tonumber(ARGV[2])} end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return {1, math.floor((tonumber(ARGV[2]) - (new - now)) / tonumber(ARGV[1])), 0}
"""

GCRA_OF_ALL = """
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local step, period = tonumber(ARGV[1]), tonumber(ARGV[2])
local answers = {}
for i = 1, #KEYS do
  local tat = tonumber(redis.call('GET', KEYS[i]) or now)
  if tat < now then tat = now end
  local new = tat + step
  if new - now > period then
    answers[i] = {0, 0, new - now - period}
  else
    redis.call('SET', KEYS[i], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
    answers[i] = {1, math.floor((period - (new - now)) / step), 0}
  end
end
return answers
"""


class Caller(NamedTuple):
    """A contender on the server."""

    hit: Callable[[str], Any]
    """Takes a key; for tasks, returns something to await."""
    close: Callable[[], Any] = lambda: None


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure one synchronous client, then many threads, then tasks."""
    with server_url() as url:
        yield _measure_threads(scale, progress, url)
        yield _measure_crowd(scale, progress, url)
        for tasks in TASKS:
            yield _measure_tasks(scale, progress, url, tasks)


@contextlib.contextmanager
def server_url() -> Iterator[str]:
    """Provide a server for as long as a block lasts."""
    if given := os.environ.get("HEADGATE_TEST_REDIS_URL"):
        yield given
        return
    from headgate.testing.servers import RedisServer

    with RedisServer() as server:
        yield server.url


# --- One synchronous client ------------------------------------------------------------------------------------------


def _measure_threads(scale: Scale, progress: Progress, url: str) -> Section:
    progress.begin("Redis: one synchronous client")
    calls = scale.calls // 5
    callers = each(THREADS, lambda build: build(url))
    runners: Mapping[str, Runner | Result] = each(callers, lambda caller: partial(_time, caller, calls))
    trips = _round_trips(url, callers[f"{HEADGATE}: token_bucket"], calls)
    measured = interleave(runners, scale.rounds, progress)
    for caller in callers.values():
        if isinstance(caller, Caller):
            caller.close()
    floor = measured[FLOOR]
    rows = [[name, found.cell, number(found.times(floor), 2)] for name, found in measured.items()]
    ours = {name: found for name, found in measured.items() if name.startswith(HEADGATE)}
    single = {name: found.times(floor) for name, found in ours.items() if "three" not in name}
    slowest = min(single, key=lambda name: single[name])
    three = ours[f"{HEADGATE}: three rules"].times(ours[f"{HEADGATE}: token_bucket"])
    return Section(
        "redis, threads",
        tables=[
            table("Redis, one synchronous client: decisions a second", ["", "per second", "÷ floor"], rows),
            *notes([measured]),
        ],
        data=dict(measured),
        targets=[
            Target("Redis, synchronous, one rule ÷ floor", 1.0, single[slowest], False, slowest),
            Target("Redis, synchronous, three rules ÷ one", 0.85, three, False),
            Target("Redis, synchronous, round trips per decision", 1.0, trips, True),
        ],
        panels=[_panel("Redis, one synchronous client: decisions a second (more is better)", measured)],
    )


def _time(caller: Caller, calls: int) -> float:
    hit = caller.hit
    started = time.perf_counter()
    for _ in range(calls):
        hit("user:0")
    return calls / (time.perf_counter() - started)


def _round_trips(url: str, caller: Caller | Result, calls: int) -> float:
    if isinstance(caller, Result):
        return float("nan")
    caller.hit("user:0")  # the first call of all brings the script
    before = script_calls(url)
    _time(caller, calls)
    return (script_calls(url) - before) / calls


def script_calls(url: str) -> int:
    """Return how many calls of scripts the server itself has counted."""
    import redis

    with redis.Redis.from_url(url) as client:
        stats: Any = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


def evalsha(url: str) -> Caller:
    """Build the floor."""
    import redis

    client = redis.Redis.from_url(url)
    sha = client.script_load(GCRA)
    step, period = HOUR * 1_000_000 / LIMIT, HOUR * 1_000_000
    return Caller(lambda key: client.evalsha(sha, 1, f"floor:{key}", step, period), client.close)


def headgate(kind: str, url: str) -> Caller:
    """Build ours."""
    from headgate import Limiter

    limiter = Limiter(*_rules(kind), name=f"bench {kind}", store=url, on_store_error="raise")
    return Caller(limiter.hit, limiter.close)


def _rules(kind: str) -> list[Any]:
    import headgate as package

    rules = {
        "fixed_window": package.fixed_window(f"{LIMIT}/hour"),
        "sliding_window": package.sliding_window(f"{LIMIT}/minute"),
        "sliding_log": package.sliding_log("1000/second"),
        "token_bucket": package.token_bucket("1000000/hour"),
    }
    if kind != "three rules":
        return [rules[kind]]
    return [rules["fixed_window"], rules["sliding_window"], rules["token_bucket"]]


# https://limits.readthedocs.io/en/stable/storage.html#redis
_LIMITS = {
    "fixed_window": "FixedWindowRateLimiter",
    "sliding_window": "SlidingWindowCounterRateLimiter",
    "sliding_log": "MovingWindowRateLimiter",
}


def limits(kind: str, url: str) -> Caller:
    """Build limits."""
    from limits import parse, strategies
    from limits.storage import RedisStorage

    strategy = getattr(strategies, _LIMITS[kind])(RedisStorage(url))
    return Caller(partial(strategy.hit, parse(_quota(kind))))


def _quota(kind: str) -> str:
    return "1000 per 1 second" if kind == "sliding_log" else f"{LIMIT} per 1 hour"


# https://throttled-py.readthedocs.io/en/latest/quickstart/store-backends.html#redis
def throttled(kind: str, url: str) -> Caller:
    """Build throttled-py."""
    import throttled as package

    return Caller(_throttle(package, kind, url, {}).limit)


def _throttle(package: Any, kind: str, url: str, options: dict[str, Any]) -> Any:
    return package.Throttled(
        using=kind,
        quota=package.per_duration(timedelta(hours=1), LIMIT, LIMIT),
        store=package.RedisStore(server=url, options=options),
    )


# https://pyratelimiter.readthedocs.io (README, "RedisBucket"): a log, one bucket per key
def pyrate(url: str) -> Caller:
    """Build pyrate-limiter."""
    import redis
    from pyrate_limiter import Limiter, Rate, RedisBucket

    client = redis.Redis.from_url(url)
    limiter = Limiter(RedisBucket.init([Rate(1000, 1000)], client, "pyrate"))
    return Caller(partial(limiter.try_acquire, blocking=False), client.close)


KINDS = ("fixed_window", "sliding_window", "sliding_log", "token_bucket")
THREADS: dict[str, Callable[[str], Caller]] = {
    FLOOR: evalsha,
    **{f"{HEADGATE}: {kind}": partial(headgate, kind) for kind in (*KINDS, "three rules")},
    **{f"limits: {kind}": partial(limits, kind) for kind in _LIMITS},
    **{f"throttled-py: {kind}": partial(throttled, kind) for kind in KINDS if kind != "sliding_log"},
    "pyrate-limiter: sliding_log": pyrate,
}


# --- Many threads ----------------------------------------------------------------------------------------------------


def _measure_crowd(scale: Scale, progress: Progress, url: str) -> Section:
    progress.begin(f"Redis: {CROWD} threads")
    # pyrate-limiter does not wait for its own lock unless it may block, so that few of its calls would ask the server.
    builders = {name: build for name, build in THREADS.items() if not name.startswith("pyrate")}
    callers = each(builders, lambda build: build(url))
    cpu: dict[str, Result] = {name: Result() for name in callers}

    def sample(name: str, caller: Caller) -> float:
        rate, microseconds = race(caller.hit, CROWD, scale.calls // 2, lambda: cycle(["user:0"]))
        cpu[name].samples.append(microseconds)
        return rate

    runners: dict[str, Runner | Result] = {
        name: caller if isinstance(caller, Result) else partial(sample, name, caller)
        for name, caller in callers.items()
    }
    measured = interleave(runners, scale.rounds, progress)
    for caller in callers.values():
        if isinstance(caller, Caller):
            caller.close()
    floor = measured[FLOOR]
    rows = [
        [name, found.cell, number(found.times(floor), 2), number(cpu[name].median)]
        for name, found in measured.items()
    ]
    best = _best_peer(measured)
    rates = {name: measured[name].times(measured[best]) for name in (f"{HEADGATE}: {kind}" for kind in KINDS)}
    slowest = min(rates, key=lambda name: rates[name])
    return Section(
        f"redis, {CROWD} threads",
        tables=[
            table(
                f"Redis, {CROWD} threads in one process: decisions a second",
                ["", "per second", "÷ floor", "CPU µs"],
                rows,
            ),
            *notes([measured]),
        ],
        data={"rates": measured, "CPU microseconds": cpu},
        targets=[
            Target(
                f"Redis, {CROWD} threads, decisions ÷ best peer ({best})", 4.0, rates[slowest], False, slowest
            )
        ],
        panels=[_panel(f"Redis, {CROWD} threads: decisions a second (more is better)", measured)],
    )


def _best_peer(measured: Mapping[str, Result]) -> str:
    peers = [name for name in measured if not name.startswith((HEADGATE, "floor")) and measured[name].samples]
    return max(peers, key=lambda name: measured[name].median, default=FLOOR)


# --- Tasks -----------------------------------------------------------------------------------------------------------


def _measure_tasks(scale: Scale, progress: Progress, url: str, tasks: int) -> Section:
    progress.begin(f"Redis: {tasks} task{'s' * (tasks > 1)}")
    calls = scale.calls // (5 if tasks == 1 else 2)
    waits: dict[str, Result] = {name: Result() for name in TASKS_CALLERS}
    cpu: dict[str, Result] = {name: Result() for name in TASKS_CALLERS}
    with asyncio.Runner() as loop:
        callers = each(TASKS_CALLERS, lambda build: loop.run(build(url)))
        runners: dict[str, Runner | Result] = {
            name: caller
            if isinstance(caller, Result)
            else partial(_sample, loop, caller, tasks, calls, waits[name], cpu[name])
            for name, caller in callers.items()
        }
        trips = _task_round_trips(url, loop, callers[f"{HEADGATE}: token_bucket"], tasks, calls)
        measured = interleave(runners, scale.rounds, progress)
        for caller in callers.values():
            if isinstance(caller, Caller):
                loop.run(_closed(caller))
    floor = measured[FLOOR]
    rows = [
        [
            name,
            found.cell,
            number(found.times(floor), 2),
            number(waits[name].median * 1e6),
            number(cpu[name].median),
        ]
        for name, found in measured.items()
    ]
    return Section(
        f"redis, {tasks} tasks",
        tables=[
            table(
                f"Redis, asyncio, {tasks} tasks in one process: decisions a second",
                ["", "per second", "÷ floor", "p50 µs", "CPU µs"],
                rows,
            ),
            *notes([measured]),
            f"Round trips per decision, by the server's own count: {trips:.3f}",
        ],
        data={"rates": measured, "p50": waits, "CPU microseconds": cpu, "round trips": trips},
        targets=_task_targets(tasks, measured, waits, cpu, trips),
        panels=[_panel(f"Redis, asyncio, {tasks} tasks: decisions a second (more is better)", measured)],
    )


def _task_targets(
    tasks: int,
    measured: dict[str, Result],
    waits: dict[str, Result],
    cpu: dict[str, Result],
    trips: float,
) -> list[Target]:
    if tasks == 1:
        return [Target("Redis, 1 task, round trips per decision", 1.0, trips, True)]
    best = _best_peer(measured)
    ours = [f"{HEADGATE}: {kind}" for kind in KINDS]
    rates = {name: measured[name].times(measured[best]) for name in ours}
    slower = {name: waits[name].times(waits[best]) for name in ours}
    slowest, longest = min(rates, key=lambda n: rates[n]), max(slower, key=lambda n: slower[n])
    bound = 5.0 if tasks == max(TASKS) else 4.0
    of_floor = {name: measured[name].times(measured[ONE_SCRIPT]) for name in ours}
    costs = {name: cpu[name].median for name in ours}
    more_than_floor = {name: cpu[name].times(cpu[ONE_SCRIPT]) for name in ours}
    return [
        Target(
            f"Redis, {tasks} tasks, decisions ÷ best peer ({best})", bound, rates[slowest], False, slowest
        ),
        worst_of(f"Redis, {tasks} tasks, decisions ÷ {ONE_SCRIPT}", 0.65, of_floor, at_most=False),
        worst_of(f"Redis, {tasks} tasks, microseconds of CPU time for a decision", 16, costs, at_most=True),
        # The same bound on any machine: where the 16 were set, the floor took 11.
        worst_of(f"Redis, {tasks} tasks, CPU time ÷ {ONE_SCRIPT}", 1.45, more_than_floor, at_most=True),
        Target(f"Redis, {tasks} tasks, p50 ÷ best peer's", 1 / 3, slower[longest], True, longest),
        Target(f"Redis, {tasks} tasks, round trips per decision", 0.1, trips, True),
    ]


def _sample(
    loop: asyncio.Runner, caller: Caller, tasks: int, calls: int, waits: Result, cpu: Result
) -> float:
    worked = time.process_time()
    rate, wait = loop.run(_race(caller, tasks, calls))
    cpu.samples.append((time.process_time() - worked) / (calls // tasks * tasks) * 1e6)
    waits.samples.append(wait)
    return rate


async def _race(caller: Caller, tasks: int, calls: int) -> tuple[float, float]:
    """Return decisions a second, and the median of the seconds that each took."""
    took: list[float] = []
    hit, clock = caller.hit, time.perf_counter

    async def worker(key: str) -> None:
        for _ in range(calls // tasks):
            started = clock()
            await hit(key)
            took.append(clock() - started)

    started = clock()
    await asyncio.gather(*(worker(f"user:{i}") for i in range(tasks)))
    return len(took) / (clock() - started), statistics.median(took)


def _task_round_trips(
    url: str, loop: asyncio.Runner, caller: Caller | Result, tasks: int, calls: int
) -> float:
    if isinstance(caller, Result):
        return float("nan")
    loop.run(_race(caller, tasks, tasks))
    before = script_calls(url)
    loop.run(_race(caller, tasks, calls))
    return (script_calls(url) - before) / (calls // tasks * tasks)


async def _closed(caller: Caller) -> None:
    closing = caller.close()
    if isinstance(closing, Awaitable):
        await closing


MOST_TASKS = max(TASKS) + 1


async def evalsha_async(url: str) -> Caller:
    """Build the floor."""
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(url, max_connections=MOST_TASKS)
    sha = await client.script_load(GCRA)
    step, period = HOUR * 1_000_000 / LIMIT, HOUR * 1_000_000
    return Caller(lambda key: client.evalsha(sha, 1, f"floor:{key}", step, period), client.aclose)


async def one_script(url: str) -> Caller:
    """Build what batching can bring at best: one call for all tasks that wait, and no more than that."""
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(url)
    sha = await client.script_load(GCRA_OF_ALL)
    step, period = HOUR * 1_000_000 / LIMIT, HOUR * 1_000_000
    waiting: list[tuple[str, asyncio.Future[Any]]] = []
    is_busy = False
    tasks: set[asyncio.Task[None]] = set()

    async def send() -> None:
        nonlocal waiting, is_busy
        while waiting:
            batch, waiting = waiting, []
            if len(batch) >= CROWD and not is_busy:
                batch, waiting = batch[: len(batch) // 2], batch[len(batch) // 2 :]
            is_busy = True
            answers = await client.evalsha(sha, len(batch), *[key for key, _ in batch], step, period)
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)
        is_busy = False

    def hit(key: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append((f"floor:{key}", future))
        if not is_busy and len(waiting) == 1:
            task = asyncio.ensure_future(send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return future

    return Caller(hit, client.aclose)


async def headgate_async(kind: str, url: str) -> Caller:
    """Build ours."""
    from headgate import AsyncLimiter

    limiter = AsyncLimiter(*_rules(kind), name=f"bench {kind}", store=url, on_store_error="raise")
    return Caller(limiter.hit, limiter.aclose)


async def limits_async(kind: str, url: str) -> Caller:
    """Build limits: https://limits.readthedocs.io/en/stable/async.html."""
    from limits import parse
    from limits.aio import strategies
    from limits.aio.storage import RedisStorage

    storage = RedisStorage(f"async+{url}", implementation="redispy", max_connections=MOST_TASKS)
    strategy = getattr(strategies, _LIMITS[kind])(storage)
    return Caller(partial(strategy.hit, parse(_quota(kind))))


async def throttled_async(kind: str, url: str) -> Caller:
    """Build throttled-py; its documentation has the options of the pool."""
    import throttled.asyncio as package

    options = {"CONNECTION_POOL_KWARGS": {"max_connections": MOST_TASKS}}
    return Caller(_throttle(package, kind, url, options).limit)


# https://traffik.readthedocs.io (README, "Redis Backend" and "Strategies"); its default strategy is the fixed window.
async def traffik(url: str) -> Caller:
    """Build traffik."""
    import redis.asyncio
    from traffik.backends.redis import RedisBackend
    from traffik.rates import Rate
    from traffik.strategies import FixedWindowStrategy

    async def connect() -> Any:
        return redis.asyncio.Redis.from_url(url, max_connections=MOST_TASKS)

    backend = RedisBackend(connection=connect, namespace="traffik", persistent=True)
    await backend.initialize()
    strategy, rate = FixedWindowStrategy(), Rate(limit=LIMIT, hours=1)
    return Caller(lambda key: strategy(key, rate, backend), backend.close)


async def pyrate_async(url: str) -> Caller:
    """Build pyrate-limiter: one bucket, so one key."""
    import redis.asyncio
    from pyrate_limiter import Limiter, Rate, RedisBucket

    client = redis.asyncio.Redis.from_url(url, max_connections=MOST_TASKS)
    bucket = await RedisBucket.init([Rate(1000, 1000)], client, "pyrate async")
    return Caller(partial(Limiter(bucket).try_acquire_async, blocking=False), client.aclose)


TASKS_CALLERS: dict[str, Callable[[str], Any]] = {
    FLOOR: evalsha_async,
    ONE_SCRIPT: one_script,
    **{f"{HEADGATE}: {kind}": partial(headgate_async, kind) for kind in (*KINDS, "three rules")},
    **{f"limits: {kind}": partial(limits_async, kind) for kind in _LIMITS},
    **{f"throttled-py: {kind}": partial(throttled_async, kind) for kind in KINDS if kind != "sliding_log"},
    "traffik: fixed_window": traffik,
    "pyrate-limiter: sliding_log": pyrate_async,
}


def _panel(title: str, measured: dict[str, Result]) -> Panel:
    return Panel(title, "/s", [(n, r.median, number(r.median)) for n, r in measured.items() if r.samples])


def main() -> None:
    """Measure, print tables and targets, write JSON and a chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer calls and rounds")
    quick = parser.parse_args().quick
    progress = Progress(STEPS)
    sections = []
    for section in run(QUICK if quick else FULL, progress):
        progress.end()
        print(*section.tables, sep="\n", flush=True)
        sections.append(section)
    targets = [target for section in sections for target in section.targets]
    print(target_table(targets, "Targets (the worst case counts)"))
    name = "redis-quick" if quick else "redis"
    write_json(name, {**{section.name: section.data for section in sections}, "targets": targets})
    panels = [panel for section in sections for panel in section.panels]
    write_chart(name, "Headgate on Redis beside other Python limiters (more is better)", panels, HEADGATE)


if __name__ == "__main__":
    main()
