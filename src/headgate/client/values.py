"""Values that a server returns about its limiters and about a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headgate.outage.policies import OnStoreError
from headgate.rules import Rule
from headgate.usage import RuleUsage


@dataclass(frozen=True, slots=True)
class ServerLimiter:
    """A limiter of the server's policy file.

    Attributes:
        name: Its name.
        rules: The enforced rules.
        shadow: Shadow rules, which only count their would-be refusals.
        store: The server's store; without credentials.
        on_store_error: The failure policy of the server, used when that store is unreachable.
        default_tier: The tier of callers without a tier, or with a tier that no rule has.
        headers: The headers that HTTP middlewares send.
    """

    name: str
    rules: tuple[Rule, ...]
    shadow: tuple[Rule, ...]
    store: str
    on_store_error: OnStoreError
    default_tier: str | None
    headers: str


class WaitHint(NamedTuple):
    """When a call would be admitted if no other call is made.

    Attributes:
        allowed: Whether it would be admitted now.
        wait: Seconds until it would be admitted; 0 now, `None` never.
    """

    allowed: bool
    wait: float | None


@dataclass(frozen=True, slots=True)
class KeyState:
    """The state of a key in one limiter.

    Attributes:
        limiter: The limiter's name.
        results: The usage of each rule, in the order of the rules.
        error: The reason why `results` is empty, or `None`.
    """

    limiter: str
    results: tuple[RuleUsage, ...]
    error: str | None
