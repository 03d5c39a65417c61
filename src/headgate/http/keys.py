"""Key functions: from an ASGI scope to the key that a request is counted by.

The functions in this module return key functions: `by_address(proxies=["10.0.0.0/8"])` is a key function. Key functions
read the scope as a mapping, so they also accept Starlette and FastAPI requests, which are mappings.

If a key function returns `None`, the request has no such key and is counted by its address instead. This fallback key is
bytes, which never equal text, so a user name cannot collide with another client's address.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, Literal

from headgate._checks import check_count, check_list, check_text
from headgate.errors import ConfigError
from headgate.http.address import UNKNOWN, Proxies, client_address, peer_key
from headgate.keys import LONGEST_KEY, Key

Scope = Mapping[str, Any]
KeyFunction = Callable[[Any], Key | None]

UNROUTED = "*"
"""The shared route of all requests that match no route, so that clients cannot invent routes to count by."""


def by_address(
    *,
    proxies: Iterable[str] = (),
    hops: int | None = None,
    header: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for",
    ipv6_prefix: int = 64,
) -> Callable[[Scope], str]:
    """Return a key function by the client's address.

    Without `proxies` or `hops` the key is the address of the connected peer; header fields are ignored. See
    `headgate.http.address.Proxies` for the arguments.

    Args:
        proxies: Addresses and networks of the proxies in front of the service.
        hops: The number of proxies, instead of `proxies`.
        header: The field that the proxies write.
        ipv6_prefix: The number of leading bits of an IPv6 address that identify a client.
    """
    check_count("ipv6_prefix", ipv6_prefix, 1, 128)
    named = check_list("proxies", proxies, object, "['10.0.0.0/8']")
    if not named and hops is None:
        return _on_scope(_by_peer(ipv6_prefix))
    trusted = Proxies(named, hops, header)
    name = header.encode()

    def address(scope: Scope) -> str:
        client = scope.get("client")
        forwarded = [value.decode("latin-1") for field, value in scope["headers"] if field == name]
        return client_address(client[0] if client else None, forwarded, trusted, ipv6_prefix=ipv6_prefix)

    return _on_scope(address)


def by_header(name: str) -> KeyFunction:
    """Return a key function by a header field, like `X-API-Key`; if the field is missing or empty, by address.

    Use it only for fields that were verified: before authentication a client can invent a new key for every request.
    """
    wanted = check_text("the name of a header field", name).lower().encode("latin-1")

    def header(scope: Scope) -> Key | None:
        for field, value in scope["headers"]:
            if field == wanted and value:
                # Hash long values, as a store would: a field may have several thousand bytes.
                text: str = value.decode("latin-1")
                return text if len(value) <= LONGEST_KEY else blake2b(value).digest()
        return None

    return _on_scope(header)


def by_user(attribute: str = "id") -> KeyFunction:
    """Return a key function by the authenticated user in the scope; without one, by address.

    The user is `scope["user"]` (Starlette's AuthenticationMiddleware) or `request.state.user`, and its `attribute` is
    the key. A user whose `is_authenticated` is false is ignored.

    The code that sets the user must run before the limit: as an outer middleware, or as an earlier dependency.
    """
    check_text("the name of a user's attribute", attribute)

    def user_key(scope: Scope) -> Key | None:
        user = scope.get("user") or scope.get("state", {}).get("user")
        if user is None or not getattr(user, "is_authenticated", True):
            return None
        value = user.get(attribute) if isinstance(user, Mapping) else getattr(user, attribute, None)
        if value is None:
            raise ConfigError(
                f"the user {type(user).__name__} has no {attribute!r}; name its id: by_user('…')"
            )
        return value if isinstance(value, bytes) else str(value)

    return _on_scope(user_key)


def by_route() -> KeyFunction:
    """Return a key function by the template of the route, `/items/{id}`, never by the path.

    In a FastAPI dependency the route is known. In a middleware around a Starlette application it is looked up, which
    costs as much as routing; requests that match no route share one key.
    """
    return _on_scope(route_template)


def by_all(*functions: KeyFunction) -> KeyFunction:
    """Return a key function that joins several keys: `by_all(by_address(), by_route())` counts per client and route.

    If one of the functions returns `None`, the request is counted by address.
    """
    for function in functions:
        check_function("by_all", function, can_await=False)

    def joined(request: Any) -> Key | None:
        parts = []
        for function in functions:
            key = function(request)
            if key is None:
                return None
            if not isinstance(key, str | bytes):
                raise ConfigError(f"{function!r} returned {key!r}; only text and bytes can be joined")
            # The length prefix prevents two different sets of keys from joining to the same text.
            parts.append(f"{len(key)}:{key!r}")
        return "".join(parts)

    return _on_scope(joined) if all(map(takes_scope, functions)) else joined


def check_function(what: str, function: Any, *, can_await: bool = True) -> None:
    """Raise `ConfigError` unless this is a function of the request; also if it is async and cannot be awaited here."""
    if function in (by_address, by_header, by_user, by_route, by_all):
        raise ConfigError(f"{what} takes functions of the request: write {function.__name__}(…)")
    if not callable(function):
        raise ConfigError(f"{what} takes functions of the request, not {function!r}")
    if not can_await and is_async(function):
        raise ConfigError(f"{what} cannot await: write a plain function instead of {function!r}")


def is_async(part: object) -> bool:
    """Return whether calling the object returns an awaitable."""
    # This includes objects whose __call__ is a coroutine function.
    return inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(type(part).__call__)


def takes_scope(function: object) -> bool:
    """Return whether this is a key function of this module, which needs only the scope."""
    return getattr(function, "takes_scope", False)


def route_template(scope: Scope) -> str:
    """Return the template of the route that a request matched or would match; `*` if no route matches."""
    route = matched_route(scope)
    # The attribute names in Starlette, Flask and Django.
    names = ("path_format", "path", "rule", "route")
    template: str | None = next((found for name in names if (found := getattr(route, name, None))), None)
    if template is None:
        return _look_up(getattr(scope.get("app"), "routes", ()), scope) or UNROUTED
    return _mounted_at(scope, template) + template


def _by_peer(ipv6_prefix: int) -> Callable[[Scope], str]:
    def address(scope: Scope) -> str:
        client = scope.get("client")
        host: str | None = client[0] if client else None
        if not host:
            return UNKNOWN
        # An IPv4 address is already its key; this runs for every request.
        return host if ":" not in host and len(host) < 16 else peer_key(host, ipv6_prefix)

    return address


def _on_scope(function: Callable[[Scope], Any]) -> Callable[[Scope], Any]:
    function.takes_scope = True  # type: ignore[attr-defined]
    return function


def matched_route(scope: Scope) -> object:
    """Return the matched route; for a router included in a FastAPI application, the route with its prefix."""
    route = scope.get("route")
    context = scope.get("fastapi", {}).get("effective_route_context")
    return context if context is not None and context.original_route is route else route


def _mounted_at(scope: Scope, template: str) -> str:
    """Return the path of the mounts above a route, with parameter names in place of their values."""
    prefix: str = scope.get("root_path", "").removeprefix(scope.get("app_root_path", ""))
    for name, value in scope.get("path_params", {}).items():
        if f"{{{name}}}" not in template and f"{{{name}:" not in template:
            prefix = "/".join(f"{{{name}}}" if part == str(value) else part for part in prefix.split("/"))
    return prefix


def _look_up(routes: Iterable[Any], scope: Scope) -> str | None:
    """Return the template of the first route that matches fully, in the order of Starlette's router."""
    for route in routes:
        if hasattr(route, "effective_route_contexts"):  # a router included in a FastAPI application
            found = _look_up(route.effective_route_contexts(), scope)
            if found is not None:
                return found
            continue
        match, child_scope = route.matches(scope)
        if match.name == "FULL":
            inner = getattr(route, "routes", None)
            if inner:
                below = _look_up(inner, {**scope, **child_scope})
                return None if below is None else route.path + below
            template: str = getattr(route, "path_format", None) or route.path
            return template
    return None
