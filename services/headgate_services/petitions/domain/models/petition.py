"""A petition and its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from hashlib import blake2b
from typing import Any
from uuid import UUID

REALMS = (
    "realm_accurate_guidance_counsel",
    "realm_character_virtue_development",
    "realm_knowledge_skill_development",
    "realm_personality_charisma_enhancement",
    "realm_predictive_analytics_forecasting",
    "realm_privacy_discretion_services",
    "realm_relationship_facilitation",
    "realm_talent_acquisition_team_building",
    "realm_threat_anomaly_detection",
)
"""The realms; the first is the default."""


class PetitionType(StrEnum):
    """The type of a petition."""

    GENERAL = "GENERAL"
    CESSATION = "CESSATION"
    GRIEVANCE = "GRIEVANCE"
    COLLABORATION = "COLLABORATION"
    META = "META"


class PetitionState(StrEnum):
    """The state of a petition. All states except RECEIVED and DELIBERATING are final."""

    RECEIVED = "RECEIVED"
    DELIBERATING = "DELIBERATING"
    ACKNOWLEDGED = "ACKNOWLEDGED"
    REFERRED = "REFERRED"
    ESCALATED = "ESCALATED"
    DEFERRED = "DEFERRED"
    NO_RESPONSE = "NO_RESPONSE"

    @property
    def is_final(self) -> bool:
        """Whether the state is final."""
        return self not in (PetitionState.RECEIVED, PetitionState.DELIBERATING)


@dataclass(frozen=True, slots=True)
class Draft:
    """A petition to submit.

    Attributes:
        counted_as: The id that it counts for; for an anonymous petition, derived from the client's address.
        submitter_id: The submitter; `None` if it is anonymous.
    """

    type: PetitionType
    text: str
    realm: str
    counted_as: UUID
    submitter_id: UUID | None = None
    notification_preferences: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Petition:
    """A stored petition."""

    id: UUID
    type: PetitionType
    state: PetitionState
    content_hash: bytes
    realm: str
    submitter_id: UUID | None
    created_at: datetime
    updated_at: datetime
    fate_reason: str | None = None
    co_signer_count: int = 0

    @property
    def fate(self) -> str | None:
        """The reason of the final state, or None."""
        return self.fate_reason if self.state.is_final else None

    @property
    def status_token(self) -> str:
        """An ETag of the status."""
        text = f"{self.id}/{self.state}/{self.updated_at.timestamp():.6f}"
        return blake2b(text.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class CoSign:
    """A co-sign, and the number of co-signs of its petition."""

    id: UUID
    petition_id: UUID
    signer_id: UUID
    signed_at: datetime
    co_signer_count: int
