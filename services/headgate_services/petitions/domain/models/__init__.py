"""Petitions and their counters."""

from headgate_services.petitions.domain.models.petition import (
    REALMS,
    CoSign,
    Draft,
    Petition,
    PetitionState,
    PetitionType,
)
from headgate_services.petitions.domain.models.rate_limit_bucket import RateLimitBucket, start_of_minute

__all__ = [
    "REALMS",
    "CoSign",
    "Draft",
    "Petition",
    "PetitionState",
    "PetitionType",
    "RateLimitBucket",
    "start_of_minute",
]
