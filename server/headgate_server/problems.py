"""What the server answers when it cannot do what was asked: problem documents (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from msgspec import UNSET, UnsetType

from headgate import CostTooHigh

Field = tuple[bytes, bytes]

PROBLEM_JSON = b"application/problem+json"


class ProblemAnswer(msgspec.Struct):
    """What went wrong (RFC 9457). The last four are there if a cost can never be admitted."""

    type: str
    title: str
    status: int
    detail: str
    cost: int | UnsetType = UNSET
    capacity: int | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    unit: str | UnsetType = UNSET


class ApiProblem(Exception):
    """An answer other than success.

    Attributes:
        status: The status of the response.
        detail: What is wrong and what to do about it, for a person.
        fields: Header fields that belong to the response.
        excess: The cost that can never be admitted, if that is it.
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
        """The answer's body. Text that no encoding could carry is written as an escape."""
        detail = self.detail.encode("utf-8", "backslashreplace").decode("utf-8")
        answer = ProblemAnswer("about:blank", HTTPStatus(self.status).phrase, self.status, detail)
        if self.excess is not None:
            answer.cost, answer.capacity = self.excess.cost, self.excess.capacity
            answer.rule, answer.unit = self.excess.rule, self.excess.unit
        return answer
