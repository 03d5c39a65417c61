"""Why a request is refused.

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
    """Why a request about a petition was refused, in a sentence for the client."""


class RateLimitExceededError(PetitionError):
    """A submitter, a realm or all together have reached the limit (FR-1.5, HC-4). Nothing was counted.

    Attributes:
        submitter_id: Who was refused.
        current_count: What has been counted in the window.
        limit: How much may be.
        reset_at: When the next petition is admitted if no one else comes.
        retry_after_seconds: How long that is, in whole seconds, rounded up.
        scope: Whose limit it was: `submitter`, `realm` or `global`.
        window_minutes: How long the window is.
        counter: What is counted: `submission` or `co_sign`.
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
    """Too many petitions wait already.

    Attributes:
        queue_depth: How many.
        threshold: How many may.
        retry_after_seconds: When to come back.
    """

    def __init__(self, queue_depth: int, threshold: int, retry_after_seconds: int) -> None:
        super().__init__("Petition queue capacity exceeded. Please retry later.")
        self.queue_depth = queue_depth
        self.threshold = threshold
        self.retry_after_seconds = retry_after_seconds


class SystemHaltedError(PetitionError):
    """Nothing is written while the system is halted; the message is the reason."""


class DatabaseUnavailableError(PetitionError):
    """The count is unknown, so nothing is admitted.

    Attributes:
        retry_after_seconds: When to come back.
    """

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__("The database cannot be asked, so nothing was submitted. Please retry later.")
        self.retry_after_seconds = max(1, retry_after_seconds)


class CommitUnknownError(PetitionError):
    """The database did not confirm a commit.

    Attributes:
        retry_after_seconds: When the database may be asked again.
        petition_id: The petition to look for; `None` if there is none to name.
    """

    def __init__(self, retry_after_seconds: int, petition_id: UUID | None = None) -> None:
        super().__init__(
            "The database did not confirm the change, which may have been made or not. "
            "Look for the petition before you try again."
        )
        self.retry_after_seconds = max(1, retry_after_seconds)
        self.petition_id = petition_id


class InvalidRealmError(PetitionError):
    """There is no such realm."""

    def __init__(self, realm: str) -> None:
        super().__init__(f"Unknown realm: {realm}")
        self.realm = realm


class InvalidPetitionError(PetitionError):
    """It cannot be submitted, or changed, like this."""


class NotYourPetitionError(PetitionError):
    """Only its submitter may withdraw a petition."""


class AlreadyCoSignedError(PetitionError):
    """An identity co-signs a petition once."""

    def __init__(self, petition_id: UUID) -> None:
        super().__init__(f"Petition {petition_id} has been co-signed by this identity")


class PetitionNotFoundError(PetitionError):
    """There is no such petition."""

    def __init__(self, petition_id: UUID) -> None:
        super().__init__(f"Petition {petition_id} not found")
