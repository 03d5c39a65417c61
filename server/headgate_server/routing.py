"""Routes, and the router that finds the route of a request.

The list of routes is a value: the router and the OpenAPI document are made from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from msgspec import Struct

from headgate.policy import Permission
from headgate_server.access import HeaderFields, Needed
from headgate_server.problems import ApiProblem

JSON = "application/json"

MAX_CACHED = 128
"""Bytes of the longest path whose route is cached."""


@dataclass(frozen=True)
class EndpointDoc:
    """The documentation of an endpoint.

    Attributes:
        name: The name in generated clients.
        summary: One line.
        text: More text.
        values: Example values of the placeholders.
        body: Example body.
        answer: Example response to it.
        media_type: Media type of the response.
        problems: Additional statuses of errors.
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
        path: The path with placeholders, such as `/v1/limiters/{name}`.
        needs: The required permission.
        handle: Called with the request (if `wants_request`), the body (if it `takes` one) and the values of the
            placeholders; returns the answer.
        takes: The type of the body; `None` without a body.
        gives: The type of the answer.
        wants_request: Whether `handle` gets the request.
        charges: Whether it charges a limiter, so that it accepts an `Idempotency-Key`.
        doc: The documentation; `None` to leave the route out of the OpenAPI document.
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
    """The parts of a request that some endpoints need."""

    fields: HeaderFields
    may: frozenset[Permission]
    caller: str = ""
    """The digest of the token; empty without one."""
    name: str = ""
    """The name of the token in the policy."""
    scope: Mapping[str, Any] = MappingProxyType({})
    """The ASGI scope."""


@dataclass(slots=True)
class _Node:
    """A part of a path: its children, and the routes that end here."""

    named: dict[str, _Node] = field(default_factory=dict)
    any: _Node | None = None
    endpoints: dict[str, Route] = field(default_factory=dict)


class Router:
    """Finds the route of a request."""

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
        """Return the route and the values of its placeholders.

        Args:
            method: The HTTP method.
            path: The raw path without the query; a slash within a name is written `%2F`.

        Raises:
            ApiProblem: 404 if the path is unknown, 405 if it has other methods.
        """
        # Paths of limiters are few and frequent; ids of holds are not.
        if len(path) <= MAX_CACHED and not path.startswith(b"/v1/holds/"):
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
            raise ApiProblem(404, "unknown path; GET /openapi.json lists all paths")
        found = node.endpoints.get("GET" if method == "HEAD" else method)
        if found is None:
            raise _not_allowed(node.endpoints)
        return found, tuple(values)


def _not_allowed(endpoints: dict[str, Route]) -> ApiProblem:
    allowed = sorted({*endpoints, "HEAD"} if "GET" in endpoints else endpoints)
    listed = ", ".join(allowed)
    return ApiProblem(405, f"this path supports only {listed}", ((b"allow", listed.encode()),))
