"""Rules: an algorithm with its quota, name and scope.

A rule is a value; it says what is wanted. `headgate.algorithms` turns it into something that decides.

Whose units a rule counts is its scope: without one, those of the plain key of the call; with one, those of that entry of
the call's mapping; with `"*"`, everybody's in one shared counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from headgate.errors import ConfigError
from headgate.quota import Quota, format_period, parse_quotas

Kind = Literal["fixed_window", "sliding_window", "sliding_log", "token_bucket"]

SHARED = "*"
"""The scope of a rule that counts everybody's units together."""

DEFAULT_BUCKETS = 60
MAX_BUCKETS = 100_000


@dataclass(frozen=True, slots=True)
class Rule:
    """An algorithm with its quota, name and scope; made by the four functions below.

    Attributes:
        kind: The algorithm.
        quota: What is allowed to everyone without a tier of their own.
        name: Part of the identity of its state, together with kind and period; a changed limit keeps what was counted.
        scope: Whose units are counted.
        tiers: Quotas by tier; all count in the same state. An unknown tier has the rule's own quota.
        buckets: For a sliding window: into how many buckets the period is divided.
        strict: For a sliding window: whether a unit counts until the last instant at which it may have to.
    """

    kind: Kind
    quota: Quota
    name: str
    scope: str | None = None
    tiers: Mapping[str, Quota] = field(default_factory=lambda: MappingProxyType({}))
    buckets: int = DEFAULT_BUCKETS
    strict: bool = True

    def __hash__(self) -> int:
        return hash((self.kind, self.quota, self.name, self.scope, self.buckets, self.strict))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # The view of the tiers cannot be pickled or copied, so the dictionary goes instead.
        return _restore, (
            self.kind,
            self.quota,
            self.name,
            self.scope,
            dict(self.tiers),
            self.buckets,
            self.strict,
        )

    @property
    def identity(self) -> str:
        """What tells this rule's state from that of the limiter's other rules, and of other kinds and periods."""
        shape = f"{self.kind}/{self.quota.period_us}"
        if self.kind == "sliding_window":
            shape += f"/{self.buckets}/{'strict' if self.strict else 'lenient'}"
        return f"{shape}/{self.name}"

    def quota_for(self, tier: str | None) -> Quota:
        """Return the quota of a tier, or the rule's own if there is none for it."""
        return self.quota if tier is None else self.tiers.get(tier, self.quota)

    def __str__(self) -> str:
        return f"{self.name} ({self.quota})"


def fixed_window(
    quota: str | Quota,
    *,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
) -> Rule:
    """Return a rule that counts in windows aligned to the epoch.

    The cheapest rule. Around the edge of two windows up to twice the limit may pass within one period.
    """
    return make_rule("fixed_window", quota, scope, tiers, name)


def sliding_window(
    quota: str | Quota,
    *,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
    buckets: int = DEFAULT_BUCKETS,
    strict: bool = True,
) -> Rule:
    """Return a rule that counts in small buckets over the last period.

    Strict (the default), no span as long as the period ever holds more than the limit; a unit may count up to one bucket
    longer than the period. With `strict=False` a unit may be forgotten up to one bucket early instead.
    """
    return make_rule("sliding_window", quota, scope, tiers, name, buckets, strict)


def sliding_log(
    quota: str | Quota,
    *,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
) -> Rule:
    """Return a rule that remembers each admitted request: exact to the microsecond, and as large as its limit."""
    return make_rule("sliding_log", quota, scope, tiers, name)


def token_bucket(
    quota: str | Quota,
    *,
    burst: int | None = None,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
) -> Rule:
    """Return a rule that admits at a steady rate, and up to `burst` units at once (by default the limit).

    Within one period after a pause up to limit + burst may pass. `burst` applies to tiers that name none of their own.
    """
    if burst is not None:
        quota = _with_burst(_quota(quota), burst)
        tiers = {t: _default_burst(_quota(q), burst) for t, q in (tiers or {}).items()}
    return make_rule("token_bucket", quota, scope, tiers, name)


