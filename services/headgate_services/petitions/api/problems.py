"""Refusals as RFC 7807 bodies with governance fields.

They are sent as `application/json`, or as `application/problem+json` if the client's `Accept` contains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from headgate.http import Answer, problem
from headgate_services.petitions.api.models import zulu
from headgate_services.petitions.container import get_container
from headgate_services.petitions.domain.errors import (
    AlreadyCoSignedError,
    CommitUnknownError,
    DatabaseUnavailableError,
    InvalidPetitionError,
    InvalidRealmError,
    NotYourPetitionError,
    PetitionError,
    PetitionNotFoundError,
    QueueOverflowError,
    RateLimitExceededError,
    SystemHaltedError,
)

RATE_LIMITED = "urn:archon72:petition:rate-limit-exceeded"
CO_SIGN_LIMITED = "urn:archon72:co-sign:rate-limit-exceeded"

_KINDS: dict[type[PetitionError], tuple[int, str, str]] = {
    RateLimitExceededError: (429, RATE_LIMITED, "Rate Limit Exceeded"),
    QueueOverflowError: (503, "https://archon72.io/errors/queue-overflow", "Queue Overflow"),
    SystemHaltedError: (503, "https://archon72.io/errors/system-halted", "System Halted"),
    DatabaseUnavailableError: (
        503,
        "https://archon72.io/errors/database-unavailable",
        "Database Unavailable",
    ),
    CommitUnknownError: (503, "https://archon72.io/errors/outcome-unknown", "Outcome Unknown"),
    AlreadyCoSignedError: (409, "https://archon72.io/errors/already-co-signed", "Already Co-Signed"),
    InvalidRealmError: (400, "https://archon72.io/errors/invalid-realm", "Invalid Realm"),
    InvalidPetitionError: (400, "https://archon72.io/errors/invalid-petition", "Invalid Petition Submission"),
    NotYourPetitionError: (403, "https://archon72.io/errors/not-your-petition", "Not Your Petition"),
    PetitionNotFoundError: (404, "https://archon72.io/errors/petition-not-found", "Petition Not Found"),
}
"""Status, type and title by error."""

_JSON, _PROBLEM_JSON = "application/json", "application/problem+json"


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Return the response for an error; a refusal by a limit is counted and witnessed first."""
    assert isinstance(error, PetitionError)
    extra: dict[str, Any] = {}
    if isinstance(error, RateLimitExceededError):
        container = get_container(request)
        container.metrics.refused(error.submitter_id, error.counter)
        sequence = await container.witness.witness(error, request.state.trace_id)
        extra = _governance(error, sequence)
    elif isinstance(error, QueueOverflowError):
        extra = {"queue_depth": error.queue_depth, "threshold": error.threshold}
    elif isinstance(error, CommitUnknownError):
        extra = {"petition_id": error.petition_id and str(error.petition_id)}
    return _problem(request, error, extra)


def cycle_of(instant: datetime) -> str:
    """Return the governance cycle of a time: its quarter, such as 2026-Q1."""
    return f"{instant.year}-Q{(instant.month + 2) // 3}"


def _governance(error: RateLimitExceededError, sequence: int) -> dict[str, Any]:
    co_sign: dict[str, Any] = {}
    if error.counter == "co_sign":
        co_sign = {
            "type": CO_SIGN_LIMITED,
            "rate_limit_reset_at": zulu(error.reset_at),
            "nfr_reference": "NFR-5.1",
            "hardening_control": "HC-4",
        }
    return {
        "rate_limit_remaining": max(0, error.limit - error.current_count),
        **(co_sign or {"rate_limit_reset": zulu(error.reset_at)}),
        "rate_limit_limit": error.limit,
        "rate_limit_current": error.current_count,
        "rate_limit_scope": error.scope,
        "actor": f"submitter:{error.submitter_id}",
        "cycle_id": cycle_of(datetime.now(UTC)),
        "as_of_seq": sequence,
    }


def _problem(request: Request, error: PetitionError, extra: Mapping[str, Any]) -> Response:
    status, type_, title = _KINDS[type(error)]
    # Without scheme, host and query, which may be internal or confidential.
    members = {"instance": request.url.path, "trace_id": request.state.trace_id, **extra}
    media_type = _PROBLEM_JSON if _PROBLEM_JSON in request.headers.get("accept", "") else _JSON
    answer = problem(
        status,
        str(error),
        title=title,
        kind=type_,
        members=members,
        retry_after=error.retry_after_seconds,
        media_type=media_type.encode(),
    )
    return as_response(answer)


def as_response(answer: Answer) -> Response:
    """Return an answer as a FastAPI response."""
    return Response(
        answer.body, answer.status, {name.decode(): value.decode() for name, value in answer.fields}
    )
