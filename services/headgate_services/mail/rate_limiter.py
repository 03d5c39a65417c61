"""How many e-mails may leave per rolling minute and hour, all inboxes together.

The counting is Headgate's: one strict sliding window per configured limit, so that no minute and no hour ever holds more
than its limit. Its buckets are a second long, so that a send counts at most a second longer than it must; in an hour on a
shared store, where a state has at most 1,000 entries, they are five seconds long. A window without a limit is
still counted, for the log, as long as the other one has a limit; if neither has, nothing is counted, logged or refused.

It can be used in two forms:

    check(), then record()   for plain code, as long as no one else sends in between
    await hold()             for the service: takes the unit before the provider is asked and gives it back if the provider
                             fails, so that slow and parallel sends cannot pass the limit together

A hold counts from its start, and from its confirmation once it is confirmed. Its send must end by `deadline`, before
the hold leaves the shortest window. Any object with `check()` and `record()` can replace the limiter: `hold_for` builds a
hold from the two.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeGuard

from headgate import (
    AsyncHold,
    AsyncLimiter,
    Decision,
    Hook,
    Limiter,
    MemoryStore,
    Quota,
    Rule,
    StoreError,
    sliding_window,
)
from headgate.clock import Clock
from headgate.quota import MAX_UNITS

logger = logging.getLogger(__name__)

NAME = "mail"
"""The limiter's name in a store that it shares with others."""

BUCKETS_IN_MEMORY = 3600
BUCKETS_ON_SHARED_STORES = 720

LONGEST_SEND = 5 / 6
"""The longest time for a send, as a share of the shortest limited window: 50 seconds of a minute."""


@dataclass(frozen=True, slots=True)
class SendWindow:
    """A rolling window.

    Attributes:
        name: What it is called in answers and log lines.
        seconds: How long it is.
        limit: The most sends in it; 0 for any number.
    """

    name: str
    seconds: int
    limit: int

    def rule(self, most_buckets: int) -> Rule:
        """Return the rule that counts in this window; without a limit, one that never refuses."""
        quota = Quota.of(self.limit or MAX_UNITS, self.seconds)
        return sliding_window(quota, scope="*", name=self.name, buckets=min(self.seconds, most_buckets))


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """What has been counted in a window.

    Attributes:
        name: The window.
        count: Sends in it, those under way included; never shown above the limit.
        limit: The most there may be; `None` for any number.
        retry_after: Whole seconds until it has room, rounded up and at least 1; `None` if it has.
    """

    name: str
    count: int
    limit: int | None
    retry_after: int | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.count}/{'unlimited' if self.limit is None else self.limit}"


@dataclass(frozen=True, slots=True)
class RateLimitResult:
    """Whether one more e-mail may be sent.

    Attributes:
        allowed: Whether it may.
        retry_after: Whole seconds after which it may if nothing else is sent, rounded up and at least 1; of several
            exhausted windows the longest wait. `None` if it may now.
        detail: A sentence that names the exhausted windows; empty if there are none.
        windows: What was counted before this send, one entry per window; empty if nothing is limited.
    """

    allowed: bool
    retry_after: int | None = None
    detail: str = ""
    windows: tuple[WindowUsage, ...] = ()

    def what_is_left(self, charged: int = 0) -> dict[str, str]:
        """Return header fields: the limits, and what is left of each after so many more units; none without limits."""
        limited = [used for used in self.windows if used.limit is not None]
        if not limited:
            return {}
        seconds = {"per-minute": 60, "per-hour": 3600}
        left = {used: max(0, (used.limit or 0) - used.count - charged) for used in limited}
        least = min(limited, key=lambda used: left[used])
        policies = [
            f'"{used.name}";q={used.limit};w={seconds[used.name]}' for used in limited if used.name in seconds
        ]
        return {
            "RateLimit-Policy": ", ".join(policies),
            "RateLimit": ", ".join(
                f'"{used.name}";r={left[used]}' for used in limited if used.name in seconds
            ),
            "X-RateLimit-Limit": str(least.limit),
            "X-RateLimit-Remaining": str(left[least]),
        }


