"""Errors of the service, with their HTTP status.

PetitionError
├── RateLimitExceededError       429
├── QueueOverflowError           503
├── SystemHaltedError            503
├── DatabaseUnavailableError     503
├── CommitUnknownError           503
├── InvalidRealmError            400
├── InvalidPetitionError         400
├── AlreadyCoSignedError         409
├── NotYourPetitionError         403
└── PetitionNotFoundError        404
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

_UNITS = {"submission": "petitions", "co_sign": "co-signs"}


class PetitionError(Exception):
    """A refused request; the message is for the client.

    Attributes:
        retry_after_seconds: Whole seconds until another attempt; `None` if it would be refused too.
    """

    retry_after_seconds: int | None = None


class RateLimitExceededError(PetitionError):
    """The limit of a submitter, of a realm or of all together is reached (FR-1.5, HC-4). Nothing was counted.

    Attributes:
        submitter_id: The refused submitter.
        current_count: The count in the window.
        limit: The limit.
        reset_at: When the next petition is admitted.
        scope: The limit that was reached: `submitter`, `realm` or `global`.
        window_minutes: The length of the window.
        counter: The kind of unit: `submission` or `co_sign`.
    """

    def __init__(
        self,
        submitter_id: UUID,
        current_count: int,
        limit: int,
        reset_at: datetime,
        retry_after_seconds: int = 1800,
        *,
        scope: str = "submitter",
        window_minutes: int = 60,
        counter: str = "submission",
    ) -> None:
        self.submitter_id = submitter_id
        self.current_count = current_count
        self.limit = limit
        self.reset_at = reset_at
        self.retry_after_seconds = max(1, retry_after_seconds)
        self.scope = scope
        self.window_minutes = window_minutes
        self.counter = counter
        per = {1: "minute", 60: "hour"}.get(window_minutes, f"{window_minutes} minutes")
        super().__init__(f"Maximum {limit} {_UNITS.get(counter, counter)} per {per} exceeded")


class QueueOverflowError(PetitionError):
    """The queue is full.

    Attributes:
        queue_depth: The number of waiting petitions.
        threshold: The number at which no more are accepted.
    """

    def __init__(self, queue_depth: int, threshold: int, retry_after_seconds: int) -> None:
        super().__init__("Petition queue capacity exceeded. Please retry later.")
        self.queue_depth = queue_depth
        self.threshold = threshold
        self.retry_after_seconds = retry_after_seconds


class SystemHaltedError(PetitionError):
    """The system is halted and writes nothing; the message is the reason."""

    retry_after_seconds = 3600


class DatabaseUnavailableError(PetitionError):
    """The database is unavailable, so nothing is admitted."""

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__("The database is unavailable, so nothing was submitted. Please retry later.")
        self.retry_after_seconds = max(1, retry_after_seconds)


class CommitUnknownError(PetitionError):
    """The database did not confirm a commit.

    Attributes:
        petition_id: The petition to look for, or None.
    """

    def __init__(self, retry_after_seconds: int, petition_id: UUID | None = None) -> None:
        super().__init__(
            "The database did not confirm the change, which may have been made or not. "
            "Look for the petition before you try again."
        )
        self.retry_after_seconds = max(1, retry_after_seconds)
        self.petition_id = petition_id


class InvalidRealmError(PetitionError):
    """The realm does not exist."""

    def __init__(self, realm: str) -> None:
        super().__init__(f"Unknown realm: {realm}")
        self.realm = realm


class InvalidPetitionError(PetitionError):
    """The petition cannot be submitted or changed this way."""


class NotYourPetitionError(PetitionError):
    """The requester is not the submitter of the petition."""


class AlreadyCoSignedError(PetitionError):
    """The identity has already co-signed the petition."""

    def __init__(self, petition_id: UUID) -> None:
        super().__init__(f"Petition {petition_id} has been co-signed by this identity")


class PetitionNotFoundError(PetitionError):
    """The petition does not exist."""

    def __init__(self, petition_id: UUID) -> None:
        super().__init__(f"Petition {petition_id} not found")
