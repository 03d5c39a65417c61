"""What a server answers about its limiters and about a key."""

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
        rules: The rules that decide.
        shadow: Rules that only count what they would have refused.
        store: Where the server counts; without credentials.
        on_store_error: What the server answers when that store cannot be asked: its failure policy.
        default_tier: The tier of callers that have none, or one that no rule knows.
        headers: Which headers HTTP edges send.
    """

    name: str
    rules: tuple[Rule, ...]
    shadow: tuple[Rule, ...]
    store: str
    on_store_error: OnStoreError
    default_tier: str | None
    headers: str


class WaitHint(NamedTuple):
    """When a call would be admitted, if no other call came.

    Attributes:
        allowed: Whether it would be admitted now.
        wait: Seconds until it would be; 0 now, `None` never.
    """

    allowed: bool
    wait: float | None


@dataclass(frozen=True, slots=True)
class KeyState:
    """What one limiter has counted for a key.

    Attributes:
        limiter: The limiter's name.
        results: How much is used of each rule, in the order of the rules.
        error: Why there are none, if so.
    """

    limiter: str
    results: tuple[RuleUsage, ...]
    error: str | None
