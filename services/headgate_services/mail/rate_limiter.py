"""The send limit: e-mails per rolling minute and hour, for all inboxes together.

Each limit is a strict sliding window of Headgate, so no minute and no hour contains more sends than its limit. Buckets are
one second long; in the hour on a shared store, where a state has at most 1,000 entries, they are five seconds long. If only
one window has a limit, the other one is still counted for the log; without any limit, nothing is counted or logged.

There are two ways to use it:

    check(), then record()   for code that sends one e-mail at a time
    await hold()             for the service: charge the unit before the provider is called, and release it if the provider
                             fails, so that slow and concurrent sends cannot exceed the limit

A hold counts from its start; once confirmed, from its confirmation. The send must end by `deadline`, before the hold leaves
the shortest window. Any object with `check()` and `record()` can replace the limiter; `hold_for` then uses these two.
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
"""The name of the limiter in a shared store."""

BUCKETS_IN_MEMORY = 3600
BUCKETS_ON_SHARED_STORES = 720

LONGEST_SEND = 5 / 6
"""The time limit of a send, as a share of the shortest limited window: 50 seconds of a minute."""


@dataclass(frozen=True, slots=True)
class SendWindow:
    """A rolling window.

    Attributes:
        name: The name in responses and log lines.
        seconds: The length of the window.
        limit: The most sends in the window; 0 for unlimited.
    """

    name: str
    seconds: int
    limit: int

    def rule(self, most_buckets: int) -> Rule:
        """Return the rule of this window; without a limit, a rule that never refuses."""
        quota = Quota.of(self.limit or MAX_UNITS, self.seconds)
        return sliding_window(quota, scope="*", name=self.name, buckets=min(self.seconds, most_buckets))


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """The count of a window.

    Attributes:
        name: The name of the window.
        count: The number of sends, including sends in progress; at most the limit.
        limit: The limit; `None` for unlimited.
        retry_after: Whole seconds until a send is admitted, rounded up and at least 1; `None` if it is admitted now.
    """

    name: str
    count: int
    limit: int | None
    retry_after: int | None = None

    @property
    def remaining(self) -> int | None:
        """The number of sends left; `None` for unlimited."""
        return None if self.limit is None else self.limit - self.count

    def __str__(self) -> str:
        return f"{self.name}: {self.count}/{'unlimited' if self.limit is None else self.limit}"


@dataclass(frozen=True, slots=True)
class RateLimitResult:
    """Whether one more e-mail may be sent.

    Attributes:
        allowed: Whether the send is admitted.
        retry_after: Whole seconds until it would be admitted, rounded up and at least 1; the longest wait of all
            exhausted windows. `None` if it is admitted.
        detail: A sentence with the exhausted windows; empty if it is admitted.
        windows: The counts before this send, by window; empty without limits.
    """

    allowed: bool
    retry_after: int | None = None
    detail: str = ""
    windows: tuple[WindowUsage, ...] = ()

    def header_fields(self, charged: int = 0) -> dict[str, str]:
        """Return the rate-limit header fields after `charged` more units; empty without limits."""
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
    """The methods that the service needs of a limiter. Both may block; they are called in a thread."""

    def check(self) -> RateLimitResult:
        """Return whether one more e-mail may be sent, without counting it."""

    def record(self) -> None:
        """Count an e-mail that was sent."""


class GlobalRateLimiter:
    """Limits outbound e-mails per rolling minute and hour.

    Args:
        per_minute: The most e-mails in any 60 seconds; 0 for unlimited.
        per_hour: The most e-mails in any 3,600 seconds; 0 for unlimited.
        store: The URL of the store; by default the memory of this process.
        clock: A clock to use instead of the store's clock.
        more: Further windows.
        hooks: Hooks called on every decision of `hold`.

    `check` and `record` block and may be called from any thread; `hold` and `usage` are for the event loop.

    Raises:
        ConfigError: A limit is negative, or the store's URL is invalid.
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
        """The blocking limiter on the same counts; created on first use, because the service does not need it."""
        return Limiter(*self._rules, name=NAME, store=self._store, clock=self._clock, on_store_error="raise")

    def check(self) -> RateLimitResult:
        """Return whether one more e-mail may be sent, without counting it."""
        return self._logged(self._result(self._sync.check()))

    def record(self) -> None:
        """Count an e-mail that was sent."""
        self._sync.record()
        if self._windows and logger.isEnabledFor(logging.DEBUG):
            _log_recorded(self._usage(self._sync.check(cost=0), charged=0))

    async def hold(self) -> LimiterHold:
        """Hold one unit until the outcome of the send is known."""
        now = asyncio.get_running_loop().time()
        deadline = None if self._longest_send is None else now + self._longest_send
        hold = await self._async.hold()
        return LimiterHold(self._logged(self._result(hold.decision)), deadline, hold, self._async)

    async def usage(self) -> RateLimitResult:
        """Return the result of a check, without logging it."""
        return self._result(await self._async.check())

    async def ping(self) -> None:
        """Check the store; raises like `AsyncLimiter.ping`."""
        await self._async.ping()

    async def reset(self) -> None:
        """Clear the counts."""
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
        """Return the counts of a decision, without the units that it charged."""
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
    """Return a hold for one e-mail; for a limiter without holds, check now and record at the confirmation."""
    if _has_holds(limiter):
        return await limiter.hold()
    result = await asyncio.to_thread(limiter.check)
    if not result.allowed:
        log_refused(result)
    return CheckedHold(result, limiter)


