"""Typical user code, checked by mypy and never run: what people write must type-check as they would expect."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Decision,
    HeadgateError,
    Limiter,
    Quota,
    RateLimited,
    StoreError,
    StoreUnavailable,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.http import Headers
from headgate.http.flask import limit as view_limit
from headgate.http.wsgi import App, RateLimitMiddleware
from headgate.testing import FakeClock


def call_llm(prompt: str) -> int:
    return len(prompt)


# --- Rules and limiters

limiter = Limiter("5/minute", "50/hour")
one_text = Limiter("5/minute; 50/hour")
unlimited = Limiter()
several = AsyncLimiter(
    sliding_window("10/hour", scope="user", tiers={"pro": "100/hour"}),
    token_bucket("1000/minute", burst=200, scope="realm"),
    sliding_window("100000/day", scope="*"),
    name="submit",
    store="redis://localhost",
)
every_kind = Limiter(
    fixed_window("100/s", name="spike"),
    sliding_window(Quota.of(10, timedelta(hours=1)), buckets=12, strict=False),
    sliding_log("3/minute"),
    token_bucket("10/s burst 20"),
    clock=FakeClock(),
)


# --- Decisions

decision: Decision = limiter.hit("alice")
if not (decision := limiter.hit("alice", cost=3)):
    wait: float | None = decision.retry_after
    refused_by: str | None = decision.denied_by
allowed: bool = decision.allowed
limit: int | None = decision.limit
remaining: int | None = decision.remaining
reset_after: float | None = decision.reset_after
degraded: bool = decision.degraded
names: list[str] = [result.name for result in decision.results]
least: int = min(result.remaining for result in decision.results)
admitted: Decision = decision.raise_if_denied()
bytes_key: Decision = limiter.hit(b"\x00\x01", now=1_700_000_000.5)
looked: Decision = limiter.check("alice")
is_counted: bool = not limiter.record("alice", cost=2).degraded
limiter.reset("alice")
waited: Decision = limiter.wait("alice", timeout=5)


# --- Holds

with limiter.hold("alice", cost=100) as hold:
    hold.settle(call_llm("hello"))

taken = limiter.hold("alice", timeout=5)
if taken:
    taken.release()
held: Decision = taken.decision


# --- Guards: the decorated function keeps its signature


@limiter.guard(key="everybody")
def report(month: int, *, detailed: bool = False) -> str:
    return f"{month} {detailed}"


@limiter.guard(key=lambda user, text: user)
def post(user: str, text: str) -> int:
    return len(user + text)


@limiter.guard
def count(words: list[str]) -> int:
    return len(words)


words: int = count(["a", "b"])
text: str = report(3, detailed=True)
size: int = post("alice", "hello")
report("march")  # type: ignore[arg-type]
report(3, verbose=True)  # type: ignore[call-arg]


# --- The asynchronous side has the same names


async def submit() -> None:
    decision: Decision = await several.hit({"user": "42", "realm": "north"}, tier="pro")
    decision = await several.check({"user": "42", "realm": "north"})
    decision = await several.record({"user": "42", "realm": "north"})
    decision = await several.wait({"user": "42", "realm": "north"}, timeout=5)
    async with several.hold({"user": "42", "realm": "north"}, cost=10) as hold:
        await hold.settle(7)
    await several.reset({"user": "42", "realm": "north"})
    decision.raise_if_denied()


async def forgotten() -> None:
    """A missing `await` is an error at run time and for type checkers; `truthy-bool` must be enabled in mypy."""
    if several.hit("alice"):  # type: ignore[truthy-bool]
        print("admitted")
    if not several.check("alice"):  # type: ignore[truthy-bool]
        print("refused")
    while several.wait("alice"):  # type: ignore[truthy-bool]
        print("admitted")
    several.hit("alice")  # type: ignore[unused-coroutine]
    following: str = 5  # type: ignore[assignment]
    print(following)


@several.guard(key={"user": "42", "realm": "north"})
async def fetch(url: str) -> bytes:
    return url.encode()


@several.guard
async def load(number: int) -> str:
    return str(number)


async def main() -> None:
    loaded: str = await load(5)
    print(loaded)
    with several.hold("alice"):  # type: ignore[attr-defined]
        pass
    body: bytes = await fetch("https://example.org")
    print(body)
    async with AsyncLimiter("5/minute") as short_lived:
        await short_lived.hit("alice")


# --- HTTP


def limited(app: App) -> App:
    per_view = view_limit("5/minute", headers=Headers(x_ratelimit="seconds", ratelimit=7))
    print(per_view)
    RateLimitMiddleware(app, "5/minute", headers="draft-7")  # type: ignore[arg-type]
    Headers(ratelimit=5)  # type: ignore[arg-type]
    return RateLimitMiddleware(app, "5/minute", headers="ietf")


# --- Closing and errors

with Limiter("5/minute", name="jobs", store="sqlite:///limits.db") as closing:
    try:
        closing.hit("alice").raise_if_denied()
    except RateLimited as refusal:
        print(refusal.decision.retry_after)
    except CostTooHigh as too_high:
        print(too_high.capacity - too_high.cost)
    except ConfigError as wrong:
        print(wrong)
    except StoreUnavailable as down:
        unavailable: StoreError = down
    except HeadgateError:
        raise


# --- What must not type-check

limiter.hit(42)  # type: ignore[arg-type]
limiter.hit("alice", cost=1.5)  # type: ignore[arg-type]
sliding_window("5/minute", burst=3)  # type: ignore[call-arg]
Limiter("5/minute", burst=3)  # type: ignore[arg-type]
decision.allowed = True  # type: ignore[misc]

# --- Units, moved holds, places, calendars, quotas from data

model = Limiter(
    sliding_window("60/minute"),
    token_bucket("100000/minute", unit="tokens"),
    concurrent(5, lease="60s", tiers={"pro": 20}),
    calendar("10000/month", timezone="Europe/Berlin"),
    quotas=lambda key, tier: {"per-minute": "90/minute"} if tier == "pro" else None,
)
with model.hold("alice", {"tokens": 800}) as metered:
    renewed: Decision = metered.renew()
    standing: Mapping[str, int] = metered.settle({"tokens": 312})
    whole: int = metered.settle(3)
confirmed: Decision = model.hold("alice", 2).confirm({"tokens": 5})
model.check("alice", quota={"calendar-month": "20000/month", "concurrent": 9})
calendar(5)  # type: ignore[arg-type]
concurrent(5)  # type: ignore[call-arg]
