"""Why a petition is not taken, not found or not changed."""

from __future__ import annotations

from uuid import UUID

from headgate_services.petitions.domain.errors.base import PetitionError


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
    """Nobody can say how much was submitted, so nothing is admitted.

    Attributes:
        retry_after_seconds: When to come back.
    """

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__("The database cannot be asked, so nothing was submitted. Please retry later.")
        self.retry_after_seconds = max(1, retry_after_seconds)


class CommitUnknownError(PetitionError):
    """The database did not say whether it kept what it was told to keep.

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
    """Only whoever submitted a petition may withdraw it."""


class AlreadyCoSignedError(PetitionError):
    """An identity co-signs a petition once."""

    def __init__(self, petition_id: UUID) -> None:
        super().__init__(f"Petition {petition_id} has been co-signed by this identity")


class PetitionNotFoundError(PetitionError):
    """There is no such petition."""

    def __init__(self, petition_id: UUID) -> None:
        super().__init__(f"Petition {petition_id} not found")
