"""Refusals in an OpenAPI document. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headgate.http.limit import RequestLimit
from headgate.http.problems import TOO_LARGE, TOO_MANY_REQUESTS

_INTEGER = {"type": "integer", "minimum": 0}
_LIST = {"type": "string"}

_PROBLEM = {
    "type": "object",
    "title": "RateLimitProblem",
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "violated-policies": {"type": "array", "items": {"type": "string"}},
        "retry_after": {
            "type": "integer",
            "description": "Seconds to wait; absent if waiting does not help.",
        },
    },
}
PROBLEM_NAME = "RateLimitProblem"


def add_refusals(
    document: dict[str, Any], operations: Iterable[tuple[str, str, list[RequestLimit[Any]]]]
) -> None:
    """Add the refusal responses to each operation (path, method, its limits); existing descriptions are kept."""
    for path, method, limits in operations:
        operation = document.get("paths", {}).get(path, {}).get(method)
        if operation is None:
            continue  # not part of the document
        responses = operation.setdefault("responses", {})
        responses.setdefault(str(TOO_MANY_REQUESTS), _refusal("Too many requests", _fields(limits)))
        if any(callable(limit.cost) for limit in limits):
            responses.setdefault(str(TOO_LARGE), _refusal("Costs more than is ever admitted at once", {}))
        document.setdefault("components", {}).setdefault("schemas", {}).setdefault(PROBLEM_NAME, _PROBLEM)


def _refusal(description: str, headers: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{PROBLEM_NAME}"}
    response: dict[str, Any] = {
        "description": description,
        "content": {"application/problem+json": {"schema": schema}},
    }
    return {**response, "headers": headers} if headers else response


def _fields(limits: Iterable[RequestLimit[Any]]) -> dict[str, Any]:
    names = [name for limit in limits for name in limit.version.writer.headers.names]
    return {
        name: {"description": _DESCRIPTIONS[name], "schema": _LIST if name in _LISTS else _INTEGER}
        for name in ("Retry-After", *names)
    }


_LISTS = ("RateLimit-Policy", "RateLimit")
_DESCRIPTIONS = {
    "Retry-After": "Seconds to wait; absent if waiting does not help.",
    "RateLimit-Policy": "What is allowed, as a structured field.",
    "RateLimit": "What is left, as a structured field.",
    "RateLimit-Limit": "The maximum number of units.",
    "RateLimit-Remaining": "The remaining units.",
    "RateLimit-Reset": "Seconds until all units are available again.",
    "X-RateLimit-Limit": "The maximum number of units.",
    "X-RateLimit-Remaining": "The remaining units.",
    "X-RateLimit-Reset": "The time when all units are available again.",
}
