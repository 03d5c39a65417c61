"""What a policy file says, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType
from typing import Literal

from headgate._limiting import HeaderStyle
from headgate.errors import ConfigError
from headgate.keys import Key, PlainKey
from headgate.outage.policies import OnOverload, OnStoreError
from headgate.rules import Rule

RecordKeys = Literal["plain", "hashed"]
Permission = Literal["decide", "administer"]
"""What the bearer of a token may do."""
PERMISSIONS: tuple[Permission, ...] = ("decide", "administer")
"""All permissions."""

OVERRIDE = "override:"
"""Prefix of the tiers that stand for overrides; the tiers of a file cannot have it."""


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
        rules: The rules that decide. Quotas of overridden keys are among their tiers, under names of `override_tier`.
        shadow: Rules that count and report what they would have refused, and refuse nothing.
        store: URL of its store.
        on_store_error: `"open"`, `"closed"`, or `local(share)`.
        deadline: Seconds to wait for the store.
        headers: Which headers the HTTP edges send.
        default_tier: The tier of callers that have none, or one that no rule knows.
        overrides: Tier by key (as `frozen_key` makes it) of the keys with quotas of their own.
        on_overload: `"refuse"` or `"policy"`.
        candidate_for: The live rule by shadow rule, both by name, of those that are candidates for its place.
        source: Where the file speaks of it, as in `headgate.toml:12`; `None` if it came from no file.
        rule_sources: Likewise of its rules, by name.
    """

    name: str
    rules: tuple[Rule, ...]
    shadow: tuple[Rule, ...]
    store: str
    on_store_error: OnStoreError
    deadline: float | None
    headers: HeaderStyle
    default_tier: str | None
    overrides: Mapping[object, str]
    on_overload: OnOverload = "refuse"
    candidate_for: Mapping[str, str] = field(default_factory=dict)
    # A limiter that only moved in the file has not changed.
    source: str | None = field(default=None, compare=False)
    rule_sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    # What a call needs to know, found once.
    _known: frozenset[str] = field(init=False, repr=False, compare=False)
    _tiers: frozenset[str] = field(init=False, repr=False, compare=False)
    _shapes: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keep = object.__setattr__
        keep(self, "_known", known_tiers(self.rules))
        keep(self, "_tiers", frozenset(tier for rule in (*self.rules, *self.shadow) for tier in rule.tiers))
        keep(self, "_shapes", _shapes(self.overrides))

    @property
    def decides_alike(self) -> bool:
        """Whether every call is decided under the tier that it names: no override and no default tier applies."""
        return not self.overrides and (self.default_tier is None or self.default_tier not in self._known)

    def tier_for(self, key: Key | None, tier: str | None) -> str | None:
        """Return the tier under which a call is decided."""
        return self.tier_among(self._known, key, tier)

    def tier_among(self, known: frozenset[str], key: Key | None, tier: str | None) -> str | None:
        """Return the tier under which a call is decided by rules that know these tiers."""
        if tier not in known:
            tier = self.default_tier
        own = self._override_of(key) if self.overrides and key is not None else None
        if own is None:
            return tier
        both = override_tier(own, tier)
        return both if both in self._tiers else own

    def _override_of(self, key: Key) -> str | None:
        if not isinstance(key, Mapping):
            return self.overrides.get(_text(key))
        for shape in self._shapes:  # those with most entries first: the nearest counts
            if all(scope in key for scope in shape):
                found = self.overrides.get(frozenset((scope, _text(key[scope])) for scope in shape))
                if found is not None:
                    return found
        return None


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """What the bearer of a token may do.

    Attributes:
        sha256: SHA-256 of the token, as 64 hexadecimal digits in lower case.
        may: `"decide"`: ask for decisions; `"administer"`: reset what was counted.
        expires: When it ends, in seconds since the epoch; `None` for never.
    """

    sha256: str
    may: frozenset[Permission]
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class ServerPolicy:
    """How the server serves the policy.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        top_keys: How many of the most refused keys the dashboard may show; 0 shows none.
        largest_body: Bytes of the largest request body.
        tokens: Who may use it, by name; without any, everybody on this machine.
        record: The file that decisions are recorded to, for `headgate replay`; `None` records nothing.
        record_bytes: How large it may become.
        record_keys: `"plain"`: with the keys; `"hashed"`: with digests instead.
        history: The file, beside the policy's, that keeps the figures of the last day over restarts; `None` for none.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    top_keys: int = 0
    largest_body: int = 65_536
    tokens: Mapping[str, TokenPolicy] = field(default_factory=lambda: MappingProxyType({}))
    record: str | None = None
    record_bytes: int = 100_000_000
    record_keys: RecordKeys = "plain"
    history: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy file.

    Attributes:
        limiters: All limiters by name.
        server: How they are served.
        allow_removal: Whether a reload may take limiters away that the policy before had.
    """

    limiters: Mapping[str, LimiterPolicy]
    server: ServerPolicy = field(default_factory=ServerPolicy)
    allow_removal: bool = False


def known_tiers(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the tiers that callers may name: not those that stand for overrides."""
    return frozenset(tier for rule in rules for tier in rule.tiers if not tier.startswith(OVERRIDE))


def frozen_key(key: Mapping[str, PlainKey] | PlainKey) -> object:
    """Return a key in a form that can be looked up: a mapping by its entries, and all as text."""
    if isinstance(key, Mapping):
        return frozenset((scope, _text(part)) for scope, part in key.items())
    return _text(key)


def override_tier(override: int | str, tier: str | None = None) -> str:
    """Return the name of the tier that stands for an override, or for it together with a caller's tier."""
    name = override if isinstance(override, str) else f"{OVERRIDE}{override}"
    return name if tier is None else f"{name}/{tier}"


def _text(part: object) -> str | None:
    """Return part of a key as a policy file would write it; `None` if it is no key, which the rules will say.

    A file cannot contain bytes, but client addresses are bytes; so text that is an address matches them too.
    """
    if isinstance(part, bytes):
        return part.decode("utf-8", "surrogateescape")
    return part if isinstance(part, str) else None


def _shapes(overrides: Mapping[object, str]) -> tuple[tuple[str, ...], ...]:
    """Return the sets of scopes that keys of overrides have, those with most scopes first."""
    shapes = {tuple(sorted(scope for scope, _ in key)) for key in overrides if isinstance(key, frozenset)}
    return tuple(sorted(shapes, key=lambda shape: (-len(shape), shape)))
