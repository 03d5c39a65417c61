"""The policy file: limiters, tiers, overrides and shadow rules, in TOML; read once, or followed as it changes."""

from headgate.policy._async.live import AsyncLivePolicy, AsyncPolicyLimiter, AsyncVersion
from headgate.policy._sync.live import LivePolicy, PolicyLimiter
from headgate.policy.explain import explain, in_words
from headgate.policy.load import load_policy, parse_policy
from headgate.policy.model import LimiterPolicy, Policy, PolicyError, ServerPolicy, TokenPolicy
from headgate.policy.shadows import SHADOW, ShadowCount

__all__ = [
    "SHADOW",
    "AsyncLivePolicy",
    "AsyncPolicyLimiter",
    "AsyncVersion",
    "LimiterPolicy",
    "LivePolicy",
    "Policy",
    "PolicyError",
    "PolicyLimiter",
    "ServerPolicy",
    "ShadowCount",
    "TokenPolicy",
    "explain",
    "in_words",
    "load_policy",
    "parse_policy",
]
