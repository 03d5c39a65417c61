"""Typical first mistakes, and messages that say what to write instead."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from headgate import AsyncLimiter, ConfigError, Limiter, concurrent, sliding_window
from headgate.policy import LivePolicy, parse_policy
from tests.unit.flavours import done

Flavour = type[Limiter] | type[AsyncLimiter]

MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "burst of a limiter": (
        lambda flavour: flavour("10/s", burst=20),
        r"burst= belongs to a rule: write \w+\(token_bucket\('10/s', burst=20\)\) or \w+\('10/s burst 20'\)",
    ),
    "scope of a limiter": (lambda flavour: flavour("10/s", scope="*"), r"sliding_window\('10/s', scope=…\)"),
    "places without a lease": (lambda flavour: concurrent(2), r"as in concurrent\(5, lease='60s'\)"),  # type: ignore[call-arg]
    "tuple as a key": (lambda flavour: flavour("1/s").hit(("ada", 5)), "write one text, like 'ada:5'"),
    "quota function of the key alone": (
        lambda flavour: flavour("1/s", quotas=lambda key: None),
        r"like `def quotas\(key, tier\)`; .* too many positional arguments",
    ),
    "quota that is no function": (
        lambda flavour: flavour("1/s", quotas="5/s"),
        "quotas= is a function of key and tier",
    ),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
async def test_error_says_what_to_write(
    flavour: Flavour, mistake: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await done(mistake(flavour))


def test_unknown_option_is_a_type_error(flavour: Flavour) -> None:
    with pytest.raises(
        TypeError, match=rf"{flavour.__name__}\(\) got an unexpected keyword argument 'colour'"
    ):
        flavour("5/s", colour="red")  # type: ignore[arg-type]


async def test_with_on_an_async_hold_suggests_async_with() -> None:
    limiter: Any = AsyncLimiter("5/s")
    for hold in (limiter.hold("ada"), await limiter.hold("ada")):
        with pytest.raises(TypeError, match=r"write `async with limiter\.hold"), hold:
            pass


async def test_async_with_on_a_plain_hold_suggests_the_async_limiter() -> None:
    hold: Any = Limiter("5/s").hold("ada")
    with pytest.raises(TypeError, match="use an AsyncLimiter for `async with`"):
        async with hold:
            pass


async def all_done(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        await done(call())


def tiered(flavour: Flavour, **options: Any) -> Any:
    return flavour(sliding_window("5/s", tiers={"pro": "50/s"}), **options)


@pytest.mark.parametrize("method", ["hit", "check", "record", "hold", "wait"])
async def test_unknown_tier_warns_once(flavour: Flavour, method: str) -> None:
    limiter = tiered(flavour, name="login")
    calls = [functools.partial(getattr(limiter, method), "ada", tier="prp") for _ in range(3)]
    with pytest.warns(UserWarning, match="'login' has no tier 'prp', its tiers are 'pro': add it") as found:
        await all_done(calls)
    assert len(found) == 1


@pytest.mark.parametrize("method", ["hit", "check", "record", "hold", "wait"])
async def test_unknown_tier_is_an_error_with_strict_tiers(flavour: Flavour, method: str) -> None:
    limiter = tiered(flavour, strict_tiers=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no tier 'prp'"):
            await done(getattr(limiter, method)("ada", tier="prp"))
    assert await done(limiter.hit("ada", tier="pro"))
    assert await done(limiter.hit("ada"))


async def test_tier_of_a_limiter_without_tiers_is_an_error_only_with_strict_tiers(flavour: Flavour) -> None:
    assert await done(flavour("5/s").hit("ada", tier="pro"))
    with pytest.raises(ConfigError, match="no tier 'pro', no rule has tiers=: add it, or pass tier=None"):
        await done(flavour("5/s", strict_tiers=True).hit("ada", tier="pro"))


async def test_tiers_for_a_quota_function_and_without_rules_are_not_reported(flavour: Flavour) -> None:
    rule = sliding_window("5/s", tiers={"pro": "50/s"})
    assert await done(flavour(rule, quotas=lambda key, tier: None).hit("ada", tier="any"))
    assert await done(flavour(strict_tiers=True).hit("ada", tier="any"))


@pytest.mark.parametrize("default", ["", 'default_tier = "pro"\n'])
def test_unknown_tier_of_a_policy_warns_unless_there_is_a_default_tier(default: str) -> None:
    rule = '{ quota = "5/s", tiers = { pro = "50/s" } }'
    policy = parse_policy(f"[limiters.login]\n{default}rules = [{rule}]\n")
    with LivePolicy(policy) as live, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        live["login"].hit("ada", tier="prp")
    assert len(found) == (0 if default else 1)