def rules_from(specs: Iterable[str | Rule]) -> tuple[Rule, ...]:
    """Return the rules that a limiter was given as text and rules; text means sliding windows.

    A quota with a burst means a token bucket, the one rule that has bursts.

    Raises:
        ConfigError: Two rules have one name, or cannot be asked with the same key.
    """
    rules: list[Rule] = []
    for spec in specs:
        if isinstance(spec, Rule):
            rules.append(spec)
        elif isinstance(spec, str):
            rules += [sliding_window(q) if q.burst is None else token_bucket(q) for q in parse_quotas(spec)]
        else:
            raise ConfigError(f"a rule is text like '5/minute' or sliding_window('5/minute'), not {spec!r}")
    seen: set[str] = set()
    for rule in rules:
        if rule.name in seen:
            raise ConfigError(f"two rules are called {rule.name!r}; give one of them another name=")
        seen.add(rule.name)
    plain = [rule.name for rule in rules if rule.scope is None]
    scoped = [rule.name for rule in rules if rule.scope not in (None, SHARED)]
    if plain and scoped:
        raise ConfigError(
            f"{plain[0]!r} has no scope but {scoped[0]!r} has one, so no key could serve both; give every rule a scope"
        )
    return tuple(rules)


def make_rule(
    kind: Kind,
    quota: str | Quota,
    scope: str | None,
    tiers: Mapping[str, str | Quota] | None,
    name: str | None,
    buckets: int = DEFAULT_BUCKETS,
    strict: bool = True,
) -> Rule:
    """Return a rule of a kind that is known only at run time; the four functions above are the usual way.

    Raises:
        ConfigError: The parts do not go together.
    """
    quota = _quota(quota)
    by_tier = {tier: _quota(tier_quota) for tier, tier_quota in (tiers or {}).items()}
    for tier, tier_quota in by_tier.items():
        if tier_quota.period_us != quota.period_us:
            raise ConfigError(
                f"tier {tier!r} has {str(tier_quota)!r}, but tiers count in one state and so need the period of "
                f"{str(quota)!r}"
            )
    if kind != "token_bucket" and any(q.burst is not None for q in (quota, *by_tier.values())):
        raise ConfigError(f"{kind} has no burst; use token_bucket({str(quota)!r})")
    if type(buckets) is not int or not 1 <= buckets <= MAX_BUCKETS:
        raise ConfigError(f"buckets must be a whole number from 1 to {MAX_BUCKETS}, not {buckets!r}")
    if scope is not None and (not isinstance(scope, str) or not scope):
        raise ConfigError(f"a scope is a word like 'user', or '*' for everybody together, not {scope!r}")
    if name is None:
        name = "/".join(filter(None, (kind, format_period(quota.period_us), scope)))
    elif not isinstance(name, str) or not name:
        raise ConfigError(f"a rule's name is text, not {name!r}")
    return Rule(kind, quota, name, scope, MappingProxyType(by_tier), buckets, strict)


def _restore(
    kind: Kind,
    quota: Quota,
    name: str,
    scope: str | None,
    tiers: dict[str, Quota],
    buckets: int,
    strict: bool,
) -> Rule:
    return Rule(kind, quota, name, scope, MappingProxyType(tiers), buckets, strict)


def _quota(quota: str | Quota) -> Quota:
    return quota if isinstance(quota, Quota) else Quota.parse(quota)


def _with_burst(quota: Quota, burst: int) -> Quota:
    if quota.burst is not None and quota.burst != burst:
        raise ConfigError(f"burst={burst} contradicts {str(quota)!r}; say it once")
    return Quota(quota.limit, quota.period_us, burst)


def _default_burst(quota: Quota, burst: int) -> Quota:
    return quota if quota.burst is not None or quota.limit == 0 else _with_burst(quota, burst)
