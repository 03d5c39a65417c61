"""The state of one key: the used units of each rule, and the time until units are available. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping

from headgate import HeadgateError, StoreError, StoreUnavailable
from headgate.clock import Clock
from headgate.keys import Key
from headgate.observe import redact
from headgate.policy import AsyncPolicyLimiter
from headgate.rules import SHARED
from headgate.stores import MemoryStore, Request
from headgate.usage import RuleUsage, usage_of, with_unreachable_limits
from headgate_server.wire import LimiterState


async def state_of(
    limiter: AsyncPolicyLimiter, key: Key | None, tier: str | None, clock: Clock | None
) -> LimiterState:
    """Return the state of a key in a limiter, or the reason why it cannot be shown.

    Args:
        limiter: The limiter.
        key: The key; a string applies to every scope.
        tier: The caller's tier.
        clock: The clock of the policy; `None` for the store's clock.
    """
    try:
        return LimiterState(limiter.name, await _results(limiter, _fitting(limiter, key), tier, clock))
    except StoreError as error:
        return LimiterState(limiter.name, [], f"the store cannot be reached: {redact(str(error))}")
    except HeadgateError as error:
        return LimiterState(limiter.name, [], str(error))


def _fitting(limiter: AsyncPolicyLimiter, key: Key | None) -> Key | None:
    """Return the part of a key that the limiter uses; a string applies to every scope."""
    rules = (*limiter.policy.rules, *limiter.policy.shadow)
    scopes = {rule.scope for rule in rules if rule.scope not in (None, SHARED)}
    if not scopes:
        return key
    if isinstance(key, (str, bytes)):
        return {str(scope): key for scope in scopes}
    return {scope: part for scope, part in key.items() if scope in scopes} if key else key


async def _results(
    limiter: AsyncPolicyLimiter, key: Key | None, tier: str | None, clock: Clock | None
) -> list[RuleUsage]:
    decision = await limiter.check(key, 1, tier=tier)
    if decision.degraded:
        raise StoreUnavailable("it does not answer")
    policy = limiter.policy
    scopes = {rule.scope for rule in policy.rules}
    own = {scope: part for scope, part in key.items() if scope in scopes} if isinstance(key, Mapping) else key
    rules = policy.rules_for(key, tier, policy.rules)
    gate = limiter.store.bind_async(limiter.name, tuple(map(with_unreachable_limits, rules)))
    # A memory store has the policy's clock; other stores get its time with every call.
    now = None if clock is None or isinstance(limiter.store, MemoryStore) else clock.now_us()
    counted, _ = await gate.decide(Request("peek", own, 0, now=now))
    return [
        usage_of(rule, at_zero, one_more)
        for rule, at_zero, one_more in zip(policy.rules, counted.results, decision.results, strict=True)
    ]
