"""What the server answers when it cannot do what was asked: problem documents (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from headgate.errors import ConfigError, CostTooHigh, HeadgateError, StoreError
from headgate.observe import redact

Field = tuple[bytes, bytes]

PROBLEM_JSON = b"application/problem+json"


class ProblemAnswer(msgspec.Struct):
    """What went wrong (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str


class Problem(Exception):
    """An answer other than success.

    Attributes:
        status: The status of the response.
        detail: What is wrong and what to do about it, for a person.
        fields: Header fields that belong to the response.
    """

    def __init__(self, status: int, detail: str, fields: tuple[Field, ...] = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.fields = fields

    @property
    def document(self) -> ProblemAnswer:
        """The answer's body. Text that no encoding could carry is written as an escape."""
        detail = self.detail.encode("utf-8", "backslashreplace").decode("utf-8")
        return ProblemAnswer("about:blank", HTTPStatus(self.status).phrase, self.status, detail)


def problem_of(error: HeadgateError) -> Problem:
    """Return the answer to a request that a limiter could not decide.

    422: it can never be admitted as it is (a cost above the capacity, a key that does not fit the rules).
    503: the store failed, and there is no policy to answer instead.
    """
    match error:
        case CostTooHigh() | ConfigError():
            return Problem(422, str(error))
        case StoreError():
            return Problem(503, f"the store cannot be asked: {redact(str(error))}", ((b"retry-after", b"1"),))
        case _:
            return Problem(500, "the request could not be answered; the server's log says why")
