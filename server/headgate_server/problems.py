"""Problem documents (RFC 9457): the bodies of all errors."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from msgspec import UNSET, UnsetType

from headgate import CostTooHigh

Field = tuple[bytes, bytes]

PROBLEM_JSON = b"application/problem+json"


class ProblemAnswer(msgspec.Struct):
    """An error (RFC 9457). `cost`, `capacity`, `rule` and `unit` are present if the cost can never be admitted."""

    type: str
    title: str
    status: int
    detail: str
    cost: int | UnsetType = UNSET
    capacity: int | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    unit: str | UnsetType = UNSET


class ApiProblem(Exception):
    """An error response.

    Attributes:
        status: The status of the response.
        detail: The error, and what to do about it.
        fields: Additional header fields.
        excess: The cost that can never be admitted, if that is the error.
    """

    def __init__(
        self, status: int, detail: str, fields: tuple[Field, ...] = (), excess: CostTooHigh | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.fields = fields
        self.excess = excess

    @property
    def document(self) -> ProblemAnswer:
        """The body; text that is not valid Unicode is escaped."""
        detail = self.detail.encode("utf-8", "backslashreplace").decode("utf-8")
        answer = ProblemAnswer("about:blank", HTTPStatus(self.status).phrase, self.status, detail)
        if self.excess is not None:
            answer.cost, answer.capacity = self.excess.cost, self.excess.capacity
            answer.rule, answer.unit = self.excess.rule, self.excess.unit
        return answer