async def usage_of(limiter: CheckAndRecord) -> RateLimitResult:
    """Return the result of a check, without counting it."""
    if _has_holds(limiter):
        return await limiter.usage()
    return await asyncio.to_thread(limiter.check)


def _has_holds(limiter: CheckAndRecord) -> TypeGuard[GlobalRateLimiter]:
    """Check the real type, because a mock has every attribute and with a spec even passes `isinstance`."""
    return issubclass(type(limiter), GlobalRateLimiter)


@dataclass(frozen=True, slots=True)
class LimiterHold:
    """A unit held in the store: confirm it if the provider accepted the e-mail, release it if not.

    Attributes:
        result: The decision; if it was refused, there is nothing to confirm or release.
        deadline: The event loop's time by which the send must end; `None` for no limit.
    """

    result: RateLimitResult
    deadline: float | None
    _hold: AsyncHold = field(repr=False)
    _limiter: AsyncLimiter = field(repr=False)

    async def confirm(self) -> None:
        """Count the send from now on, because the provider accepted it only now."""
        if not await self._hold.confirm():
            # The clock jumped beyond the window, and other sends used the unit. This one was sent too.
            await self._hold.settle(self._hold.cost)
            await self._limiter.record()
        if self.result.windows:
            _log_recorded(
                tuple(WindowUsage(used.name, used.count + 1, used.limit) for used in self.result.windows)
            )

    async def release(self) -> None:
        """Give the unit back."""
        try:
            await self._hold.release()
        except StoreError as error:  # the unit stays counted until it expires
            logger.warning("A failed send stays counted until it leaves the windows: %s", error)


@dataclass(frozen=True, slots=True)
class CheckedHold:
    """Like `LimiterHold`, but checks now and records at the confirmation; other sends may pass in between."""

    result: RateLimitResult
    _limiter: CheckAndRecord
    deadline: float | None = None

    async def confirm(self) -> None:
        """Count the send."""
        await asyncio.to_thread(self._limiter.record)

    async def release(self) -> None:
        """Do nothing, because nothing was counted."""


SendHold = LimiterHold | CheckedHold


def log_refused(result: RateLimitResult) -> None:
    """Log a refused send."""
    logger.warning("%s; retry after %s s", result.detail or "Rate limit exceeded", result.retry_after)


def _log_recorded(windows: Iterable[WindowUsage]) -> None:
    logger.debug("Send recorded: %s", _listed(windows))


def _listed(windows: Iterable[WindowUsage]) -> str:
    return ", ".join(str(window) for window in windows)
