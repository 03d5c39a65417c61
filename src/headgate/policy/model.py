"""Values of a policy file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from types import MappingProxyType
from typing import Literal

from headgate._limiting import HeaderStyle
from headgate.errors import ConfigError
from headgate.keys import Key, PlainKey
from headgate.outage.policies import OnOverload, OnStoreError
from headgate.policy.proxies import EnvoyPolicy, GatePolicy
from headgate.quota import Quota, Quotas
from headgate.rules import Rule

RecordKeys = Literal["plain", "hashed"]
Permission = Literal["decide", "administer", "gate"]
"""A permission of a token."""
PERMISSIONS: tuple[Permission, ...] = ("decide", "administer", "gate")
"""All permissions."""


class PolicyError(ConfigError):
    """An invalid policy; the message contains position and reason.

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
    """The policy of one limiter.

    Attributes:
        name: The name.
        rules: The live rules.
        shadow: Shadow rules, which count and report refusals, but do not refuse.
        store: URL of its store.
        on_store_error: `"open"`, `"closed"`, or `local(share)`.
        deadline: Seconds to wait for the store.
        lease: Time for which the process takes units of hot keys from the store, as text; `None` to take none.
        headers: Which headers the HTTP edges send.
        default_tier: The tier of callers without a known tier.
        overrides: Quotas by the names of rules, by overridden key in the form of `frozen_key`.
        on_overload: `"refuse"` or `"policy"`.
        candidate_for: For shadow rules that are candidates to replace a live rule: name of the live rule by name.
        source: Position in the file, as in `headgate.toml:12`; `None` without a file.
        rule_sources: Positions of its rules, by name.
        tiers: The tiers of the live rules.
    """

    name: str
    rules: tuple[Rule, ...]
    shadow: tuple[Rule, ...]
    store: str
    on_store_error: OnStoreError
    deadline: float | None
    headers: HeaderStyle
    default_tier: str | None
    overrides: Mapping[object, Mapping[str, Quota]]
    on_overload: OnOverload = "refuse"
    lease: str | None = None
    candidate_for: Mapping[str, str] = field(default_factory=dict)
    # Not compared: a limiter that only moved in the file is unchanged.
    source: str | None = field(default=None, compare=False)
    rule_sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    # Computed once for all calls.
    tiers: frozenset[str] = field(init=False, repr=False, compare=False)
    _shapes: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    _ranks: Mapping[object, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keep = object.__setattr__
        by_scopes = [key for key in self.overrides if isinstance(key, frozenset)]
        keep(self, "tiers", tiers_of(self.rules))
        keep(self, "_shapes", tuple({tuple(sorted(scope for scope, _ in key)) for key in by_scopes}))
        keep(self, "_ranks", {key: (len(key), index) for index, key in enumerate(by_scopes)})

    @property
    def keeps_terms(self) -> bool:
        """Whether calls keep their tier and quotas, because there are no overrides and no default tier."""
        return not self.overrides and (self.default_tier is None or self.default_tier not in self.tiers)

    def terms_for(
        self, key: Key | None, tier: str | None, quotas: Quotas | None = None
    ) -> tuple[str | None, Quotas | None]:
        """Return the tier and the quotas by which the live rules decide a call; quotas of the call precede overrides."""
        if found := self.override_for(key):
            own = [found.get(rule.name) for rule in self.rules]
            if quotas is not None:
                own = [given or overridden for given, overridden in zip(quotas, own, strict=True)]
            quotas = tuple(own) if any(own) else None
        return self.tier_among(self.tiers, tier), quotas

    def tier_among(self, known: frozenset[str], tier: str | None) -> str | None:
        """Return the tier of a call to rules with these tiers."""
        return tier if tier in known else self.default_tier

    def override_for(self, key: Key | None) -> Mapping[str, Quota]:
        """Return the overridden quotas of a call's key, by the names of rules."""
        if not self.overrides or key is None:
            return {}
        if not isinstance(key, Mapping):
            return self.overrides.get(_text(key), {})
        matching = []
        for shape in self._shapes:
            if all(scope in key for scope in shape):
                entries = frozenset((scope, _text(key[scope])) for scope in shape)
                if entries in self._ranks:
                    matching.append(entries)
        found: dict[str, Quota] = {}
        for entries in sorted(matching, key=self._ranks.__getitem__):  # more scopes win, then the later one
            found |= self.overrides[entries]
        return found

    def rules_for(self, key: Key | None, tier: str | None, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """Return live or shadow rules with the quotas of a call instead of tiers."""
        tier = self.tier_among(tiers_of((*self.rules, *rules)), tier)
        found = self.override_for(key)
        return tuple(
            replace(rule, quota=found.get(rule.name) or rule.quota_for(tier), tiers={}) for rule in rules
        )


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """A token and its permissions.

    Attributes:
        sha256: SHA-256 of the token, as 64 hexadecimal digits in lower case.
        may: `"decide"`: request decisions; `"administer"`: reset counts; `"gate"`: decide for clients of a proxy.
        expires: Expiry in seconds since the epoch; `None` for never.
    """

    sha256: str
    may: frozenset[Permission]
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class ServerPolicy:
    """Settings of the server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        top_keys: Number of the most refused keys on the dashboard; 0 shows none.
        largest_body: Bytes of the largest request body.
        tokens: Tokens by name; without tokens, all clients on this machine have access.
        record: The file of recorded decisions, for `headgate replay`; `None` to record nothing.
        record_bytes: Largest size of that file.
        record_keys: `"plain"` records keys; `"hashed"` records digests of keys.
        history: The file, in the folder of the policy, for the history of the last day; `None` for no file.
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
        """Whether only this machine can reach the server."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy file.

    Attributes:
        limiters: All limiters by name.
        server: Settings of the server.
        allow_removal: Whether a reload may remove limiters.
        envoy: The rate-limit service of Envoy; `None` without one.
        gate: The gate for other proxies.
    """

    limiters: Mapping[str, LimiterPolicy]
    server: ServerPolicy = field(default_factory=ServerPolicy)
    allow_removal: bool = False
    envoy: EnvoyPolicy | None = None
    gate: GatePolicy = field(default_factory=GatePolicy)


def tiers_of(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the tiers of rules."""
    return frozenset(tier for rule in rules for tier in rule.tiers)


def frozen_key(key: Mapping[str, PlainKey] | PlainKey) -> object:
    """Return a key in a hashable form: text, or a set of entries."""
    if isinstance(key, Mapping):
        return frozenset((scope, _text(part)) for scope, part in key.items())
    return _text(key)


def _text(part: object) -> str | None:
    """Return part of a key as text; `None` if it is not a valid key, which the rules report later.

    A file cannot contain bytes, but client addresses are bytes; so the text of an address matches them too.
    """
    if isinstance(part, bytes):
        return part.decode("utf-8", "surrogateescape")
    return part if isinstance(part, str) else None
