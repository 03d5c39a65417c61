"""Rate limits for outgoing requests: transports for httpx, an adapter for requests.

    client = httpx.Client(transport=RateLimitTransport("10/s"))
    client = httpx.AsyncClient(transport=AsyncRateLimitTransport("10/s"))
    session.mount("https://", RateLimitAdapter("10/s"))

A request waits for the caller's own limit, and for any pause that the peer requested in an earlier response. A refused
request is retried after that pause, a limited number of times, if repeating it is safe. See `OutboundOptions` for the
arguments.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from headgate.http.client.options import OutboundOptions, asked_pause
from headgate.http.client.reports import ReportedLimit, reported_limits

if TYPE_CHECKING:
    from headgate.http.client.httpx import AsyncRateLimitTransport, RateLimitTransport
    from headgate.http.client.requests import RateLimitAdapter

__all__ = [
    "AsyncRateLimitTransport",
    "OutboundOptions",
    "RateLimitAdapter",
    "RateLimitTransport",
    "ReportedLimit",
    "asked_pause",
    "reported_limits",
]

_HOMES = {"AsyncRateLimitTransport": "httpx", "RateLimitTransport": "httpx", "RateLimitAdapter": "requests"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
