"""Services of the application."""

from headgate_services.petitions.application.services.petition_submission_service import (
    PetitionSubmissionService,
)
from headgate_services.petitions.application.services.queue_capacity_service import QueueCapacityService
from headgate_services.petitions.application.services.rate_limit_cleanup_service import (
    RateLimitCleanupService,
)
from headgate_services.petitions.application.services.rate_limit_service import RateLimitService, refusal_of
from headgate_services.petitions.application.services.refusal_witness_service import RefusalWitnessService

__all__ = [
    "PetitionSubmissionService",
    "QueueCapacityService",
    "RateLimitCleanupService",
    "RateLimitService",
    "RefusalWitnessService",
    "refusal_of",
]
