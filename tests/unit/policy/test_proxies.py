"""The sections `[envoy]` and `[gate]`: words, changes and variables. Invalid ones are tested with the server."""

from __future__ import annotations

import pytest

from headgate.policy import PolicyError, explain, find_warnings, parse_policy
from headgate.policy.explain import describe_changes

TEXT = """
[limiters.edge]
rules = [{ quota = "5/minute", scope = "client" }]
[envoy]
port = 9001
[envoy.domains.edge]
atomic = false
descriptors = [{ key = "remote_address", scope = "client" }]
[gate]
proxies = ["10.0.0.0/8"]
[gate.limiters]
edge = { client = "address" }
"""


def test_sections_are_explained() -> None:
    words = explain(parse_policy(TEXT))
    assert "envoy: the rate-limit service listens on 127.0.0.1:9001" in words
    assert "domain 'edge': limiter edge, descriptors are decided independently" in words
    assert "gate: trusts X-Forwarded-For from 10.0.0.0/8" in words
    assert "/v1/gate/edge counts by client = address" in words


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("9001", "9002", ["envoy: address (after a restart)"]),
        ("atomic = false", "atomic = true", ["envoy: domains"]),
        ('"10.0.0.0/8"', '"10.0.0.1"', ["gate"]),
        ("", "", []),
    ],
)
def test_changes_are_described(old: str, new: str, change: list[str]) -> None:
    assert describe_changes(parse_policy(TEXT), parse_policy(TEXT.replace(old, new))) == change


def test_variables_replace_the_address() -> None:
    environment = {"HEADGATE_ENVOY__PORT": "7000", "HEADGATE_ENVOY__HOST": "::1"}
    policy = parse_policy(TEXT, environment=environment)
    assert policy.envoy is not None
    assert (policy.envoy.host, policy.envoy.port) == ("::1", 7000)
    assert list(find_warnings(policy, TEXT, environment)) == []
    with pytest.raises(PolicyError, match="environment variable HEADGATE_ENVOY__PORT"):
        parse_policy(TEXT, environment={"HEADGATE_ENVOY__PORT": "many"})
    without = parse_policy('[limiters.a]\nrules = ["1/s"]', environment=environment)
    assert without.envoy is None
