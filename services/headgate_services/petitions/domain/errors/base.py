"""What all errors of the service have in common.

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


class PetitionError(Exception):
    """Why a request about a petition was refused, in a sentence for the client."""
