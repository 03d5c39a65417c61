"""What the routes are given; each can be replaced in a test by `app.dependency_overrides`."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID, uuid5

from fastapi import Depends, Request

from headgate.http import client_address
from headgate_services.petitions.application.ports import QueueCapacityPort, RateLimiterPort
from headgate_services.petitions.application.services import CoSignService, PetitionSubmissionService
from headgate_services.petitions.config import Settings
from headgate_services.petitions.domain.errors import InvalidPetitionError
from headgate_services.petitions.parts import Parts, get_parts

_ANONYMOUS = UUID("6f1d4d0e-6e0c-5c0c-8a52-0c3a3d1b7e55")

PartsPart = Annotated[Parts, Depends(get_parts)]


def get_settings(parts: PartsPart) -> Settings:
    """Return what the service was configured with."""
    return parts.settings


def get_rate_limiter(parts: PartsPart) -> RateLimiterPort:
    """Return the limit on submissions: counters in PostgreSQL, with the configured limit and window."""
    return parts.rate_limiter


def get_queue_capacity(parts: PartsPart) -> QueueCapacityPort:
    """Return what knows how many petitions wait."""
    return parts.queue_capacity


def get_submission_service(parts: PartsPart) -> PetitionSubmissionService:
    """Return what takes petitions in."""
    return parts.submissions


def get_co_sign_limiter(parts: PartsPart) -> RateLimiterPort:
    """Return the limit on co-signs, which counts apart from that on submissions."""
    return parts.co_sign_limiter


def get_co_sign_service(parts: PartsPart) -> CoSignService:
    """Return what takes co-signs in."""
    return parts.co_signs


def get_trace_id(request: Request) -> str:
    """Return the request's trace id."""
    return str(request.state.trace_id)


RateLimiterPart = Annotated[RateLimiterPort, Depends(get_rate_limiter)]
QueueCapacityPart = Annotated[QueueCapacityPort, Depends(get_queue_capacity)]
SubmissionServicePart = Annotated[PetitionSubmissionService, Depends(get_submission_service)]
CoSignLimiterPart = Annotated[RateLimiterPort, Depends(get_co_sign_limiter)]
CoSignServicePart = Annotated[CoSignService, Depends(get_co_sign_service)]
SettingsPart = Annotated[Settings, Depends(get_settings)]
TraceIdPart = Annotated[str, Depends(get_trace_id)]


def counted_as(request: Request, submitter_id: UUID | None, settings: Settings) -> UUID:
    """Return who a petition counts for; without a submitter, an id derived from where it came from.

    Raises:
        InvalidPetitionError: It is anonymous, and such petitions are refused.
    """
    if submitter_id is not None:
        return submitter_id
    if settings.anonymous == "refuse":
        raise InvalidPetitionError("submitter_id is required")
    if settings.anonymous == "shared":
        return _ANONYMOUS
    peer = request.client.host if request.client else None
    header = "x-forwarded-for" if settings.proxies is None else settings.proxies.header
    return uuid5(_ANONYMOUS, client_address(peer, request.headers.getlist(header), settings.proxies))
