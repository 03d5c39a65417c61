"""An invalid argument raises the same error in every limiter and operation, and nothing is counted."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headgate import AsyncLimiter, ConfigError, Limiter, fixed_window, sliding_window, token_bucket
from headgate.policy import AsyncLivePolicy, LivePolicy
from tests.unit.flavours import AnyLimiter, done

RULES: dict[str, tuple[Any, ...]] = {
    "one rule": ("5/minute",),
    "one bucket": (token_bucket("5/minute"),),
    "two rules": ("5/minute", fixed_window("50/hour")),
    "tiers": (sliding_window("5/minute", tiers={"pro": "50/minute"}),),
    "a shared rule besides": ("5/minute", fixed_window("50/hour", scope="*")),
    "scopes": (sliding_window("5/minute", scope="user"), token_bucket("50/hour", scope="ip")),
}

POLICIES = {
    "a policy": """
        [limiters.x]
        rules = ["5/minute"]
        """,
    "a policy with overrides": """
        [limiters.x]
        rules = [{ quota = "5/minute", name = "own" }]
        [[limiters.x.overrides]]
        key = "bob"
        rules = { own = "9/minute" }
        """,
    "a policy with a shadow rule": """
        [limiters.x]
        rules = ["5/minute", { quota = "3/minute", name = "tight", shadow = true }]
        """,
    "a policy with scopes": """
        [limiters.x]
        rules = [
            { quota = "5/minute", scope = "user", name = "own" },
            { quota = "50/hour", scope = "ip", kind = "token_bucket" },
        ]
        [[limiters.x.overrides]]
        key = { user = "bob" }
        rules = { own = "9/minute" }
        """,
}


@pytest.fixture(params=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture(params=[*RULES, *POLICIES])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def limiter(shape: str, is_async: bool, tmp_path: Path) -> AnyLimiter:
    if shape in RULES:
        return (AsyncLimiter if is_async else Limiter)(*RULES[shape])
    path = tmp_path / "headgate.toml"
    path.write_text(POLICIES[shape])
    return (AsyncLivePolicy if is_async else LivePolicy).from_file(path)["x"]


@pytest.fixture
def good_key(shape: str) -> Any:
    return {"user": "ada", "ip": "::1"} if "scopes" in shape else "ada"


async def errors_of(limiter: AnyLimiter, *args: Any, **kwargs: Any) -> set[tuple[type, str]]:
    """Return the errors of all operations that charge or check, and assert that nothing is counted."""
    errors = set()
    for call in (limiter.hit, limiter.check, limiter.record, limiter.hold):
        with pytest.raises((ConfigError, TypeError)) as caught:
            await done(call(*args, **kwargs))
        errors.add((caught.type, str(caught.value)))
    assert len(limiter.store) == 0  # type: ignore[arg-type]  # a memory store
    return errors


WRONG_KEYS: list[Any] = [
    *(["ada"], {"ada"}, 5, 5.0, None, ("ada",)),
    *({"user": "ada"}, {"user": 5, "ip": "::1"}, {}),
]
WRONG_ENTRIES: list[Any] = [
    {"user": ["ada"], "ip": "::1"},
    {"user": None, "ip": "::1"},
    {"user": "ada", "ip": "::1", "realm": "north"},
    {"user": "ada", "realm": "north"},
]


async def test_invalid_keys_are_refused(limiter: AnyLimiter, shape: str) -> None:
    twin = Limiter(*RULES["scopes" if "scopes" in shape else "one rule"])
    for key in [*WRONG_KEYS, *(WRONG_ENTRIES if "scopes" in shape else [])]:
        errors = await errors_of(limiter, key)
        for call in (limiter.reset, limiter.wait):
            with pytest.raises(ConfigError) as caught:
                await done(call(key))
            errors.add((caught.type, str(caught.value)))
        with pytest.raises(ConfigError) as caught:
            twin.hit(key)
        assert errors == {(ConfigError, str(caught.value))}


async def test_invalid_costs_are_refused(limiter: AnyLimiter, good_key: Any) -> None:
    costs = [True, False, 1.0, -1, 2**60, 2**53, "1", None, [1]]
    for cost in costs:
        message = f"a cost is a whole number from 0 to {2**53 - 1}, not {cost!r}"
        assert await errors_of(limiter, good_key, cost) == {(ConfigError, message)}
    hold = await done(limiter.hold(good_key))
    for cost in costs:
        with pytest.raises(ConfigError, match="a cost is a whole number"):
            await done(hold.settle(cost))
    assert await done(hold.release()) == 0


async def test_invalid_times_are_refused(limiter: AnyLimiter, good_key: Any) -> None:
    for now in (float("nan"), float("inf"), -1, -0.001, 1e12, True, "1"):
        [(kind, message)] = await errors_of(limiter, good_key, now=now)
        assert kind is ConfigError
        assert message.startswith("now= is seconds since the epoch")
        assert repr(now) in message


async def test_tier_must_be_text(limiter: AnyLimiter, good_key: Any) -> None:
    tiers: list[Any] = [5, b"pro", ["pro"], {"pro"}, object]
    for tier, cost in product(tiers, (1, 9)):
        assert await errors_of(limiter, good_key, cost, tier=tier) == {
            (ConfigError, f"a tier is text, not {tier!r}")
        }
        with pytest.raises(ConfigError, match="a tier is text"):
            await done(limiter.wait(good_key, tier=tier))


async def test_tier_and_now_are_keyword_only(limiter: AnyLimiter, good_key: Any) -> None:
    errors = await errors_of(limiter, good_key, 1, "pro")
    assert {kind for kind, _ in errors} == {TypeError}
    with pytest.raises(TypeError):
        await done(limiter.wait(good_key, 1, "pro"))  # type: ignore[misc]


async def test_unknown_argument_is_a_type_error(limiter: AnyLimiter, good_key: Any) -> None:
    errors = await errors_of(limiter, good_key, level="pro")
    assert {kind for kind, _ in errors} == {TypeError}


async def test_valid_arguments_are_accepted(limiter: AnyLimiter, good_key: Any) -> None:
    """Otherwise the tests above would prove nothing."""
    assert await done(limiter.hit(good_key, 1, tier="pro", now=1_000.0))
    assert len(limiter.store) > 0  # type: ignore[arg-type]  # a memory store
