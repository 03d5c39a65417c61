"""What a policy file says, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headgate.errors import ConfigError
from headgate.keys import Key
from headgate.rules import Rule

HeaderStyle = Literal["ietf", "x-ratelimit", "both", "none"]
HEADER_STYLES: tuple[HeaderStyle, ...] = ("ietf", "x-ratelimit", "both", "none")


class PolicyError(ConfigError):
    """A policy cannot be used; the message says where and why.

    Attributes:
        line: Line of the file, from 1; `None` if the error is not in the file (an environment variable).
        column: Column of that line, from 1.
    """

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


@dataclass(frozen=True, slots=True)
class LimiterPolicy:
    """One named limiter.

    Attributes:
        name: Its name.
        rules: The rules that decide. Quotas of overridden keys are among their tiers, under `override_tier`'s names.
        shadow: Rules that count and report what they would have refused, and refuse nothing.
        store: URL of its store.
        on_store_error: `"open"`, `"closed"`, or the share of each limit to admit locally.
        deadline: Seconds to wait for the store.
        headers: Which headers the HTTP edges send.
        default_tier: The tier of callers that have none, or one that no rule knows.
        overrides: Tier by key (as `frozen_key` makes it) of the keys with quotas of their own.
    """

    name: str
    rules: tuple[Rule, ...]
    shadow: tuple[Rule, ...]
    store: str
    on_store_error: str | float
    deadline: float | None
    headers: HeaderStyle
    default_tier: str | None
    overrides: Mapping[object, str]

    def tier_for(self, key: Key | None, tier: str | None) -> str | None:
        """Return the tier under which a call is decided."""
        if self.overrides and key is not None:
            own = self.overrides.get(frozen_key(key))
            if own is not None:
                return own
        if tier is None or not any(tier in rule.tiers for rule in self.rules):
            return self.default_tier
        return tier


@dataclass(frozen=True, slots=True)
class Policy:
    """All limiters of a policy file by name."""

    limiters: Mapping[str, LimiterPolicy]


def frozen_key(key: Key) -> object:
    """Return a key in a form that can be looked up: a mapping by its entries."""
    return frozenset(key.items()) if isinstance(key, Mapping) else key


def override_tier(index: int) -> str:
    """Return the name of the tier that stands for the override of that number."""
    return f"override:{index}"
