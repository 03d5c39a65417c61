"""An adapter for requests that keeps to `Manners`."""

from __future__ import annotations

from typing import Any, Unpack
from urllib.parse import urlsplit

from headgate import Limiter, Rule
from headgate._extras import needing
from headgate.http.client.manners import Manners, MannersOptions
from headgate.http.steps import run

with needing("headgate.http.client", "requests"):
    from requests import PreparedRequest, Response
    from requests.adapters import HTTPAdapter


class RateLimitAdapter(HTTPAdapter):
    """An adapter that sends requests when they may be sent: `session.mount("https://", RateLimitAdapter("10/s"))`.

    The options besides are those of `Manners`.

    Args:
        limit: The caller's own limit, a `Limiter` or a rule.
    """

    def __init__(self, limit: Limiter | Rule | str | None = None, **manners: Unpack[MannersOptions]) -> None:
        super().__init__()
        self._manners = Manners(Limiter, limit, **manners)

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        """Send a request; see `Manners.exchange`."""
        key = self._manners.key(request) if self._manners.key else urlsplit(request.url or "").hostname or ""
        response: Response = run(
            self._manners.exchange(
                key,
                request.method or "",
                request.body is None or isinstance(request.body, str | bytes),
                lambda: super(RateLimitAdapter, self).send(request, *args, **kwargs),
                self._manners.clock.sleep,
                lambda response: response.content,  # which keeps it
            )
        )
        return response
