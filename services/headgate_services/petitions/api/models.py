"""Requests and responses of the API."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from typing import Annotated, Literal, Self
from uuid import UUID

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer, model_validator

from headgate_services.common.text import STORABLE
from headgate_services.common.views import RowView
from headgate_services.petitions.domain.models import PetitionState, PetitionType


def zulu(instant: datetime) -> str:
    """Return a time in ISO 8601, in UTC, with the suffix Z."""
    return instant.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be only white space")
    return text


Instant = Annotated[datetime, PlainSerializer(zulu, return_type=str)]
Hash = Annotated[str, BeforeValidator(lambda digest: b64encode(digest).decode())]


class NotificationPreferences(BaseModel):
    """The notification settings of a petition; stored with it."""

    channel: Literal["WEBHOOK", "IN_APP"]
    webhook_url: Annotated[str, Field(max_length=2048, pattern=r"^https://[^\s/]"), STORABLE] | None = None
    enabled: bool = True

    @model_validator(mode="after")
    def _webhook_has_a_url(self) -> Self:
        if self.channel == "WEBHOOK" and self.webhook_url is None:
            raise ValueError("webhook_url is needed for WEBHOOK")
        return self


class SubmissionRequest(BaseModel):
    """A petition to submit."""

    type: PetitionType
    text: Annotated[str, Field(min_length=1, max_length=10_000), STORABLE, AfterValidator(_not_blank)]
    realm: Annotated[str, Field(max_length=100), STORABLE] | None = None
    submitter_id: UUID | None = None
    notification_preferences: NotificationPreferences | None = None


class SubmissionResponse(RowView):
    """A submitted petition."""

    petition_id: UUID = Field(validation_alias="id")
    state: PetitionState
    type: PetitionType
    content_hash: Hash
    realm: str
    created_at: Instant


class StatusResponse(RowView):
    """The status of a petition."""

    petition_id: UUID = Field(validation_alias="id")
    state: PetitionState
    fate_reason: str | None = Field(validation_alias="fate")
    updated_at: Instant
    status_token: str


class PetitionResponse(StatusResponse, SubmissionResponse):
    """A petition."""

    co_signer_count: int


class WithdrawalRequest(BaseModel):
    """The withdrawal of a petition."""

    requester_id: UUID
    reason: Annotated[str, Field(max_length=1000), STORABLE] | None = None


class CoSignRequest(BaseModel):
    """A co-signature."""

    signer_id: UUID


class CoSignResponse(RowView):
    """A stored co-sign, and the number of co-signs of its petition."""

    co_sign_id: UUID = Field(validation_alias="id")
    petition_id: UUID
    signer_id: UUID
    signed_at: Instant
    co_signer_count: int


class ProblemBody(BaseModel):
    """A refusal (RFC 7807)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    trace_id: str


class TooLargeBody(BaseModel):
    """The request is too large."""

    detail: str


class LimitProblem(ProblemBody):
    """A refusal by a limit, with the governance fields."""

    rate_limit_remaining: int
    rate_limit_limit: int
    rate_limit_current: int
    rate_limit_scope: Literal["submitter", "realm", "global"]
    actor: str
    cycle_id: str
    as_of_seq: int = Field(description="number of the latest event in the ledger")


class CoSignLimitProblem(LimitProblem):
    """The limit of co-signs is reached; `Retry-After` has the seconds to wait."""

    rate_limit_reset_at: str = Field(description="when the next co-sign is admitted, ISO 8601 in UTC")
    nfr_reference: str
    hardening_control: str


class RateLimitProblem(LimitProblem):
    """The limit of submissions is reached; `Retry-After` has the seconds to wait."""

    rate_limit_reset: str = Field(description="when the next petition is admitted, ISO 8601 in UTC")
