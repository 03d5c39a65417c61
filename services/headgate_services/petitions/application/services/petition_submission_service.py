"""Submitting, reading, co-signing and withdrawing petitions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from headgate_services.petitions.application.ports import RateLimiterPort
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.application.services.queue_capacity_service import QueueCapacityService
from headgate_services.petitions.application.services.rate_limit_service import refusal_of
from headgate_services.petitions.domain.errors import (
    AlreadyCoSignedError,
    CommitUnknownError,
    InvalidPetitionError,
    InvalidRealmError,
    NotYourPetitionError,
    PetitionNotFoundError,
    SystemHaltedError,
)
from headgate_services.petitions.domain.models import REALMS, CoSign, Draft, Petition, PetitionState
from headgate_services.petitions.infrastructure.adapters.persistence import (
    LedgerEvent,
    PetitionRecords,
)

ACTOR = "petition-system"
CO_SIGN = "co_sign"
"""The name of the counter of co-signs."""


class PetitionSubmissionService(LoggingMixin):
    """Accepts petitions and co-signs. Each is written in one transaction with its count and its event."""

    def __init__(self, records: PetitionRecords) -> None:
        self._init_logger(component="petition.submission")
        self._records = records

    async def submit(
        self, draft: Draft, limiter: RateLimiterPort, capacity: QueueCapacityService, trace_id: str
    ) -> tuple[Petition, int]:
        """Save and count a petition, and add it to the queue; return it and the submitter's remaining petitions.

        The count locks the submitter, and the queue locks all submitters, until the transaction ends. So these two steps
        come last.

        Raises:
            SystemHaltedError: The system is halted.
            InvalidRealmError: The realm does not exist.
            RateLimitExceededError: The limit was reached since the check.
            QueueOverflowError: The queue became full since the check.
            CommitUnknownError: It is unknown whether the petition was saved; the error has its id.
        """
        petition: Petition | None = None
        try:
            async with self._records.transaction():
                await self._demand_running()
                if draft.realm not in REALMS:
                    raise InvalidRealmError(draft.realm)
                petition = await self._records.save_petition(draft)
                await self._append_event("received", petition, _received(petition, trace_id))
                await limiter.record_submission(draft.counted_as, realm=draft.realm)
                remaining = await limiter.get_remaining(draft.counted_as)
                await capacity.take_place()
        except CommitUnknownError as error:
            error.petition_id = None if petition is None else petition.id
            raise
        self._log.info("petition_received", petition_id=str(petition.id), realm=petition.realm)
        return petition, remaining

    async def get(self, petition_id: UUID) -> Petition:
        """Return a petition, also while the system is halted.

        Raises:
            PetitionNotFoundError: The petition does not exist.
        """
        return _found(petition_id, await self._records.get_petition(petition_id))

    async def co_sign(
        self, petition_id: UUID, signer_id: UUID, limiter: RateLimiterPort, trace_id: str
    ) -> CoSign:
        """Co-sign a petition, once per identity. A repeated co-sign is refused before the limit is checked.

        Raises:
            SystemHaltedError: The system is halted.
            PetitionNotFoundError: The petition does not exist.
            InvalidPetitionError: The petition is in a final state.
            AlreadyCoSignedError: This identity has already co-signed it.
            RateLimitExceededError: The limit of co-signs of this identity is reached.
        """
        async with self._records.transaction():
            await self._demand_running()
            petition = await self.get(petition_id)
            if petition.state.is_final:
                raise InvalidPetitionError(f"A petition in state {petition.state} cannot be co-signed")
            co_sign = await self._records.add_co_sign(petition_id, signer_id)
            if co_sign is None:
                raise AlreadyCoSignedError(petition_id)
            result = await limiter.check_rate_limit(signer_id)
            if not result.allowed:
                raise refusal_of(signer_id, result, limiter.get_window_minutes(), CO_SIGN)
            payload = {
                "petition_id": str(petition_id),
                "signer_id": str(signer_id),
                "correlation_id": trace_id,
            }
            await self._records.append(
                LedgerEvent("petition.co_sign.recorded", f"signer:{signer_id}", str(petition_id), payload)
            )
            await limiter.record_submission(signer_id)
        self._log.info("petition_co_signed", petition_id=str(petition_id))
        return co_sign

    async def withdraw(
        self, petition_id: UUID, requester_id: UUID, reason: str | None, trace_id: str
    ) -> Petition:
        """Withdraw a petition; it stays counted.

        Raises:
            SystemHaltedError: The system is halted.
            PetitionNotFoundError: The petition does not exist.
            NotYourPetitionError: The requester is not its submitter, or it is anonymous.
            InvalidPetitionError: The petition is in a final state.
        """
        async with self._records.transaction():
            await self._demand_running()
            petition = _found(petition_id, await self._records.get_petition(petition_id, for_update=True))
            if petition.submitter_id != requester_id:
                raise NotYourPetitionError("Only the submitter may withdraw a petition")
            if petition.state.is_final:
                raise InvalidPetitionError(f"A petition in state {petition.state} cannot be withdrawn")
            fate = f"WITHDRAWN: {reason or 'no reason given'}"
            petition = await self._records.change_petition(petition_id, PetitionState.ACKNOWLEDGED, fate)
            payload = {"fate_reason": fate, "requester_id": str(requester_id), "correlation_id": trace_id}
            await self._append_event("withdrawn", petition, payload)
        self._log.info("petition_withdrawn", petition_id=str(petition.id))
        return petition

    async def _demand_running(self) -> None:
        """Raise `SystemHaltedError` if the system is halted."""
        reason = await self._records.get_halt_reason()
        if reason is not None:
            raise SystemHaltedError(reason)

    async def _append_event(self, verb: str, petition: Petition, payload: Mapping[str, Any]) -> None:
        event = LedgerEvent(
            f"petition.submission.{verb}",
            ACTOR,
            str(petition.id),
            {"petition_id": str(petition.id), **payload},
        )
        await self._records.append(event)


def _found(petition_id: UUID, petition: Petition | None) -> Petition:
    if petition is None:
        raise PetitionNotFoundError(petition_id)
    return petition


def _received(petition: Petition, trace_id: str) -> dict[str, Any]:
    return {
        "petition_type": petition.type,
        "realm": petition.realm,
        "content_hash": b64encode(petition.content_hash).decode(),
        "submitter_id": petition.submitter_id and str(petition.submitter_id),
        "received_timestamp": petition.created_at.isoformat(),
        "correlation_id": trace_id,
    }
