"""The limiter of submissions (FR-1.5, HC-4): a sliding window over counters per minute.

The count is the sum of the counters whose minute began later than now minus the window, so capacity returns minute by
minute. The database has the counters and the clock, and computes the sums.
"""

from __future__ import annotations

from uuid import UUID

from headgate import Limiter, MemoryStore
from headgate.stores.postgres import BucketDecision
from headgate_services.petitions.application.ports.rate_limit_store import RateLimitPolicy, RateLimitStorePort
from headgate_services.petitions.application.ports.rate_limiter import RateLimitResult
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.domain.errors import RateLimitExceededError
from headgate_services.petitions.domain.models import start_of_minute
from headgate_services.petitions.infrastructure.metrics import MetricsCollector

__all__ = ["RateLimitResult", "RateLimitService", "refusal_of"]

INFO_LINES = "10/minute"
"""The most log lines at INFO about refusals of one submitter."""

_MOST_SUBMITTERS = 10_000


class RateLimitService(LoggingMixin):
    """Limits submissions, or other units such as co-signs, with counters in a store.

    Args:
        store: The store of the counters.
        limit_per_hour: The most units of a submitter in the window.
        window_minutes: The length of the window.
        strict: Whether a unit counts from the end of its minute instead of its beginning.
        realm_limit: The most units of a realm in the window; 0 for unlimited.
        global_limit: The most units of all submitters in the window; 0 for unlimited.
        metrics: Receives the result of every check.
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
        metrics: MetricsCollector | None = None,
    ) -> None:
        self._init_logger(component="petition.rate_limit")
        self._store = store
        self.policy = RateLimitPolicy(limit_per_hour, window_minutes, strict, realm_limit, global_limit)
        self._metrics = metrics
        self._info_lines = Limiter(
            INFO_LINES, name="info-lines", store=MemoryStore(max_keys=_MOST_SUBMITTERS)
        )

    async def check_rate_limit(self, submitter_id: UUID, *, realm: str | None = None) -> RateLimitResult:
        """Return whether one more petition is admitted, with one statement and without counting it."""
        result = self._result(await self._store.get_usage(self.policy, submitter_id, realm))
        if self._metrics is not None:
            self._metrics.checked(submitter_id, result)
        if not result.allowed:
            self._log_refusal(submitter_id, result)
        return result

    async def record_submission(self, submitter_id: UUID, *, realm: str | None = None) -> None:
        """Count a petition in the current transaction, after it was saved there.

        The limit is checked again, and the submitter is locked until the transaction ends. So concurrent petitions that
        passed the first check cannot exceed the limit.

        Raises:
            RateLimitExceededError: The limit is reached; nothing was counted.
        """
        decision = await self._store.hold(self.policy, submitter_id, realm)
        result = self._result(decision)
        if not result.allowed:
            if self._metrics is not None:
                self._metrics.checked(submitter_id, result)
            self._log_refusal(submitter_id, result)
            raise refusal_of(submitter_id, result, self.policy.window_minutes, self._store.counter)
        if self._metrics is not None:
            valid_seconds = (result.reset_at - decision.at).total_seconds()
            self._metrics.recorded(submitter_id, result.remaining - 1, valid_seconds)
        self._log.debug(
            "submission_recorded",
            submitter_id=str(submitter_id),
            bucket_minute=start_of_minute(decision.at).isoformat(),
        )

    async def get_remaining(self, submitter_id: UUID) -> int:
        return self._result(await self._store.get_usage(self.policy, submitter_id)).remaining

    def get_limit(self) -> int:
        """Return the limit per submitter and window."""
        return self.policy.limit

    def get_window_minutes(self) -> int:
        return self.policy.window_minutes

    def _result(self, decision: BucketDecision) -> RateLimitResult:
        usage = decision.usages[0]
        reset_at = usage.oldest_expiry or decision.at + self.policy.window
        if not decision.allowed:
            # Not the expiry of the oldest counter, which is too early if the count is above the limit.
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
        write = self._log.info if self._info_lines.hit(f"{submitter_id}/{result.scope}") else self._log.debug
        write(
            "rate_limit_exceeded",
            submitter_id=str(submitter_id),
            current_count=result.current_count,
            limit=result.limit,
            scope=result.scope,
        )


def refusal_of(
    submitter_id: UUID, result: RateLimitResult, window_minutes: int, counter: str = "submission"
) -> RateLimitExceededError:
    """Return the error for a refused check."""
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
