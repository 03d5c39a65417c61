"""The policy file: limiters, tiers, overrides and shadow rules, in TOML."""

from headgate.policy.explain import explain
from headgate.policy.load import load_policy, parse_policy
from headgate.policy.model import LimiterPolicy, Policy, PolicyError

__all__ = ["LimiterPolicy", "Policy", "PolicyError", "explain", "load_policy", "parse_policy"]
