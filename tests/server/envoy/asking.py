"""Requests of Envoy and their answers, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.policy import AsyncLivePolicy, parse_policy
from headgate.testing import FakeClock
from headgate_server.envoy.decisions import EnvoyDecisions
from headgate_server.envoy.messages import OVER_LIMIT, RateLimitRequest


def policy_with(
    descriptors: str, rules: str = '{ quota = "3/minute", scope = "user" }', more: str = ""
) -> str:
    """Return a policy with one domain."""
    return f"""
[limiters.edge]
rules = [{rules}]
[envoy.domains.edge]
descriptors = [{descriptors}]
{more}
"""


def request(*descriptors: Mapping[str, Any], domain: str = "edge", hits: int = 0) -> Any:
    """Return a `RateLimitRequest`; a descriptor is a mapping of entries, `hits` and `limit` (a number and a unit)."""
    asked = RateLimitRequest(domain=domain, hits_addend=hits)
    for entries in descriptors:
        descriptor = asked.descriptors.add()
        for key, value in entries.items():
            if key == "hits":
                descriptor.hits_addend.value = value
            elif key == "limit":
                descriptor.limit.requests_per_unit, descriptor.limit.unit = value
            else:
                descriptor.entries.add(key=key, value=value)
    return asked


class Service:
    """The decisions of a policy, with a clock that stands still."""

    def __init__(self, policy: str, **options: Any) -> None:
        self.clock = FakeClock()
        self.live = AsyncLivePolicy(parse_policy(policy), clock=self.clock, **options)
        self.decisions = EnvoyDecisions(self.live)

    async def ask(self, *descriptors: Mapping[str, Any], hits: int = 0, **more: Any) -> Any:
        """Return the response to a request."""
        return await self.decisions.decide(request(*descriptors, hits=hits), **more)

    async def admits(self, *descriptors: Mapping[str, Any], hits: int = 0) -> bool:
        """Return whether a request is admitted."""
        response = await self.ask(*descriptors, hits=hits)
        return bool(response.overall_code != OVER_LIMIT)

    async def admitted(self, number: int, *descriptors: Mapping[str, Any], hits: int = 0) -> int:
        """Return how many of several equal requests are admitted."""
        return sum([await self.admits(*descriptors, hits=hits) for _ in range(number)])


def codes(response: Any) -> list[int]:
    """Return the codes of all statuses."""
    return [status.code for status in response.statuses]


def left(response: Any) -> list[int]:
    """Return the remaining units in all statuses."""
    return [status.limit_remaining for status in response.statuses]


def fields(response: Any) -> dict[str, str]:
    """Return the header fields of a response."""
    return {header.key: header.value for header in response.response_headers_to_add}
