"""Deciding logged requests, each at its own time, by what decides live.

A limiter of a policy is made as the live policy makes it, over a memory store whose clock is the log's. So tiers, overrides
and shadow rules mean what they mean in service, and states expire by the time of the log: memory holds the keys that are
live at that time, however many the log has. Time never goes back here; `requests.in_order` sees to that.
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
"""States that may live at once; a machine's memory ends before."""


class ReplayClock(SteadyClock):
    """A clock that stands at the request which is decided."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def now_us(self) -> int:
        return self.at


class ReplayedLimiter:
    """One limiter of a policy, asked in the time of a log.

    Args:
        policy: What the file says of it. Its store and what happens when that is down play no part.

    Attributes:
        policy: The same, without the rules that are not replayed.
        left_out: The names of these: `concurrent` ones, for most logs do not say how long requests were under way.

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
                f"{policy.name} counts only what is held at once, which is not replayed: most logs do not say how long "
                f"requests were under way"
            )
        self.policy = policy = replace(policy, rules=rules, shadow=shadow)
        self._clock = ReplayClock()
        self._store = MemoryStore(max_keys=MAX_KEYS, clock=self._clock)
        alone = replace(policy, store="memory://", on_store_error="open", deadline=None)
        self._version = Version(alone, self._store)
        self._ask = self._version.gate.ask

    @property
    def overflowed(self) -> int:
        """How many requests found memory full, and so were not decided as they would be live."""
        return self._store.overflowed

    def decide(self, request: LoggedRequest) -> Decision | None:
        """Return the decision at the request's own time; `None` if no waiting would ever admit its cost.

        Raises:
            ConfigError: The key does not fit the rules.
        """
        self._clock.at = request.at
        try:
            return self._ask(Request("hit", request.key, request.cost, request.tier))[0]
        except CostTooHigh:
            return None

    def shadow_counts(self) -> dict[str, ShadowCount]:
        """Return what each shadow rule would have refused of what the live rules admitted."""
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
