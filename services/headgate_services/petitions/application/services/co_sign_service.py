"""Co-signing petitions: once per identity and petition, with a limit of its own."""

from __future__ import annotations

from uuid import UUID

from headgate_services.petitions.application.ports import RateLimiterPort
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.application.services.petition_submission_service import (
    PetitionSubmissionService,
)
from headgate_services.petitions.application.services.rate_limit_service import refusal_of
from headgate_services.petitions.domain.errors import (
    AlreadyCoSignedError,
    InvalidPetitionError,
)
from headgate_services.petitions.domain.models import CoSign
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    LedgerEvent,
    PostgresCoSignRepository,
    PostgresEventLedger,
)

COUNTER = "co_sign"
"""What its units are counted under, apart from submissions."""


class CoSignService(LoggingMixin):
    """Takes co-signs in. A co-sign, its count and its event are written together or not at all."""

    def __init__(
        self,
        database: Database,
        petitions: PetitionSubmissionService,
        co_signs: PostgresCoSignRepository,
        ledger: PostgresEventLedger,
    ) -> None:
        self._init_logger(component="petition.co_sign")
        self._database = database
        self._petitions = petitions
        self._co_signs = co_signs
        self._ledger = ledger

    async def co_sign(
        self, petition_id: UUID, signer_id: UUID, limiter: RateLimiterPort, trace_id: str
    ) -> CoSign:
        """Co-sign a petition. Who signs comes before how often: an identity that has signed uses up nothing.

        Raises:
            SystemHaltedError: Nothing is written at the moment.
            PetitionNotFoundError: There is no such petition.
            InvalidPetitionError: Its fate is settled.
            AlreadyCoSignedError: This identity has co-signed it.
            RateLimitExceededError: This identity has co-signed too many.
        """
        async with self._database.transaction():
            await self._petitions.demand_running()
            petition = await self._petitions.get(petition_id)
            if petition.state.is_final:
                raise InvalidPetitionError(f"A petition in state {petition.state} cannot be co-signed")
            co_sign = await self._co_signs.add(petition_id, signer_id)
            if co_sign is None:
                raise AlreadyCoSignedError(petition_id)
            result = await limiter.check_rate_limit(signer_id)
            if not result.allowed:
                raise refusal_of(signer_id, result, limiter.get_window_minutes(), COUNTER)
            payload = {
                "petition_id": str(petition_id),
                "signer_id": str(signer_id),
                "correlation_id": trace_id,
            }
            await self._ledger.append(
                LedgerEvent("petition.co_sign.recorded", f"signer:{signer_id}", str(petition_id), payload)
            )
            await limiter.record_submission(signer_id)
        self._log.info("petition_co_signed", petition_id=str(petition_id))
        return co_sign
