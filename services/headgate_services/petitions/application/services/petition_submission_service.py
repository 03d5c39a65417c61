"""Submitting, reading and withdrawing petitions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from headgate_services.petitions.application.ports import QueueCapacityPort, RateLimiterPort
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.domain.errors import (
    CommitUnknownError,
    InvalidPetitionError,
    InvalidRealmError,
    NotYourPetitionError,
    PetitionNotFoundError,
    SystemHaltedError,
)
from headgate_services.petitions.domain.models import REALMS, Draft, Petition, PetitionState
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    LedgerEvent,
    PostgresEventLedger,
    PostgresHaltState,
    PostgresPetitionRepository,
)

ACTOR = "petition-system"


class PetitionSubmissionService(LoggingMixin):
    """Takes petitions in. A petition, its count and its event are written together or not at all."""

    def __init__(
        self,
        database: Database,
        petitions: PostgresPetitionRepository,
        ledger: PostgresEventLedger,
        halt: PostgresHaltState,
    ) -> None:
        self._init_logger(component="petition.submission")
        self._database = database
        self._petitions = petitions
        self._ledger = ledger
        self._halt = halt

    async def submit(
        self, draft: Draft, limiter: RateLimiterPort, capacity: QueueCapacityPort, trace_id: str
    ) -> tuple[Petition, int]:
        """Save a petition that has passed the check of the limit, count it, and give it its place in the queue.

        Return it, and how many more the submitter may submit.

        Counting comes last: until the transaction ends, others who count for the same submitter wait, so the wait is
        as short as can be; and the place in the queue, for which all wait, comes after that.

        Raises:
            SystemHaltedError: Nothing is written at the moment.
            InvalidRealmError: There is no such realm.
            RateLimitExceededError: Others were faster since the check.
            QueueOverflowError: Likewise.
            CommitUnknownError: It is unknown whether it was kept; the error names the petition.
        """
        petition: Petition | None = None
        try:
            async with self._database.transaction():
                await self.demand_running()
                if draft.realm not in REALMS:
                    raise InvalidRealmError(draft.realm)
                petition = await self._petitions.save(draft)
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
            PetitionNotFoundError: There is none.
        """
        return _found(petition_id, await self._petitions.get(petition_id))

    async def withdraw(
        self, petition_id: UUID, requester_id: UUID, reason: str | None, trace_id: str
    ) -> Petition:
        """Take a petition back; its count stays.

        Raises:
            SystemHaltedError: Nothing is written at the moment.
            PetitionNotFoundError: There is none.
            NotYourPetitionError: Another submitted it, or it is anonymous.
            InvalidPetitionError: Its fate is settled.
        """
        async with self._database.transaction():
            await self.demand_running()
            petition = _found(petition_id, await self._petitions.get(petition_id, for_update=True))
            if petition.submitter_id != requester_id:
                raise NotYourPetitionError("Only the submitter may withdraw a petition")
            if petition.state.is_final:
                raise InvalidPetitionError(f"A petition in state {petition.state} cannot be withdrawn")
            fate = f"WITHDRAWN: {reason or 'no reason given'}"
            petition = await self._petitions.change(petition_id, PetitionState.ACKNOWLEDGED, fate)
            payload = {"fate_reason": fate, "requester_id": str(requester_id), "correlation_id": trace_id}
            await self._append_event("withdrawn", petition, payload)
        self._log.info("petition_withdrawn", petition_id=str(petition.id))
        return petition

    async def demand_running(self) -> None:
        """Raise `SystemHaltedError` if nothing is written at the moment."""
        reason = await self._halt.get_reason()
        if reason is not None:
            raise SystemHaltedError(reason)

    async def _append_event(self, verb: str, petition: Petition, payload: Mapping[str, Any]) -> None:
        event = LedgerEvent(
            f"petition.submission.{verb}",
            ACTOR,
            str(petition.id),
            {"petition_id": str(petition.id), **payload},
        )
        await self._ledger.append(event)


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
