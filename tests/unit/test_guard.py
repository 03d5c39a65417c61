"""The decorator `guard`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

from headgate import AsyncLimiter, ConfigError, CostTooHigh, Limiter, RateLimited, sliding_window
from headgate.testing import FakeClock
from tests.unit.flavours import done


async def test_a_guarded_function_is_called_only_if_the_units_are_admitted(
    flavour: type[Limiter] | type[AsyncLimiter], clock: FakeClock
) -> None:
    calls = []
    limiter: Any = flavour("2/minute", clock=clock)

    def greet(name: str, *, loud: bool = False) -> str:
        """Say hello."""
        calls.append(name)
        return name.upper() if loud else name

    async def async_greet(name: str, *, loud: bool = False) -> str:
        """Say hello."""
        return greet(name, loud=loud)

    work = async_greet if flavour is AsyncLimiter else greet
    guarded = limiter.guard("ada")(work)
    assert await done(guarded("bob")) == "bob"
    assert await done(guarded("bob", loud=True)) == "BOB"
    with pytest.raises(RateLimited) as caught:
        await done(guarded("cyd"))
    assert caught.value.decision.retry_after == 61.0
    assert calls == ["bob", "bob"]
    assert (guarded.__name__, guarded.__doc__) == (work.__name__, "Say hello.")
    assert inspect.iscoroutinefunction(guarded) is inspect.iscoroutinefunction(work)


def test_key_cost_and_tier_may_be_functions_of_the_arguments(clock: FakeClock) -> None:
    limiter = Limiter(sliding_window("5/minute", tiers={"pro": "50/minute"}), clock=clock)

    @limiter.guard(
        key=lambda user, size: user,
        cost=lambda user, size: size,
        tier=lambda user, size: "pro" if size > 5 else None,
    )
    def upload(user: str, size: int) -> int:
        return size

    assert upload("ada", 5) == 5
    with pytest.raises(RateLimited):
        upload("ada", 1)
    assert upload("ada", size=45) == 45
    assert upload("bob", 3) == 3
    assert limiter.check("bob", 0).remaining == 2


def test_refused_call_costs_nothing_and_function_error_propagates(clock: FakeClock) -> None:
    limiter = Limiter("2/minute", clock=clock)

    @limiter.guard("ada", 2)
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for _ in range(3):
        with pytest.raises(RateLimited):
            fail()
    assert limiter.check("ada", 0).remaining == 0


def test_a_cost_that_can_never_be_admitted_is_an_error(clock: FakeClock) -> None:
    @Limiter("2/minute", clock=clock).guard("ada", 3)
    def work() -> None:
        pytest.fail("it was called")

    with pytest.raises(CostTooHigh):
        work()


def test_methods_can_be_guarded_by_their_instance(clock: FakeClock) -> None:
    limiter = Limiter("1/minute", clock=clock)

    class Account:
        def __init__(self, name: str) -> None:
            self.name = name

        @limiter.guard(key=lambda self: self.name)
        def pay(self) -> str:
            return self.name

    assert Account("ada").pay() == "ada"
    assert Account("bob").pay() == "bob"
    with pytest.raises(RateLimited):
        Account("ada").pay()


def return_number(number: int) -> int:
    return number


def return_same(number: int) -> int:
    return number


async def async_return_number(number: int) -> int:
    return number


async def async_return_same(number: int) -> int:
    return number


PLAIN_WORK = (return_number, return_same)
ASYNC_WORK = (async_return_number, async_return_same)


async def coroutine_function() -> None:
    """Do nothing."""


def plain_function() -> None:
    """Do nothing."""


def test_guard_of_a_coroutine_function_suggests_async_limiter() -> None:
    guard = Limiter("5/minute").guard("ada")
    for function in (coroutine_function, functools.partial(coroutine_function)):
        with pytest.raises(ConfigError, match=r"is a coroutine function; use AsyncLimiter\.guard for it"):
            guard(function)


def test_guard_of_a_plain_function_suggests_limiter() -> None:
    wrong: list[Any] = [plain_function, plain_function.__name__, 5]
    for function in wrong:
        with pytest.raises(ConfigError, match=r"is not a coroutine function; use Limiter\.guard for it"):
            AsyncLimiter("5/minute").guard("ada")(function)


@pytest.mark.parametrize("brackets", [True, False])
async def test_guard_without_a_key_counts_all_calls_of_the_function(
    flavour: type[Limiter] | type[AsyncLimiter], brackets: bool, clock: FakeClock
) -> None:
    limiter: Any = flavour("2/minute", clock=clock)
    guard = limiter.guard() if brackets else limiter.guard
    work, other = map(guard, ASYNC_WORK if flavour is AsyncLimiter else PLAIN_WORK)
    assert [await done(work(5)), await done(work(number=6))] == [5, 6]
    with pytest.raises(RateLimited):
        await done(work(7))
    assert await done(other(8)) == 8, "each function has its count"
    assert work.__wrapped__.__name__.endswith("return_number")


async def test_guard_without_parentheses_needs_no_key_for_a_shared_rule(
    flavour: type[Limiter] | type[AsyncLimiter], clock: FakeClock
) -> None:
    limiter: Any = flavour(sliding_window("1/minute", scope="*"), clock=clock)
    work, other = map(limiter.guard, ASYNC_WORK if flavour is AsyncLimiter else PLAIN_WORK)
    assert await done(work(5)) == 5
    with pytest.raises(RateLimited):
        await done(other(6))


def test_lambda_instead_of_a_function_is_an_error() -> None:
    """Otherwise the lambda would be guarded, and the decorated function would not."""
    for limiter in (Limiter("5/minute"), AsyncLimiter("5/minute")):
        with pytest.raises(ConfigError, match=r"write @limiter\.guard\(key=lambda …\)"):
            limiter.guard(lambda user: user)  # type: ignore[call-overload]
