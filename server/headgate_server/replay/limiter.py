"""A limiter that decides logged requests, each at its own time, by the functions that decide live.

It is made as the live policy makes it, over a memory store with the clock of the log. So tiers, overrides and shadow rules
mean the same as in service, and states expire by the time of the log: memory holds the keys that are live at that time,
however many the log has. Time never goes back here, because `requests.in_order` sorts.
"""

from __future__ import annotations

from dataclasses import replace

from headgate import CostTooHigh, Decision, Rule
from headgate.clock import SteadyClock
from headgate.policy import LimiterPolicy, ShadowCount, Version
from headgate.rules import SHARED
from headgate.stores import MemoryStore, Request
from headgate_server.replay.errors import ReplayError
from headgate_server.replay.requests import LoggedRequest

MAX_KEYS = 20_000_000
"""States that may live at once; more than fit into the memory of most machines."""


class ReplayClock(SteadyClock):
    """A clock that shows the time of the current request."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def now_us(self) -> int:
        return self.at


class ReplayedLimiter:
    """One limiter of a policy, with the clock of a log.

    Args:
        policy: The limiter. Its store and its settings for outages are ignored.

    Attributes:
        policy: The same, without the rules that are not replayed.
        left_out: The names of these: `concurrent` rules, because most logs do not have the duration of requests.

    Raises:
        ReplayError: It has no other rule.
    """

    def __init__(self, policy: LimiterPolicy) -> None:
        self.left_out = tuple(rule.name for rule in (*policy.rules, *policy.shadow) if _is_left_out(rule))
        rules, shadow = (
            tuple(rule for rule in rules if not _is_left_out(rule)) for rules in (policy.rules, policy.shadow)
        )
        if not rules:
            raise ReplayError(
                f"{policy.name} limits only what is held at once, which is not replayed: most logs do not have the duration "
                f"of requests"
            )
        self.policy = policy = replace(policy, rules=rules, shadow=shadow)
        self._clock = ReplayClock()
        self._store = MemoryStore(max_keys=MAX_KEYS, clock=self._clock)
        alone = replace(policy, store="memory://", on_store_error="open", deadline=None)
        self._version = Version(alone, self._store)
        self._ask = self._version.gate.ask

    @property
    def overflowed(self) -> int:
        """How many requests found memory full, and so were decided more strictly than live."""
        return self._store.overflowed

    def decide(self, request: LoggedRequest) -> Decision | None:
        """Return the decision at the time of the request; `None` if no wait would ever admit its cost.

        Raises:
            ConfigError: The key does not fit the rules.
        """
        self._clock.at = request.at
        try:
            return self._ask(Request("hit", request.key, request.cost, request.tier))[0]
        except CostTooHigh:
            return None

    def shadow_counts(self) -> dict[str, ShadowCount]:
        """Return the counts of each shadow rule, of the requests that the live rules admitted."""
        return {shadow.rule.name: shadow.tally.so_far() for shadow in self._version.shadows}


def _is_left_out(rule: Rule) -> bool:
    return rule.kind == "concurrent"


def scopes_of(policy: LimiterPolicy) -> tuple[str, ...]:
    """Return the scopes that a limiter's rules count by, shadow rules included, in their order."""
    scopes = dict.fromkeys(rule.scope for rule in (*policy.rules, *policy.shadow))
    return tuple(scope for scope in scopes if scope is not None and scope != SHARED)


def needs_key(policy: LimiterPolicy) -> bool:
    """Return whether any rule counts by key."""
    return any(rule.scope != SHARED for rule in (*policy.rules, *policy.shadow))
