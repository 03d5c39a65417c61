"""Why a request is refused."""

from headgate_services.petitions.domain.errors.base import PetitionError
from headgate_services.petitions.domain.errors.petition import (
    AlreadyCoSignedError,
    CommitUnknownError,
    DatabaseUnavailableError,
    InvalidPetitionError,
    InvalidRealmError,
    NotYourPetitionError,
    PetitionNotFoundError,
    QueueOverflowError,
    SystemHaltedError,
)
from headgate_services.petitions.domain.errors.rate_limit import RateLimitExceededError

__all__ = [
    "AlreadyCoSignedError",
    "CommitUnknownError",
    "DatabaseUnavailableError",
    "InvalidPetitionError",
    "InvalidRealmError",
    "NotYourPetitionError",
    "PetitionError",
    "PetitionNotFoundError",
    "QueueOverflowError",
    "RateLimitExceededError",
    "SystemHaltedError",
]
