"""Which endpoint a request is for.

The table of endpoints is a value: the router finds among them, and the OpenAPI document describes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

from msgspec import Struct

from headgate.policy import Permission
from headgate_server.access import HeaderFields, Needed
from headgate_server.problems import ApiProblem

JSON = "application/json"

LONGEST_CACHED = 128
"""Bytes of the longest path whose route is remembered."""


@dataclass(frozen=True)
class EndpointDoc:
    """The documentation of an endpoint.

    Attributes:
        name: Its name in generated clients.
        summary: One line.
        text: The rest.
        values: Examples of the placeholders.
        ask: Example of a body.
        answer: Example of the answer to it.
        media_type: Of the answer.
        problems: Statuses besides those that follow from the endpoint's nature.
    """

    name: str
    summary: str
    text: str = ""
    values: dict[str, str] = field(default_factory=dict)
    body: Any = None
    answer: Any = None
    media_type: str = JSON
    problems: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the API.

    Attributes:
        method: The HTTP method; `HEAD` is answered wherever `GET` is.
        path: With placeholders, as in `/v1/limiters/{name}`.
        needs: The permission that it takes.
        handle: Called with the request (if it wants it), the body (if there is one) and the values of the placeholders;
            returns the answer.
        takes: The type of the body; `None` if there is none.
        gives: The type of the answer.
        wants_request: Whether `handle` is given the request.
        charges: Whether it charges a limiter, so that it takes an `Idempotency-Key`.
        doc: For the OpenAPI document; `None` leaves it out there.
    """

    method: str
    path: str
    needs: Needed
    handle: Callable[..., Awaitable[Any]]
    takes: type[Struct] | None = None
    gives: Any = None
    wants_request: bool = False
    charges: bool = False
    doc: EndpointDoc | None = None

    def documented(self, *arguments: Any, **more: Any) -> Route:
        """Return the route with its documentation; the arguments are those of `EndpointDoc`."""
        return replace(self, doc=EndpointDoc(*arguments, **more))


class ApiRequest(NamedTuple):
    """What some endpoints want to know about a request."""

    fields: HeaderFields
    may: frozenset[Permission]
    caller: str = ""
    """The digest of the token; empty if there is none."""
    name: str = ""
    """What the policy calls the token."""


@dataclass(slots=True)
class _Node:
    """What may follow a part of a path."""

    named: dict[str, _Node] = field(default_factory=dict)
    any: _Node | None = None
    endpoints: dict[str, Route] = field(default_factory=dict)


class Router:
    """Finds the endpoint of a request."""

    def __init__(self, endpoints: Iterable[Route]) -> None:
        self._root = _Node()
        for endpoint in endpoints:
            node = self._root
            for part in endpoint.path.split("/")[1:]:
                if part.startswith("{"):
                    node.any = node.any or _Node()
                    node = node.any
                else:
                    node = node.named.setdefault(part, _Node())
            node.endpoints[endpoint.method] = endpoint
        self._cached = lru_cache(maxsize=256)(self._find)

    def find(self, method: str, path: bytes) -> tuple[Route, tuple[str, ...]]:
        """Return the endpoint and the values of its placeholders.

        Args:
            method: As it was sent.
            path: As it was sent, without the query: a slash inside of a name is written `%2F`.

        Raises:
            ApiProblem: 404 if there is none, 405 if there is one for other methods.
        """
        # Names of limiters are few and asked for again and again; ids of holds are not.
        if len(path) <= LONGEST_CACHED and not path.startswith(b"/v1/holds/"):
            return self._cached(method, path)
        return self._find(method, path)

    def _find(self, method: str, path: bytes) -> tuple[Route, tuple[str, ...]]:
        node: _Node | None = self._root
        values: list[str] = []
        for part in path.decode("latin-1").split("/")[1:]:
            assert node is not None
            following = node.named.get(part)
            if following is None:
                following = node.any
                values.append(unquote(part) if "%" in part else part)
            node = following
            if node is None:
                break
        if node is None or not node.endpoints:
            raise ApiProblem(404, "there is no such path; GET /openapi.json lists them all")
        found = node.endpoints.get("GET" if method == "HEAD" else method)
        if found is None:
            raise _not_allowed(node.endpoints)
        return found, tuple(values)


def _not_allowed(endpoints: dict[str, Route]) -> ApiProblem:
    allowed = sorted({*endpoints, "HEAD"} if "GET" in endpoints else endpoints)
    listed = ", ".join(allowed)
    return ApiProblem(405, f"this path answers to {listed} only", ((b"allow", listed.encode()),))
