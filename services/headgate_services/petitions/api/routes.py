"""Routes to submit, read, follow, co-sign and withdraw petitions."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response

from headgate_services.petitions.api.dependencies import (
    ContainerDependency,
    RateLimiterDependency,
    counted_as,
)
from headgate_services.petitions.api.models import (
    CoSignLimitProblem,
    CoSignRequest,
    CoSignResponse,
    PetitionResponse,
    ProblemBody,
    RateLimitProblem,
    StatusResponse,
    SubmissionRequest,
    SubmissionResponse,
    TooLargeBody,
    WithdrawalRequest,
)
from headgate_services.petitions.application.ports import RateLimitResult
from headgate_services.petitions.application.services import refusal_of
from headgate_services.petitions.domain.models import Draft

router = APIRouter(prefix="/v1/petition-submissions", tags=["petitions"])

_POLL_SECONDS = 0.5


def _refusals(**descriptions: str) -> dict[int | str, dict[str, Any]]:
    return {
        int(status.removeprefix("on_")): {"model": ProblemBody, "description": text}
        for status, text in descriptions.items()
    }


def _limit_fields(found: RateLimitResult, remaining: int) -> dict[str, str]:
    """Return the header fields of an accepted submission."""
    return {
        "X-RateLimit-Limit": str(found.limit),
        "X-RateLimit-Remaining": str(remaining),
        "X-RateLimit-Reset": str(math.ceil(found.reset_at.timestamp())),
    }


_TOO_LARGE: dict[int | str, dict[str, Any]] = {
    413: {"model": TooLargeBody, "description": "The request is above 256 kB"}
}
_RETRY_AFTER = {"description": "whole seconds to wait", "schema": {"type": "integer"}}


@router.post(
    "",
    status_code=201,
    responses={
        **_TOO_LARGE,
        **_refusals(
            on_400="Unknown realm, or an anonymous petition, if these are refused",
            on_503="The queue is full, the system is halted, or the database is unavailable",
        ),
        429: {
            "model": RateLimitProblem,
            "description": "The limit of the submitter, of the realm or of all together is reached. Nothing was "
            "submitted or counted; `Retry-After` has the seconds to wait.",
            "headers": {"Retry-After": _RETRY_AFTER},
        },
    },
)
async def submit_petition(
    submission: SubmissionRequest,
    request: Request,
    response: Response,
    limiter: RateLimiterDependency,
    container: ContainerDependency,
) -> SubmissionResponse:
    """Submit a petition. The queue is checked first, then the limit, then the rest."""
    capacity, settings = container.queue_capacity, container.settings
    if not await capacity.is_accepting_submissions():
        raise capacity.refuse()
    preferences = submission.notification_preferences
    draft = Draft(
        type=submission.type,
        text=submission.text,
        realm=settings.default_realm if submission.realm is None else submission.realm,
        counted_as=counted_as(request, submission.submitter_id, settings),
        submitter_id=submission.submitter_id,
        notification_preferences=None if preferences is None else preferences.model_dump(),
    )
    result = await limiter.check_rate_limit(draft.counted_as, realm=draft.realm)
    if not result.allowed:
        raise refusal_of(draft.counted_as, result, limiter.get_window_minutes())
    petition, remaining = await container.submissions.submit(draft, limiter, capacity, request.state.trace_id)
    response.headers.update(_limit_fields(result, remaining))
    return SubmissionResponse.of(petition)


@router.get("/{petition_id}", responses=_refusals(on_404="No such petition"))
async def get_petition(petition_id: UUID, container: ContainerDependency) -> PetitionResponse:
    """Return a petition, also while the system is halted."""
    return PetitionResponse.of(await container.submissions.get(petition_id))


@router.get(
    "/{petition_id}/status",
    response_model=StatusResponse,
    responses={
        **_refusals(on_404="No such petition"),
        304: {"description": "The status did not change while waiting"},
    },
)
async def get_status(
    petition_id: UUID, container: ContainerDependency, token: str | None = None
) -> Response | StatusResponse:
    """Return the status of a petition; with the token of a known status, wait until it changes."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + container.settings.status_wait_seconds
    while True:
        petition = await container.submissions.get(petition_id)
        if token is None or token != petition.status_token:
            return StatusResponse.of(petition)
        left = deadline - loop.time()
        if left <= 0:
            return Response(status_code=304, headers={"X-Status-Token": petition.status_token})
        await asyncio.sleep(min(_POLL_SECONDS, left))


@router.post(
    "/{petition_id}/co-sign",
    status_code=201,
    responses={
        **_TOO_LARGE,
        **_refusals(
            on_400="The petition is in a final state",
            on_404="No such petition",
            on_409="This identity has already co-signed the petition",
            on_503="The system is halted, or the database is unavailable",
        ),
        429: {
            "model": CoSignLimitProblem,
            "description": "The limit of co-signs of this identity is reached. Nothing was signed or counted.",
            "headers": {"Retry-After": _RETRY_AFTER},
        },
    },
)
async def co_sign_petition(
    petition_id: UUID, co_sign: CoSignRequest, request: Request, container: ContainerDependency
) -> CoSignResponse:
    """Co-sign a petition, once per identity; co-signs have a separate limit."""
    signed = await container.submissions.co_sign(
        petition_id, co_sign.signer_id, container.co_sign_limiter, request.state.trace_id
    )
    return CoSignResponse.of(signed)


@router.post(
    "/{petition_id}/withdraw",
    responses={
        **_TOO_LARGE,
        **_refusals(
            on_400="The petition is in a final state",
            on_403="The requester is not the submitter",
            on_404="No such petition",
            on_503="The system is halted",
        ),
    },
)
async def withdraw_petition(
    petition_id: UUID, withdrawal: WithdrawalRequest, request: Request, container: ContainerDependency
) -> PetitionResponse:
    """Withdraw a petition. It still counts for the limit."""
    petition = await container.submissions.withdraw(
        petition_id, withdrawal.requester_id, withdrawal.reason, request.state.trace_id
    )
    return PetitionResponse.of(petition)
