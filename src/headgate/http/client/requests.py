"""A rate-limited adapter for requests."""

from __future__ import annotations

from typing import Any, Unpack
from urllib.parse import urlsplit

from headgate import Limiter, Rule
from headgate._extras import needing
from headgate._steps import run
from headgate.http.client.options import OutboundArguments, OutboundOptions

with needing("headgate.http.client", "requests"):
    from requests import PreparedRequest, Response
    from requests.adapters import HTTPAdapter


class RateLimitAdapter(HTTPAdapter):
    """An adapter that delays requests to stay within limits: `session.mount("https://", RateLimitAdapter("10/s"))`.

    For the other options see `OutboundOptions`.

    Args:
        limit: The caller's own limit, a `Limiter` or a rule.
    """

    def __init__(
        self, limit: Limiter | Rule | str | None = None, **options: Unpack[OutboundArguments]
    ) -> None:
        super().__init__()
        self._options = OutboundOptions(Limiter, limit, **options)

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        """Send a request; see `OutboundOptions.exchange`."""
        key = self._options.key(request) if self._options.key else urlsplit(request.url or "").hostname or ""
        response: Response = run(
            self._options.exchange(
                key,
                request.method or "",
                request.body is None or isinstance(request.body, str | bytes),
                lambda: super(RateLimitAdapter, self).send(request, *args, **kwargs),
                self._options.clock.sleep,
                lambda response: response.content,  # reads and keeps the body
            )
        )
        return response
