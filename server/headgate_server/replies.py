"""Answers, ready to be sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec

from headgate_server.problems import PROBLEM_JSON, ApiProblem, Field

_encode = msgspec.json.Encoder().encode
PRIVATE: tuple[Field, ...] = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
"""On every answer of the API: it is true only now, and is nothing but what it says it is."""

_JSON: tuple[Field, ...] = ((b"content-type", b"application/json"), *PRIVATE)


class Reply(msgspec.Struct, frozen=True):
    """An answer that is complete."""

    status: int
    fields: tuple[Field, ...]
    body: bytes


class Stream(NamedTuple):
    """An answer that goes on."""

    fields: tuple[Field, ...]
    pieces: AsyncGenerator[bytes, None]


def json_reply(answer: Any, status: int = 200) -> Reply:
    """Return an answer as JSON."""
    return Reply(status, _JSON, _encode(answer))


def problem_reply(problem: ApiProblem) -> Reply:
    """Return a problem as its document."""
    fields = ((b"content-type", PROBLEM_JSON), *PRIVATE, *problem.fields)
    return Reply(problem.status, fields, _encode(problem.document))