class CheckAndRecord(Protocol):
    """The least that the service asks of a limiter. Both may block; they are called in a thread."""

    def check(self) -> RateLimitResult:
        """Return whether one more e-mail may be sent, and count nothing."""

    def record(self) -> None:
        """Count an e-mail that was sent."""


class SendHold(Protocol):
    """A send that may be under way: confirm it if the provider took the e-mail, release it if not."""

    @property
    def result(self) -> RateLimitResult:
        """Whether it may be sent at all; if not, there is nothing to confirm or release."""

    @property
    def deadline(self) -> float | None:
        """The event loop's time by which the send must end; `None` for no limit."""

    async def confirm(self) -> None:
        """Let the send count."""

    async def release(self) -> None:
        """Let the send not count."""


class GlobalRateLimiter:
    """Limits outbound e-mails per rolling minute and hour.

    Args:
        per_minute: The most in any 60 seconds; 0 for any number.
        per_hour: The most in any 3,600 seconds; 0 for any number.
        store: Where to count, as a URL; by default in this process.
        clock: Where time comes from, instead of the store's own clock.
        more: Further windows, enforced like the two.
        hooks: Called for each decision of `hold`.

    `check` and `record` may be called from any thread; with a store other than memory they wait for it. `hold` and `usage`
    never block the event loop.

    Raises:
        ConfigError: A limit is negative, or the store's URL is not known.
        StoreError: The store cannot be opened.
    """

    def __init__(
        self,
        per_minute: int = 0,
        per_hour: int = 0,
        *,
        store: str = "memory://",
        clock: Clock | None = None,
        more: Iterable[SendWindow] = (),
        hooks: Iterable[Hook] = (),
    ) -> None:
        windows = (SendWindow("per-minute", 60, per_minute), SendWindow("per-hour", 3600, per_hour), *more)
        self._windows = windows if any(window.limit for window in windows) else ()
        in_memory = not self._windows or store.startswith("memory:")
        most_buckets = BUCKETS_IN_MEMORY if in_memory else BUCKETS_ON_SHARED_STORES
        self._rules = tuple(window.rule(most_buckets) for window in self._windows)
        limited = [window.seconds for window in windows if window.limit]
        self._longest_send = min(limited) * LONGEST_SEND if limited else None
        self._store: MemoryStore | str = MemoryStore(clock=clock) if in_memory else store
        self._clock = None if in_memory else clock
        self._async = AsyncLimiter(
            *self._rules,
            name=NAME,
            store=self._store,
            clock=self._clock,
            on_store_error="raise",
            hooks=hooks,
        )

    @cached_property
    def _sync(self) -> Limiter:
        """The same counts for threads; opened when first asked, since the service itself has no use for it."""
        return Limiter(*self._rules, name=NAME, store=self._store, clock=self._clock, on_store_error="raise")

    def check(self) -> RateLimitResult:
        """Return whether one more e-mail may be sent, and count nothing."""
        return self._logged(self._result(self._sync.check()))

    def record(self) -> None:
        """Count an e-mail that was sent."""
        self._sync.record()
        if self._windows and logger.isEnabledFor(logging.DEBUG):
            _log_recorded(self._usage(self._sync.check(cost=0), charged=0))

    async def hold(self) -> SendHold:
        """Count one e-mail now, if there is room for it, until it is known whether it could be sent."""
        now = asyncio.get_running_loop().time()
        deadline = None if self._longest_send is None else now + self._longest_send
        hold = await self._async.hold()
        return _LimiterHold(self._logged(self._result(hold.decision)), deadline, hold, self._async)

    async def usage(self) -> RateLimitResult:
        """Return what `check` would, without a line in the log."""
        return self._result(await self._async.check())

    async def ping(self) -> None:
        """Ask the store whether it can count; raises as `AsyncLimiter.ping`."""
        await self._async.ping()

    async def reset(self) -> None:
        """Forget what was counted."""
        await self._async.reset()

    async def aclose(self) -> None:
        """Close the store."""
        await self._async.aclose()
        if "_sync" in vars(self):
            await asyncio.to_thread(self._sync.close)

    def _result(self, decision: Decision) -> RateLimitResult:
        windows = self._usage(decision, charged=1 if decision.allowed else 0)
        exhausted = [window for window in windows if window.retry_after is not None]
        parts = "; ".join(f"{used.name} limit reached ({used.count}/{used.limit})" for used in exhausted)
        return RateLimitResult(
            decision.allowed,
            max((used.retry_after or 0 for used in exhausted), default=None),
            f"Rate limit exceeded: {parts}" if exhausted else "",
            windows,
        )

    def _usage(self, decision: Decision, charged: int) -> tuple[WindowUsage, ...]:
        """Return the counts of a decision without the units that it charged, or would have."""
        return tuple(
            WindowUsage(
                window.name,
                result.limit - result.remaining - charged,
                window.limit or None,
                None if result.retry_after is None else max(1, math.ceil(result.retry_after)),
            )
            for window, result in zip(self._windows, decision.results, strict=True)
        )

    def _logged(self, result: RateLimitResult) -> RateLimitResult:
        if not self._windows:
            return result
        if result.allowed:
            logger.debug("Rate limit check passed: %s", _listed(result.windows))
        else:
            log_refused(result)
        return result


