"""The address of a server, its credentials, and the HTTP transport.

Requests are sent by httpx's transports rather than its clients: a call that charges must not be redirected, retried or sent
through a proxy from the environment.
"""

from __future__ import annotations

import json
import re
import ssl
from typing import Any
from urllib.parse import unquote

import httpx

from headgate._checks import check_kind
from headgate.client.wire import HttpRequest, Response
from headgate.errors import ConfigError, StoreError, StoreMisconfigured, StoreTimeout, StoreUnavailable
from headgate.stores.remote.peer import INVALID_REPLY, WRONG_TLS

Transport = httpx.BaseTransport | httpx.AsyncBaseTransport

KEEP_ALIVE = 3.0
"""Seconds after which an idle connection is closed. Servers close idle connections too, usually after 5 s or more. If a call
is sent at that moment it is lost, and it is unknown whether it was counted."""

_TOKEN = re.compile(r"[\x21-\x7e]+")
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE)


class ServerEndpoint:
    """A server.

    Attributes:
        name: The server's name in messages; without credentials.
        is_transport_given: Whether the user passed the transport; the store then does not close it.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
    ) -> None:
        base, token_in_url = _parse(url)
        if token and token_in_url:
            raise ConfigError(
                f"{base} has a token in its URL that differs from the argument token; give only one of them"
            )
        self.name = str(base).rstrip("/")
        self._given = check_kind("transport", transport, Transport | None, "a transport of httpx")
        self.is_transport_given = transport is not None
        check_kind("tls", tls, ssl.SSLContext | None, "a context like ssl.create_default_context()")
        # Not created for http://, because that takes longer than many calls.
        self._tls: ssl.SSLContext | bool = False
        if base.scheme == "https":
            self._tls = tls or ssl.create_default_context()
        self._headers = {
            "Host": base.netloc.decode("ascii"),
            "Accept": "application/json",
            "Content-Type": "application/json",
            "User-Agent": "headgate",
        }
        if token := token or token_in_url:
            # Checked here, because the error message of the HTTP library would contain the header.
            if not isinstance(token, str) or not _TOKEN.fullmatch(token):
                raise ConfigError(f"the token for {self.name} is not text that a header can carry")
            self._headers["Authorization"] = f"Bearer {token}"

    def transport(self) -> httpx.BaseTransport:
        """Return the transport for threads."""
        if self._given is None:
            return httpx.HTTPTransport(verify=self._tls, trust_env=False, limits=_LIMITS)
        if isinstance(self._given, httpx.BaseTransport):
            return self._given
        raise ConfigError(f"{self.name} was given an async transport, which Limiter cannot use")

    def async_transport(self) -> httpx.AsyncBaseTransport:
        """Return the transport for coroutines."""
        if self._given is None:
            return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=_LIMITS)
        if isinstance(self._given, httpx.AsyncBaseTransport):
            return self._given
        raise ConfigError(f"{self.name} was given a sync transport, which AsyncLimiter cannot use")

    def packed(self, request: HttpRequest, timeout: float | None) -> httpx.Request:
        """Return the httpx request; `timeout` in seconds applies to each phase, such as connect and read."""
        return httpx.Request(
            request.method,
            self.name + request.path,
            headers=self._headers,
            content=request.body,
            extensions={"timeout": httpx.Timeout(timeout).as_dict()},
        )

    def error(self, cause: BaseException) -> StoreError:
        """Return the StoreError for a failed exchange."""
        if isinstance(cause, (httpx.TimeoutException, TimeoutError)):
            return StoreTimeout(f"{self.name} did not answer in time")
        # h11 quotes the first bytes: "illegal status line: bytearray(b'SSH-2.0')".
        if isinstance(cause, httpx.RemoteProtocolError) and "illegal" in str(cause):
            return StoreMisconfigured(f"{self.name} {INVALID_REPLY} ({cause})")
        kind = StoreMisconfigured if re.search(WRONG_TLS, str(cause), re.IGNORECASE) else StoreUnavailable
        return kind(f"{self.name}: {str(cause) or type(cause).__name__}")


def unpacked(response: httpx.Response) -> Response:
    """Return the answer in a response that was read; a body that is not JSON becomes `None`."""
    try:
        body: Any = json.loads(response.content)
    except (ValueError, RecursionError):
        body = None
    return Response(response.status_code, body)


def is_lost(cause: BaseException) -> bool:
    """Return whether the connection broke, so that a call may be repeated if that is safe."""
    return isinstance(cause, httpx.TransportError) and not isinstance(cause, httpx.TimeoutException)


def _parse(url: str) -> tuple[httpx.URL, str | None]:
    """Return a URL without credentials, ending in a slash, and its token."""
    example = "write for example 'http://127.0.0.1:8080' or 'https://:TOKEN@limits.example.org'"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        # Without cause and URL: they may contain a part of the token.
        raise ConfigError(f"the URL of the server is not valid; {example}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"the URL of a server must start with http:// or https:// and name a host; {example}"
        )
    if parsed.query or parsed.fragment:
        raise ConfigError(f"the URL of a server must not contain '?' or '#'; {example}")
    user, _, password = parsed.userinfo.decode("ascii").partition(":")
    if user and password:
        raise ConfigError(f"a server takes a token, not a user and a password; {example}")
    path = parsed.path if parsed.path.endswith("/") else f"{parsed.path}/"
    return parsed.copy_with(userinfo=b"", path=path), unquote(user or password) or None
