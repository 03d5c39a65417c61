"""Responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec

from headgate_server.problems import PROBLEM_JSON, ApiProblem, Field

_encode = msgspec.json.Encoder().encode
PRIVATE: tuple[Field, ...] = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
"""Header fields of every response of the API."""

_JSON: tuple[Field, ...] = ((b"content-type", b"application/json"), *PRIVATE)


class Reply(msgspec.Struct, frozen=True):
    """A complete response."""

    status: int
    fields: tuple[Field, ...]
    body: bytes


class Stream(NamedTuple):
    """A streaming response."""

    fields: tuple[Field, ...]
    pieces: AsyncGenerator[bytes, None]


def json_reply(answer: Any, status: int = 200) -> Reply:
    """Return a JSON response."""
    return Reply(status, _JSON, _encode(answer))


def problem_reply(problem: ApiProblem) -> Reply:
    """Return the response for a problem."""
    fields = ((b"content-type", PROBLEM_JSON), *PRIVATE, *problem.fields)
    return Reply(problem.status, fields, _encode(problem.document))
