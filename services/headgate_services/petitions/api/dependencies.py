"""Dependencies of the routes; tests override them with `app.dependency_overrides`."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID, uuid5

from fastapi import Depends, Request

from headgate.http import client_address
from headgate_services.petitions.application.ports import RateLimiterPort
from headgate_services.petitions.config import PetitionsSettings
from headgate_services.petitions.container import Container, get_container
from headgate_services.petitions.domain.errors import InvalidPetitionError

_ANONYMOUS = UUID("6f1d4d0e-6e0c-5c0c-8a52-0c3a3d1b7e55")

ContainerDependency = Annotated[Container, Depends(get_container)]


def get_rate_limiter(container: ContainerDependency) -> RateLimiterPort:
    """Return the limiter of submissions, with counters in PostgreSQL and the configured limit and window."""
    return container.rate_limiter


RateLimiterDependency = Annotated[RateLimiterPort, Depends(get_rate_limiter)]


def counted_as(request: Request, submitter_id: UUID | None, settings: PetitionsSettings) -> UUID:
    """Return the id that a petition counts for; without a submitter, an id derived from the client's address.

    Raises:
        InvalidPetitionError: The petition is anonymous, and anonymous petitions are refused.
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
