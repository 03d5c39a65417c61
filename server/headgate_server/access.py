"""Access control.

If the policy has tokens, a token's permissions apply, and requests without a token can only read public paths. If the policy
has no tokens, requests are unauthenticated on loopback and remote clients are refused: the request must have arrived at a
loopback address, and its `Host` must name one. The latter protects against DNS rebinding, and bodies must be
`application/json`, which a web page cannot send across origins without a preflight. Forwarded requests are refused, because
their origin is unknown.

Tokens are read from the current policy, so a removed token is invalid after the reload. A server that had tokens never
becomes open when the last one is removed.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, Literal, NamedTuple

from headgate.policy import PERMISSIONS, AsyncLivePolicy, Permission, TokenPolicy
from headgate_server.logs import AUDIT, STRANGER
from headgate_server.problems import ApiProblem, Field

audit = logging.getLogger(AUDIT)

Needed = Literal["nothing", "token", "decide", "administer", "gate"]
"""The permission that a request needs; `token` is any valid token."""

GATE_TOKEN = b"headgate-token"
"""The field with the token of a proxy, because `Authorization` contains the credentials of its client."""

_FORWARDED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
"""Header fields that proxies add."""

_CHALLENGE: Field = (b"www-authenticate", b'Bearer realm="headgate"')
_BAD_TOKEN: Field = (b"www-authenticate", b'Bearer realm="headgate", error="invalid_token"')
_FORBIDDEN: Field = (b"www-authenticate", b'Bearer realm="headgate", error="insufficient_scope"')


HeaderFields = Mapping[bytes, bytes]
"""The header fields of a request by name; repeated fields are joined by commas."""


def header_fields(headers: Sequence[tuple[bytes, bytes]]) -> HeaderFields:
    """Return the header fields of a request by name."""
    fields = dict(headers)
    if len(fields) == len(headers):
        return fields
    several: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        several.setdefault(name, []).append(value)
    return {name: b", ".join(values) for name, values in several.items()}


class Access(NamedTuple):
    """The permissions and the caller of a request.

    Attributes:
        may: The permissions.
        caller: The digest of the caller's token; empty without one.
        name: The name of that token in the policy.
    """

    may: frozenset[Permission]
    caller: str = ""
    name: str = ""


class AccessControl:
    """Checks requests by the newest policy.

    Args:
        live: The policy.

    Attributes:
        had_tokens: Whether the policy ever had tokens. If they are removed, every request is refused, because a truncated
            file must not open the server.
    """

    def __init__(self, live: AsyncLivePolicy) -> None:
        self._live = live
        self.had_tokens = False
        self._update()
        live.on_change(self._update)

    def _update(self) -> None:
        self.had_tokens |= bool(self._live.policy.server.tokens)

    def check(self, needed: Needed, scope: Mapping[str, Any], fields: HeaderFields) -> Access:
        """Check the permission of a request, and return the access of its caller.

        Args:
            needed: The permission that the request needs.
            scope: The request.
            fields: Its header fields.

        Raises:
            ApiProblem: 401 without a valid token; 403 if the token lacks the permission, or without tokens if the request
                may come from another machine; 421 if its `Host` is not a loopback name.
        """
        tokens = self._live.policy.server.tokens
        if not tokens and not self.had_tokens:
            if needed == "gate":
                _check_local_proxy(scope)
            else:
                _check_local(scope, fields)
            return _EVERYTHING
        if needed == "nothing":
            return _NOTHING
        if not tokens:
            raise ApiProblem(
                403,
                "the policy no longer has tokens; add them again, or restart the server to run it without",
            )
        try:
            return _check_token(tokens, needed, fields)
        except ApiProblem as problem:
            if problem.fields != (_CHALLENGE,):  # browsers start without a token
                client = (scope.get("client") or ("an unknown address",))[0]
                is_stranger = problem.status == 401
                audit.warning(
                    "refused a request from %s: %s",
                    client,
                    problem.detail,
                    extra={STRANGER: f"{client}: {problem.detail}"} if is_stranger else None,
                )
            raise


_NOTHING = Access(frozenset())
_EVERYTHING = Access(frozenset(PERMISSIONS))


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether an address or host name belongs to the loopback interface."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _check_local_proxy(scope: Mapping[str, Any]) -> None:
    """Refuse a proxy on another machine. A local one may send forwarded fields and any `Host`: it forwards requests."""
    arrived_at = (scope.get("server") or ("",))[0]
    if not (is_loopback(arrived_at) or arrived_at.startswith("/")):  # a Unix socket
        raise ApiProblem(
            403,
            "the policy has no tokens, so only this machine has access; add [server.tokens.NAME] to the policy",
        )


def _check_local(scope: Mapping[str, Any], fields: HeaderFields) -> None:
    _check_local_proxy(scope)
    if not _FORWARDED.isdisjoint(fields):
        raise ApiProblem(
            403,
            "a proxy forwarded this request, perhaps from another machine, and the policy has no tokens; "
            "add [server.tokens.NAME] to the policy",
        )
    if not _is_loopback_authority(fields.get(b"host", b"")):
        raise ApiProblem(
            421,
            "without tokens the server accepts only loopback names, such as http://127.0.0.1 or http://localhost",
        )


@lru_cache(maxsize=256)
def _is_loopback_authority(authority: bytes) -> bool:
    """Return whether a `Host` field names the loopback interface; the port does not matter."""
    text = authority.decode("latin-1").strip()
    if "," in text:  # several fields
        return False
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return is_loopback(host) and (not port or port.startswith(":"))
    host, _, port = text.partition(":")
    return is_loopback(host) and ":" not in port


def _check_token(tokens: Mapping[str, TokenPolicy], needed: Needed, fields: HeaderFields) -> Access:
    if needed == "gate":
        token = fields.get(GATE_TOKEN, b"")
        if not token.strip():
            raise ApiProblem(401, "the proxy needs a token: Headgate-Token: TOKEN", (_BAD_TOKEN,))
    else:
        scheme, _, token = fields.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise ApiProblem(401, "a token is needed: Authorization: Bearer TOKEN", (_CHALLENGE,))
    digest = sha256(token.strip()).hexdigest()
    name = _find(tokens, digest)
    if name is None:
        raise ApiProblem(401, "this token is not in the policy", (_BAD_TOKEN,))
    found = tokens[name]
    if found.expires is not None and time.time() >= found.expires:
        raise ApiProblem(401, f"the token {name!r} has expired", (_BAD_TOKEN,))
    if needed not in ("token", *found.may):
        raise ApiProblem(403, f"the token {name!r} may not {needed}", (_FORBIDDEN,))
    return Access(found.may, digest, name)


def _find(tokens: Mapping[str, TokenPolicy], digest: str) -> str | None:
    """Return the name of the token with this digest, or `None`.

    Every token is compared, each in constant time, so that the response time reveals nothing.
    """
    found: str | None = None
    for name, entry in tokens.items():
        if hmac.compare_digest(entry.sha256, digest):
            found = name
    return found
