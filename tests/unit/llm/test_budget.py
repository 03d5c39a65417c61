"""Budgets: what a call holds, how it is settled, and how reports of the provider correct the limiter."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Limiter,
    RateLimited,
    SQLiteStore,
    calendar,
    concurrent,
    penalty,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.llm import AsyncBudget, Budget, Price, Usage
from headgate.testing import FakeClock

PRICES = {"m": Price(1, 10)}
ESTIMATE = Usage(100, 400)


def rules() -> tuple[Any, ...]:
    return (
        sliding_window("60/minute", name="requests"),
        sliding_window("10000/minute", unit="tokens", name="tokens"),
        sliding_window("6000/minute", unit="input_tokens", name="input"),
        sliding_window("4000/minute", unit="output_tokens", name="output"),
        calendar("1000000/day", unit="microdollars", timezone="UTC", name="money"),
        concurrent(5, lease="10m", name="in flight"),
    )


def used(limiter: Limiter | AsyncLimiter, decision: Any) -> dict[str, int]:
    return {result.name: result.limit - result.remaining for result in decision.results}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def limiter(clock: FakeClock) -> Limiter:
    return Limiter(*rules(), clock=clock)


def costs(requests: int, given: int, output: int, places: int = 0) -> dict[str, int]:
    return {
        "requests": requests,
        "tokens": given + output,
        "input": given,
        "output": output,
        "money": given + 10 * output,
        "in flight": places,
    }


def test_call_holds_its_estimate_and_settles_at_its_usage(limiter: Limiter) -> None:
    with Budget(limiter, prices=PRICES).call("m", ESTIMATE) as call:
        assert used(limiter, limiter.check("m", 0)) == costs(1, 100, 400, 1)
        call.settle({"prompt_tokens": 90, "completion_tokens": 30})
        call.settle({"prompt_tokens": 90, "completion_tokens": 600})
    assert used(limiter, limiter.check("m", 0)) == costs(1, 90, 600)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (None, costs(1, 100, 400)),
        (ValueError, costs(1, 0, 0)),
        (TimeoutError, costs(1, 100, 400)),
        (KeyboardInterrupt, costs(1, 100, 400)),
    ],
)
def test_call_without_usage_is_settled_by_its_outcome(
    limiter: Limiter, failure: type[BaseException] | None, expected: dict[str, int]
) -> None:
    def work() -> None:
        with Budget(limiter, prices=PRICES).call("m", ESTIMATE):
            if failure:
                raise failure

    if failure:
        with pytest.raises(failure):
            work()
    else:
        work()
    assert used(limiter, limiter.check("m", 0)) == expected


def test_released_call_costs_nothing(limiter: Limiter) -> None:
    with Budget(limiter, prices=PRICES).call("m", ESTIMATE) as call:
        call.release()
    assert used(limiter, limiter.check("m", 0)) == costs(0, 0, 0)


def test_usage_counts_after_an_exception(limiter: Limiter) -> None:
    def work() -> None:
        with Budget(limiter, prices=PRICES).call("m", ESTIMATE) as call:
            call.settle(Usage(90, 30))
            raise LookupError

    with pytest.raises(LookupError):
        work()
    assert used(limiter, limiter.check("m", 0)) == costs(1, 90, 30)


async def test_cancelled_stream_is_settled_at_its_progress(clock: FakeClock) -> None:
    limiter = AsyncLimiter(*rules(), clock=clock)
    budget = AsyncBudget(limiter, prices=PRICES)
    started = asyncio.Event()

    async def stream() -> None:
        async with budget.call("m", ESTIMATE) as call:
            call.progress(7)
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(stream())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert used(limiter, await limiter.check("m", 0)) == costs(1, 100, 7)


async def test_abandoned_generator_is_settled_at_its_progress(clock: FakeClock) -> None:
    limiter = AsyncLimiter(*rules(), clock=clock)
    budget = AsyncBudget(limiter, prices=PRICES)

    async def stream() -> Any:
        async with budget.call("m", ESTIMATE) as call:
            for number in range(1, 10):
                call.progress(number)
                yield number

    async for number in stream():
        if number == 3:
            break
    gc.collect()
    for _ in range(10):  # the event loop closes the generator and settles the call
        await asyncio.sleep(0)
    assert used(limiter, await limiter.check("m", 0)) == costs(1, 100, 3)


def test_call_waits_until_its_estimate_fits(clock: FakeClock) -> None:
    limiter = Limiter(sliding_log("1000/minute", unit="tokens"), clock=clock)
    budget = Budget(limiter)
    with budget.call("m", Usage(100, 800)) as call:
        call.settle(Usage(100, 800))
    started = clock.now
    with budget.call("m", Usage(100, 800)):
        assert clock.now - started == 60
    with pytest.raises(RateLimited), budget.call("m", Usage(100, 800), timeout=30):
        pass
    with pytest.raises(CostTooHigh), budget.call("m", Usage(100, 2000)):
        pass


def test_key_and_mistakes_in_arguments(limiter: Limiter) -> None:
    with Budget(limiter, prices={"m-2": PRICES["m"]}, key=lambda model: model.partition("-")[0]).call(
        "m-2", ESTIMATE
    ):
        assert used(limiter, limiter.check("m", 0))["requests"] == 1
    with pytest.raises(ConfigError, match=r"^a rule counts microdollars: add prices="):
        Budget(limiter)
    with pytest.raises(ConfigError, match=r"^model 'x' has no price: add it to prices=, which has 'm'$"):
        Budget(limiter, prices=PRICES).call("x", ESTIMATE).__enter__()
    with pytest.raises(
        ConfigError, match=r"^a budget counts 'input_tokens', .*, not 'bytes'; change unit= of the rule$"
    ):
        Budget(Limiter(sliding_window("1/s", unit="bytes")))
    with pytest.raises(ConfigError, match=r"^limiter is a Limiter, not "):
        Budget(AsyncLimiter("1/s"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^estimated= is a Usage or the request, not 800$"):
        Budget(limiter, prices=PRICES).call("m", 800)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^max_wait must be a number of seconds from 0, not None$"):
        Budget(limiter, prices=PRICES, max_wait=None)  # type: ignore[arg-type]


def test_answer_is_not_lost_if_the_store_fails_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SQLiteStore(tmp_path / "limits.db")
    limiter = Limiter(*rules(), name="budget", store=store)
    with Budget(limiter, prices=PRICES).call("m", ESTIMATE) as call:
        call.settle(Usage(1, 1))
        store.close()
        call.report({"x-ratelimit-remaining-tokens": "1"})
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a budget was not corrected by what the provider reported",
        "a call was not settled at {'requests'",
    ]


# --- Corrections by reports ------------------------------------------------------------------------------------------


def reported(tokens: int) -> dict[str, str]:
    return {"x-ratelimit-remaining-tokens": str(tokens), "x-ratelimit-limit-tokens": "1000"}


KINDS = [sliding_window, sliding_log, token_bucket]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def shared(request: pytest.FixtureRequest, clock: FakeClock) -> Limiter:
    return Limiter(
        request.param("1000/minute", unit="tokens", name="minute"),
        sliding_window("50000/day", unit="tokens", name="day"),
        concurrent(9, lease="10m"),
        clock=clock,
    )


def remaining(limiter: Limiter) -> list[int]:
    return [result.remaining for result in limiter.check("m", 0).results][:2]


def test_report_lowers_the_remaining_units_of_the_shortest_rule(shared: Limiter) -> None:
    with Budget(shared).call("m", Usage(100)) as call:
        call.report(reported(300))
        assert remaining(shared) == [300, 49_900]
        call.report(reported(300))
        assert remaining(shared) == [300, 49_900]
        call.settle(Usage(40))
    assert remaining(shared) == [360, 49_960]


def test_report_never_raises_the_remaining_units(shared: Limiter) -> None:
    with Budget(shared).call("m", Usage(100)) as call:
        call.report(reported(990))
        call.report(reported(900))
        call.report({"x-ratelimit-remaining-requests": "1"})
        assert remaining(shared) == [900, 49_900]


def test_processes_with_the_same_report_correct_once(shared: Limiter) -> None:
    """Each budget stands for a process; they share the limiter."""
    with Budget(shared).call("m", Usage(100)) as first, Budget(shared).call("m", Usage(100)) as second:
        first.report(reported(300))
        second.report(reported(300))
        assert remaining(shared)[0] == 300


def test_correction_gives_way_to_a_correction_since_its_check(clock: FakeClock) -> None:
    """Another process sees the same report, and corrects between the two steps of the first."""
    shared = Limiter(sliding_window("1000/minute", unit="tokens"), clock=clock)
    budget, other = Budget(shared), Budget(shared)
    with budget.call("m", Usage(100)) as call, other.call("m", Usage(100)) as second:
        steps = budget.correct(call, reported(300))
        checked = next(steps)
        second.report(reported(300))
        refused = steps.send(checked)
        assert not refused[0].allowed
        assert shared.check("m", 0).remaining == 300


def test_refused_correction_begins_no_penalty(clock: FakeClock) -> None:
    shared = Limiter(sliding_window("1000/minute", unit="tokens"), penalty("1h", after=1), clock=clock)
    budget, other = Budget(shared), Budget(shared)
    with budget.call("m", Usage(100)) as call, other.call("m", Usage(100)) as second:
        steps = budget.correct(call, reported(300))
        checked = next(steps)
        second.report(reported(300))
        assert not steps.send(checked)[0].allowed
    assert shared.hit("m")


def test_old_report_does_not_count_against_units_that_came_back_since(shared: Limiter) -> None:
    """The figure may be as old as the call: others have settled in the meantime, and the provider has counted that."""
    budget = Budget(shared)
    with budget.call("m", Usage(700)) as first, budget.call("m", Usage(100)) as second:
        first.settle(Usage(0))
        first.__exit__(None, None, None)
        second.report(reported(200))
        assert remaining(shared)[0] == 900


def test_own_correction_is_not_repeated_for_older_calls(shared: Limiter) -> None:
    budget = Budget(shared)
    with budget.call("m", Usage(100)) as first, budget.call("m", Usage(100)) as second:
        second.report(reported(300))
        with budget.call("m", Usage(100)) as third:
            third.settle(Usage(0))
        first.report(reported(300))
        assert remaining(shared)[0] == 300


@pytest.mark.parametrize(("left", "surcharge"), [(1000, 0), (100, 0), (75, 25), (50, 50), (0, 100)])
def test_call_costs_up_to_twice_as_much_when_others_use_the_reserve(
    clock: FakeClock, left: int, surcharge: int
) -> None:
    """The budget is used up, so that no remaining unit shows that the provider has fewer of them."""
    bucket = token_bucket("1000/minute", burst=800, unit="tokens")
    shared, unreported = Limiter(bucket, clock=clock), Limiter(bucket, clock=clock)
    for limiter, headers in ((shared, reported(left)), (unreported, {})):
        assert limiter.hit("m", {"tokens": 700})
        with Budget(limiter).call("m", Usage(100)) as call:
            call.report(headers)
            call.settle(Usage(100))
    clock.advance(12)
    assert unreported.check("m", 0).remaining - shared.check("m", 0).remaining == surcharge


def test_report_does_not_correct_rules_of_a_day(clock: FakeClock) -> None:
    limiter = Limiter(sliding_window("50000/day", unit="tokens"), clock=clock)
    with Budget(limiter).call("m", Usage(100)) as call:
        call.report(reported(300))
    assert limiter.check("m", 0).remaining == 49_900
