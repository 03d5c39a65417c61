"""The gate for proxies that send an HTTP subrequest before they forward a request: nginx, Caddy, Traefik. 204 means
forward it, 429 means refuse it; both have the header fields of a decision. The policy names the origin of each
limiter's key. A request without that header field or cookie is counted by the address of its client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qs

from headgate.http import Writer, by_address, by_header, refusal
from headgate.keys import Key, PlainKey
from headgate.policy import AsyncLivePolicy, AsyncVersion, GatePolicy, KeySource
from headgate_server.problems import ApiProblem
from headgate_server.replies import PRIVATE, Reply
from headgate_server.routing import ApiRequest, Route

PATH = "/v1/gate/{name}"
LONGEST_COOKIE = 128
"""Bytes of the longest cookie that is a key; a longer one is hashed."""

_DENY = frozenset({"403", "429"})

KeyOf = Callable[[Mapping[str, Any]], Key]


class ProxyGate:
    """Answers for the clients of a proxy.

    Args:
        live: The limiters.
    """

    def __init__(self, live: AsyncLivePolicy) -> None:
        self._live = live
        self._keys: dict[str, tuple[GatePolicy, KeyOf]] = {}
        self._writers: dict[str, tuple[AsyncVersion, Writer]] = {}

    async def ask(self, request: ApiRequest, name: str) -> Reply:
        """Decide one request of a client."""
        denial = _denial(request.scope)
        key = self._key_of(name)(request.scope)
        version = self._live[name].current
        asked = version.request("hit", key)
        decision, _ = await version.gate.decide(asked)
        terms = None
        if version.terms_for is not None:
            tier, quotas = version.terms_for(key, None, None)
            terms = tier if quotas is None else quotas
        writer = self._writer(name, version)
        fields = tuple(writer.fields(decision, time.time_ns() // 1_000, terms))
        if decision.allowed:
            return Reply(204, (*PRIVATE, *fields), b"")
        answer = refusal(decision, writer.names, request.fields.get(b"accept"))
        kind = tuple(field for field in answer.fields if field[0] == b"content-type")
        return Reply(denial or answer.status, (*kind, *PRIVATE, *fields), answer.body)

    def _key_of(self, name: str) -> KeyOf:
        gate = self._live.policy.gate
        known = self._keys.get(name)
        if known is not None and known[0] is gate:
            return known[1]
        if name not in gate.limiters:
            raise ApiProblem(
                404, f"there is no gate {name[:80]!r}; write its key in [gate.limiters] of the policy"
            )
        function = key_function(gate, gate.limiters[name])
        self._keys[name] = gate, function
        return function

    def _writer(self, name: str, version: AsyncVersion) -> Writer:
        known = self._writers.get(name)
        if known is None or known[0] is not version:
            known = self._writers[name] = version, Writer(version.rules, version.policy.headers)
        return known[1]


def gate_routes(gate: ProxyGate) -> list[Route]:
    """Return the routes of the gate. They are not in the OpenAPI document: proxies call them, not programs."""
    return [Route(method, PATH, "gate", gate.ask, wants_request=True) for method in ("GET", "POST")]


def key_function(gate: GatePolicy, sources: Mapping[str | None, KeySource]) -> KeyOf:
    """Return the function from an ASGI scope to the key of a limiter."""
    address = by_address(proxies=gate.proxies)
    by_scope = {scope: _part_function(source, address) for scope, source in sources.items()}
    if None in by_scope:
        return by_scope[None]
    return lambda scope: {str(name): part(scope) for name, part in by_scope.items()}


def _part_function(
    source: KeySource, address: Callable[[Mapping[str, Any]], str]
) -> Callable[[Mapping[str, Any]], PlainKey]:
    if source.kind == "address":
        return address
    find = by_header(source.name) if source.kind == "header" else _by_cookie(source.name)

    def part(scope: Mapping[str, Any]) -> PlainKey:
        found = find(scope)
        # Bytes never equal text, so a client cannot send the address of another one.
        return found if isinstance(found, str | bytes) else address(scope).encode()

    return part


def _by_cookie(name: str) -> Callable[[Mapping[str, Any]], PlainKey | None]:
    wanted = name.encode()

    def cookie(scope: Mapping[str, Any]) -> PlainKey | None:
        for field, value in scope["headers"]:
            if field != b"cookie":
                continue
            for pair in value.split(b";"):
                found, _, content = pair.strip().partition(b"=")
                if found == wanted and content:
                    text: str = content.decode("latin-1")
                    return text if len(content) <= LONGEST_COOKIE else blake2b(content).digest()
        return None

    return cookie


def _denial(scope: Mapping[str, Any]) -> int | None:
    """Return the status of refusals in the query; `None` for the default."""
    query = scope.get("query_string", b"")
    if not query:
        return None
    wanted = parse_qs(query.decode("latin-1")).get("deny", ["429"])[-1]
    if wanted not in _DENY:
        raise ApiProblem(400, f"deny is 403 or 429, not {wanted[:20]!r}")
    return 403 if wanted == "403" else None
