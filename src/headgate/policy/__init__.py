"""Policy files: limiters, tiers, overrides and shadow rules in TOML, with reloading."""

from headgate.policy._async.live import AsyncLivePolicy, AsyncPolicyLimiter, AsyncVersion
from headgate.policy._sync.live import LivePolicy, PolicyLimiter, Version
from headgate.policy.explain import explain, find_warnings, in_words
from headgate.policy.load import load_policy, parse_policy, read_policy
from headgate.policy.model import (
    PERMISSIONS,
    LimiterPolicy,
    Permission,
    Policy,
    PolicyError,
    ServerPolicy,
    TokenPolicy,
)
from headgate.policy.proxies import DescriptorPolicy, DomainPolicy, EnvoyPolicy, GatePolicy, KeySource
from headgate.policy.shadows import SHADOW, ShadowCount

__all__ = [
    "PERMISSIONS",
    "SHADOW",
    "AsyncLivePolicy",
    "AsyncPolicyLimiter",
    "AsyncVersion",
    "DescriptorPolicy",
    "DomainPolicy",
    "EnvoyPolicy",
    "GatePolicy",
    "KeySource",
    "LimiterPolicy",
    "LivePolicy",
    "Permission",
    "Policy",
    "PolicyError",
    "PolicyLimiter",
    "ServerPolicy",
    "ShadowCount",
    "TokenPolicy",
    "Version",
    "explain",
    "find_warnings",
    "in_words",
    "load_policy",
    "parse_policy",
    "read_policy",
]
