"""The limit on submissions (FR-1.5, HC-4): a window that slides over counters per minute.

A petition counts as long as its minute is in the window: the sum of the counters whose minute began later than now minus
the window. So room returns minute by minute. The counters, the clock and the arithmetic are the database's; here is what
the figures mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

from headgate.stores.postgres import BucketDecision
from headgate_services.petitions.application.ports.rate_limit_store import RateLimitPolicy, RateLimitStorePort
from headgate_services.petitions.application.ports.rate_limiter import RateLimitObserver, RateLimitResult
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.domain.errors import RateLimitExceededError
from headgate_services.petitions.domain.models import start_of_minute

__all__ = ["RateLimitResult", "RateLimitService", "RefusalLines", "refusal_of"]

INDIVIDUALLY, TOGETHER, QUIET_SECONDS = 10, 100, 60.0
_MOST_FOLLOWED = 10_000


class RateLimitService(LoggingMixin):
    """Limits submissions with counters in a store. Any store, limit and window will do: co-signs have their own.

    Args:
        store: Where submissions are counted; what it counts has a name, apart from everything with another.
        limit_per_hour: Most of one submitter in the window.
        window_minutes: How long the window is.
        strict: Whether a submission counts from the end of its minute instead of its beginning.
        realm_limit: Most to one realm in the window, of all submitters; 0 for no such limit.
        global_limit: Most in the window altogether; 0 for no such limit.
        observer: Hears of every check.
    """

    def __init__(
        self,
        store: RateLimitStorePort,
        limit_per_hour: int = 10,
        window_minutes: int = 60,
        *,
        strict: bool = False,
        realm_limit: int = 0,
        global_limit: int = 0,
        observer: RateLimitObserver | None = None,
    ) -> None:
        self._init_logger(component="petition.rate_limit")
        self._store = store
        self._policy = RateLimitPolicy(limit_per_hour, window_minutes, strict, realm_limit, global_limit)
        self._observer = observer
        self._lines = RefusalLines()

    async def check_rate_limit(self, submitter_id: UUID, *, realm: str | None = None) -> RateLimitResult:
        """Return whether one more petition is admitted, with one statement; counts nothing."""
        result = self._result(await self._store.get_usage(self._policy, submitter_id, realm))
        if self._observer is not None:
            self._observer.checked(submitter_id, result)
        if not result.allowed:
            self._log_refusal(submitter_id, result)
        return result

    async def record_submission(self, submitter_id: UUID, *, realm: str | None = None) -> None:
        """Count a petition in the transaction under way, in which it has been saved.

        The limit is checked once more, with the submitter locked until the transaction ends:
        of any number of petitions that passed the check at the same time, exactly as many as there is room for pass here.

        Raises:
            RateLimitExceededError: There is no room any more; nothing was counted.
        """
        decision = await self._store.hold(self._policy, submitter_id, realm)
        result = self._result(decision)
        if not result.allowed:
            if self._observer is not None:
                self._observer.checked(submitter_id, result)
            self._log_refusal(submitter_id, result)
            raise refusal_of(submitter_id, result, self._policy.window_minutes, self._store.counter)
        if self._observer is not None:
            valid_seconds = (result.reset_at - decision.at).total_seconds()
            self._observer.recorded(submitter_id, result.remaining - 1, valid_seconds)
        self._log.debug(
            "submission_recorded",
            submitter_id=str(submitter_id),
            bucket_minute=start_of_minute(decision.at).isoformat(),
        )

    async def get_remaining(self, submitter_id: UUID) -> int:
        return self._result(await self._store.get_usage(self._policy, submitter_id)).remaining

    def get_limit(self) -> int:
        """Return how many petitions of one submitter a window may hold."""
        return self._policy.limit

    def get_window_minutes(self) -> int:
        return self._policy.window_minutes

    def _result(self, decision: BucketDecision) -> RateLimitResult:
        usage = decision.usages[0]
        reset_at = usage.oldest_expiry or decision.at + self._policy.window
        if not decision.allowed:
            # Not the oldest counter's end: above the limit (it was lowered, say) that frees too little.
            usage, reset_at = decision.binding, decision.next_allowed or reset_at
        return RateLimitResult(
            allowed=decision.allowed,
            remaining=usage.remaining,
            reset_at=reset_at,
            current_count=usage.count,
            limit=usage.limit,
            scope=usage.name,
            checked_at=decision.at,
        )

    def _log_refusal(self, submitter_id: UUID, result: RateLimitResult) -> None:
        refusals = self._lines.refused((submitter_id, result.scope))
        write = self._log.debug if refusals is None else self._log.info
        write(
            "rate_limit_exceeded",
            submitter_id=str(submitter_id),
            current_count=result.current_count,
            limit=result.limit,
            scope=result.scope,
            refusals=refusals,
        )


class RefusalLines:
    """Which refusals have a line at INFO: the first ten of a submitter, then every hundredth, which stands for all of them.

    After a minute without one, the next refusal is a first one again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[UUID, str], tuple[int, float]] = {}

    def refused(self, kind: tuple[UUID, str]) -> int | None:
        """Count a refusal; return how many refusals a line about it stands for, `None` if it has none."""
        now = self._clock()
        if len(self._seen) >= _MOST_FOLLOWED:
            self._seen = {each: seen for each, seen in self._seen.items() if now - seen[1] <= QUIET_SECONDS}
        count, last = self._seen.pop(kind, (0, now))
        count = count + 1 if now - last <= QUIET_SECONDS else 1
        self._seen[kind] = (count, now)
        if count <= INDIVIDUALLY:
            return 1
        return TOGETHER if (count - INDIVIDUALLY) % TOGETHER == 0 else None


def refusal_of(
    submitter_id: UUID, result: RateLimitResult, window_minutes: int, counter: str = "submission"
) -> RateLimitExceededError:
    """Return the error that says what a refused check found."""
    return RateLimitExceededError(
        submitter_id,
        result.current_count,
        result.limit,
        result.reset_at,
        result.retry_after_seconds,
        scope=result.scope,
        window_minutes=window_minutes,
        counter=counter,
    )
