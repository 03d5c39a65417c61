"""Who may do what.

With tokens in the policy, a caller may do what the policy permits its token, and without one only read what is public.
Without tokens in the policy, requests are unauthenticated on loopback and remote clients are refused: the request must
have arrived at a loopback address, and its `Host` must name one. The latter keeps out web pages whose own name was
resolved to 127.0.0.1 (DNS rebinding); that bodies must be `application/json` keeps out what a page may send without
asking. A request that a proxy has passed on may come from anywhere, and is refused.

All of it is read from the newest policy, so a token that was taken out of the file ends with the reload. A server that has
had tokens is never open without them.
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

from headgate.policy import PERMISSIONS, Permission, Policy, TokenPolicy
from headgate_server.logs import AUDIT, STRANGER
from headgate_server.problems import ApiProblem, Field

audit = logging.getLogger(AUDIT)

Needed = Literal["nothing", "token", "decide", "administer"]
"""What a request needs: `token` is any valid one."""

_PASSED_ON = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
"""Fields by which proxies say that they have passed on a request."""

_CHALLENGE: Field = (b"www-authenticate", b'Bearer realm="headgate"')
_BAD_TOKEN: Field = (b"www-authenticate", b'Bearer realm="headgate", error="invalid_token"')
_TOO_LITTLE: Field = (b"www-authenticate", b'Bearer realm="headgate", error="insufficient_scope"')


HeaderFields = Mapping[bytes, bytes]
"""The header fields of a request; one that is there several times is joined by commas, so that it is ambiguous."""


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
    """What a request may do, and who makes it.

    Attributes:
        may: All that the caller may do.
        caller: The digest of the caller's token; empty without one.
        name: What the policy calls that token.
    """

    may: frozenset[Permission]
    caller: str = ""
    name: str = ""


def check_access(
    policy: Policy,
    needed: Needed,
    scope: Mapping[str, Any],
    fields: HeaderFields,
    *,
    had_tokens: bool = False,
) -> Access:
    """Refuse a request that may not be made; return the access of its caller.

    Args:
        policy: What holds now.
        needed: What the request needs.
        scope: The request.
        fields: Its header fields.
        had_tokens: Whether the policy has had tokens before. If they are gone, so is access: a file that was cut off must
            not open the server.

    Raises:
        ApiProblem: 401 without a valid token, 403 if it does not permit this, or if there are no tokens and the request
            may come from another machine, 421 if it was meant for another host.
    """
    tokens = policy.server.tokens
    if not tokens and not had_tokens:
        _check_local(scope, fields)
        return _EVERYTHING
    if needed == "nothing":
        return _NOTHING
    if not tokens:
        raise ApiProblem(
            403,
            "there are no tokens in the policy any more; bring them back, or restart the server to do without them",
        )
    try:
        return _check_token(tokens, needed, fields)
    except ApiProblem as problem:
        if problem.fields != (_CHALLENGE,):  # to come without a token is how a browser begins
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
    """Tell whether an address, or the name of one, is this machine's own and no other machine's."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _check_local(scope: Mapping[str, Any], fields: HeaderFields) -> None:
    arrived_at = (scope.get("server") or ("",))[0]
    if not (is_loopback(arrived_at) or arrived_at.startswith("/")):  # a path: a socket of this machine
        raise ApiProblem(
            403,
            "there are no tokens in the policy, so only this machine may ask; add [server.tokens.NAME] to it",
        )
    if not _PASSED_ON.isdisjoint(fields):
        raise ApiProblem(
            403,
            "a proxy has passed this on, perhaps from another machine, and there are no tokens in the policy; "
            "add [server.tokens.NAME] to it",
        )
    if not _is_loopback_authority(fields.get(b"host", b"")):
        raise ApiProblem(
            421,
            "without tokens the server answers to loopback names only, such as http://127.0.0.1 or http://localhost",
        )


@lru_cache(maxsize=256)
def _is_loopback_authority(authority: bytes) -> bool:
    """Tell whether a `Host` field names this machine; the port does not matter."""
    text = authority.decode("latin-1").strip()
    if "," in text:  # several fields
        return False
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return is_loopback(host) and (not port or port.startswith(":"))
    host, _, port = text.partition(":")
    return is_loopback(host) and ":" not in port


def _check_token(tokens: Mapping[str, TokenPolicy], needed: Needed, fields: HeaderFields) -> Access:
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
        raise ApiProblem(403, f"the token {name!r} may not {needed}", (_TOO_LITTLE,))
    return Access(found.may, digest, name)


def _find(tokens: Mapping[str, TokenPolicy], digest: str) -> str | None:
    """Return the name of the token with this digest; `None` if there is none.

    Every token is compared, each in constant time, so that the answer's time says nothing about any of them.
    """
    found: str | None = None
    for name, entry in tokens.items():
        if hmac.compare_digest(entry.sha256, digest):
            found = name
    return found