async def hold_for(limiter: CheckAndRecord) -> SendHold:
    """Return a hold of this limiter for one e-mail; of one that has no holds, a check now and a record later."""
    if _has_holds(limiter):
        return await limiter.hold()
    result = await asyncio.to_thread(limiter.check)
    if not result.allowed:
        log_refused(result)
    return _CheckedHold(result, limiter)


async def usage_of(limiter: CheckAndRecord) -> RateLimitResult:
    """Return what a limiter would answer now, counting nothing."""
    if _has_holds(limiter):
        return await limiter.usage()
    return await asyncio.to_thread(limiter.check)


def _has_holds(limiter: CheckAndRecord) -> TypeGuard[GlobalRateLimiter]:
    """Tell ours from others by the type: a mock has every attribute, and one with a spec even passes `isinstance`."""
    return issubclass(type(limiter), GlobalRateLimiter)


@dataclass(frozen=True, slots=True)
class _LimiterHold:
    """A unit taken from the store."""

    result: RateLimitResult
    deadline: float | None
    _hold: AsyncHold = field(repr=False)
    _limiter: AsyncLimiter = field(repr=False)

    async def confirm(self) -> None:
        """Let the send count from now on: the provider had it only now, however long that took."""
        if not await self._hold.confirm():
            # The clock jumped beyond the window, and other sends took the place. This one was sent all the same.
            await self._hold.settle(self._hold.cost)
            await self._limiter.record()
        if self.result.windows:
            _log_recorded(
                tuple(WindowUsage(used.name, used.count + 1, used.limit) for used in self.result.windows)
            )

    async def release(self) -> None:
        try:
            await self._hold.release()
        except StoreError as error:  # only the budget is affected, and only until the unit expires
            logger.warning("A send that failed stays counted until it leaves the windows: %s", error)


@dataclass(frozen=True, slots=True)
class _CheckedHold:
    """A look before, and a record after: between the two others may pass."""

    result: RateLimitResult
    _limiter: CheckAndRecord
    deadline: float | None = None

    async def confirm(self) -> None:
        await asyncio.to_thread(self._limiter.record)

    async def release(self) -> None:
        """Nothing was counted."""


def log_refused(result: RateLimitResult) -> None:
    """Write the one line about a refused send."""
    logger.warning("%s; retry after %s s", result.detail or "Rate limit exceeded", result.retry_after)


def _log_recorded(windows: Iterable[WindowUsage]) -> None:
    logger.debug("Send recorded: %s", _listed(windows))


def _listed(windows: Iterable[WindowUsage]) -> str:
    return ", ".join(str(window) for window in windows)
