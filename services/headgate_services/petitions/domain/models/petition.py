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
"""Where petitions may go; the first is the default."""


class PetitionType(StrEnum):
    """What a petition is about."""

    GENERAL = "GENERAL"
    CESSATION = "CESSATION"
    GRIEVANCE = "GRIEVANCE"
    COLLABORATION = "COLLABORATION"
    META = "META"


class PetitionState(StrEnum):
    """How far a petition has come. Those that are neither received nor deliberated are final."""

    RECEIVED = "RECEIVED"
    DELIBERATING = "DELIBERATING"
    ACKNOWLEDGED = "ACKNOWLEDGED"
    REFERRED = "REFERRED"
    ESCALATED = "ESCALATED"
    DEFERRED = "DEFERRED"
    NO_RESPONSE = "NO_RESPONSE"

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self not in (PetitionState.RECEIVED, PetitionState.DELIBERATING)


@dataclass(frozen=True, slots=True)
class Draft:
    """A petition as it was handed in.

    Attributes:
        counted_as: Who it counts for; of an anonymous one, an id derived from where it came from.
        submitter_id: Who says they submitted it; `None` if it is anonymous.
    """

    type: PetitionType
    text: str
    realm: str
    counted_as: UUID
    submitter_id: UUID | None = None
    notification_preferences: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Petition:
    """A petition as it is kept."""

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
        """Why it ended as it did, once it has."""
        return self.fate_reason if self.state.is_final else None

    @property
    def status_token(self) -> str:
        """A word that changes whenever the petition does."""
        text = f"{self.id}/{self.state}/{self.updated_at.timestamp():.6f}"
        return blake2b(text.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class CoSign:
    """Somebody's name under a petition, and how many names there are with it."""

    id: UUID
    petition_id: UUID
    signer_id: UUID
    signed_at: datetime
    co_signer_count: int
