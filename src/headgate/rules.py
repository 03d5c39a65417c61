"""Rules: an algorithm with its quota, name and scope.

A rule is a value. `headgate.algorithms` creates the object that decides by it.

The scope selects the counter: without a scope, a rule counts per plain key; with a scope, per entry of that name in the
call's mapping; with `"*"`, all callers share one counter. The unit of a rule is requests by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal, ParamSpec

from headgate._checks import check_count, check_text
from headgate.calendars import check_timezone
from headgate.errors import ConfigError
from headgate.quota import (
    SPANS_US,
    Quota,
    Span,
    format_period,
    parse_calendar,
    parse_quotas,
    period_from,
    period_in_words,
)

__all__ = ["DEFAULT_BUCKETS", "REQUESTS", "SHARED", "make_rule"]

P = ParamSpec("P")

Kind = Literal[
    "fixed_window", "sliding_window", "sliding_log", "token_bucket", "concurrent", "calendar", "penalty"
]

QuotaLike = str | int | Quota
"""A quota as an argument: text, a `Quota`, or a number for a `concurrent` rule."""

RATES: tuple[Kind, ...] = ("fixed_window", "sliding_window", "sliding_log", "token_bucket")
"""The kinds of rules that count units per period."""

SHARED = "*"
"""The scope of a rule with one counter for all callers."""

REQUESTS = "requests"
"""The default unit of a rule."""

DEFAULT_BUCKETS = 60
"""The default number of buckets of a sliding window."""
MAX_BUCKETS = 100_000
MAX_GROWTH = 100
MAX_WITH_PENALTY = 40
"""The highest number of rules of a limiter with a penalty: the ports have one bit per rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An algorithm with its quota, name and scope; created by the functions below.

    Attributes:
        kind: The algorithm.
        quota: The quota of callers without a tier. Its period is the lease of a `concurrent` rule, and the longest duration
            of the span of a `calendar` rule. Of a `penalty`, it has the number of refusals and the duration.
        name: The name in decisions, header fields and metrics. A name other than the default is part of the state identity.
        scope: The scope; see the module.
        tiers: Quotas by tier; all tiers share the same state. An unknown tier has the rule's quota.
        buckets: The number of buckets of a sliding window.
        strict: Whether a sliding window counts a unit until the end of its bucket, so that the limit is never exceeded.
        unit: The counted unit.
        span: The windows of a calendar rule.
        timezone: The time zone of a calendar rule.
        lease_us: The time that may pass between charging units and admitting them, for a limiter with a `lease=`.
        growth: The factor by which each penalty is longer than the one before.
        longest_us: The duration of the longest penalty in microseconds; 0 for other rules.
    """

    kind: Kind
    quota: Quota
    name: str
    scope: str | None = None
    tiers: Mapping[str, Quota] = field(default_factory=lambda: MappingProxyType({}))
    buckets: int = DEFAULT_BUCKETS
    strict: bool = True
    unit: str = REQUESTS
    span: Span | None = None
    timezone: str | None = None
    lease_us: int = 0
    growth: int = 1
    longest_us: int = 0

    def __hash__(self) -> int:
        return hash((self.kind, self.quota, self.name, self.scope, self.buckets, self.strict, self.unit))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # A `MappingProxyType` cannot be pickled or copied.
        values = {own.name: getattr(self, own.name) for own in fields(self)}
        return _restore, ({**values, "tiers": dict(self.tiers)},)

    @property
    def identity(self) -> str:
        """The identity of this rule's states within the limiter; a changed limit keeps the counts.

        A default name is used without the kind that another rule of the limiter may append to it.
        """
        shape = f"{self.kind}/{self.quota.period_us}"
        if self.kind == "sliding_window":
            shape += f"/{self.buckets}/{'strict' if self.strict else 'lenient'}"
        elif self.kind == "concurrent":
            shape = self.kind  # each lease has its own end, so a changed lease keeps the held places
        elif self.kind == "calendar":
            shape = f"{self.kind}/{self.span}/{self.timezone}"
        elif self.kind == "penalty":
            shape += f"/{self.growth}/{self.longest_us}"
        return f"{shape}/{self._default_name if self._has_default_name else self.name}"

    @property
    def _default_name(self) -> str:
        return default_name(self.kind, self.quota, self.span, self.scope, self.unit)

    @property
    def _has_default_name(self) -> bool:
        return self.name in (self._default_name, _with_kind(self._default_name, self.kind))

    def quota_for(self, tier: str | None) -> Quota:
        """Return the quota of a tier, or the rule's quota if the tier is unknown."""
        return self.quota if tier is None else self.tiers.get(tier, self.quota)

    def quota_from(self, value: QuotaLike) -> Quota:
        """Return the checked quota of a tier or a call.

        Raises:
            ConfigError: The value is not a quota, has another period, or a burst that this kind of rule does not support.
        """
        quota = self._read(value)
        if quota.period_us != self.quota.period_us:
            given = value if isinstance(value, str) else str(quota)
            raise ConfigError(
                f"rule {self.name!r} cannot count by {given!r}: all its quotas count in one state and so need the period of "
                f"{self.text_of(self.quota)!r}"
            )
        if quota.burst is not None and self.kind != "token_bucket":
            raise ConfigError(f"{self.kind} has no burst; use token_bucket({str(quota)!r})")
        if self.kind == "penalty" and not quota.limit:
            raise ConfigError(f"rule {self.name!r}: a penalty begins after at least 1 refusal, not 0")
        return quota

    def _read(self, value: QuotaLike) -> Quota:
        if isinstance(value, Quota):
            return value
        if self.kind == "concurrent":
            if type(value) is not int:
                raise ConfigError(
                    f"rule {self.name!r} is concurrent, so its quotas are whole numbers, not {value!r}"
                )
            return Quota(value, self.quota.period_us)
        if self.kind == "calendar":
            limit, span = parse_calendar(value)  # type: ignore[arg-type]  # it raises ConfigError for a number
            return Quota(limit, SPANS_US[span])
        return Quota.parse(value)  # type: ignore[arg-type]

    def data_of(self, quota: Quota) -> str | int:
        """Return a quota of this rule as in a policy file: text, or a number for a concurrent rule."""
        return quota.limit if self.kind == "concurrent" else self.text_of(quota)

    def text_of(self, quota: Quota) -> str:
        """Return a quota of this rule as text."""
        if self.kind == "concurrent":
            return f"{quota.limit} at once"
        if self.kind == "calendar":
            return f"{quota.limit}/{self.span}"
        return str(quota)

    @property
    def is_rate(self) -> bool:
        """Whether it counts units by time, so that a penalty may count its refusals."""
        return self.kind not in ("concurrent", "penalty")

    def __str__(self) -> str:
        return f"{self.name} ({self.text_of(self.quota)})"


def fixed_window(
    quota: str | Quota,
    *,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
    unit: str = REQUESTS,
) -> Rule:
    """Return a rule that counts in windows aligned to the epoch.

    The cheapest rule. Around the boundary of two windows, up to twice the limit may be admitted within one period.
    """
    return make_rule("fixed_window", quota, scope, tiers, name, unit=unit)


def sliding_window(
    quota: str | Quota,
    *,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
    buckets: int = DEFAULT_BUCKETS,
    strict: bool = True,
    unit: str = REQUESTS,
) -> Rule:
    """Return a rule that counts in small buckets over the last period.

    If strict (the default), no interval of the length of the period ever contains more than the limit; a unit may count up
    to one bucket longer than the period. With `strict=False` a unit may expire up to one bucket early instead.
    """
    return make_rule("sliding_window", quota, scope, tiers, name, buckets, strict, unit=unit)


def sliding_log(
    quota: str | Quota,
    *,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
    unit: str = REQUESTS,
) -> Rule:
    """Return a rule that stores the time of each admitted request: exact to the microsecond, state as large as the limit."""
    return make_rule("sliding_log", quota, scope, tiers, name, unit=unit)


def token_bucket(
    quota: str | Quota,
    *,
    burst: int | None = None,
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
    unit: str = REQUESTS,
) -> Rule:
    """Return a rule that admits at a steady rate, and up to `burst` units at once (by default the limit).

    Within one period after a pause, up to limit + burst may be admitted. `burst` is the default for tiers.
    """
    return make_rule("token_bucket", quota, scope, tiers, name, burst=burst, unit=unit)


def _needing_lease(function: Callable[P, Rule]) -> Callable[P, Rule]:
    """Decorate `concurrent` with an error message for a missing lease."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Rule:
        if "lease" not in kwargs:
            raise ConfigError(
                "concurrent needs lease=, the time after which the place of a crashed holder is free, "
                "as in concurrent(5, lease='60s')"
            )
        return function(*args, **kwargs)

    return checked


@_needing_lease
def concurrent(
    limit: int,
    *,
    lease: str | float | timedelta,
    scope: str | None = None,
    tiers: Mapping[str, int | Quota] | None = None,
    name: str | None = None,
    unit: str = REQUESTS,
) -> Rule:
    """Return a rule that limits how many units are held at once.

    A hold takes a place, and frees it when the hold ends. `lease` limits how long the place of a crashed holder stays
    taken; longer work calls `hold.renew()` before the lease ends. Only holds work with this rule: a hit or a record has no
    end.

    Args:
        limit: Units at once.
        lease: Text like `60s`, seconds or a timedelta.
        scope: The scope; see the module.
        tiers: Other limits by tier.
        name: The rule's name.
        unit: The counted unit.
    """
    if type(limit) is not int:
        raise ConfigError(f"concurrent counts whole units, as in concurrent(5, lease='60s'), not {limit!r}")
    quota = Quota(limit, period_from(lease, "lease"))
    return make_rule("concurrent", quota, scope, tiers, name, unit=unit)


def calendar(
    quota: str,
    *,
    timezone: str = "UTC",
    scope: str | None = None,
    tiers: Mapping[str, str | Quota] | None = None,
    name: str | None = None,
    unit: str = REQUESTS,
) -> Rule:
    """Return a rule that counts by the days, weeks, months or years of a time zone.

    Each begins at local midnight, a week on Monday. Like with `fixed_window`, up to twice the limit may be admitted around
    the boundary of two windows.

    Args:
        quota: Text like `10000/month`.
        timezone: A name of the IANA time zone database, like `Europe/Berlin`.
        scope: The scope; see the module.
        tiers: Other quotas by tier, with the same span.
        name: The rule's name.
        unit: The counted unit.
    """
    limit, span = parse_calendar(quota)
    own = Quota(limit, SPANS_US[span])
    return make_rule("calendar", own, scope, tiers, name, unit=unit, span=span, timezone=timezone)


def penalty(
    duration: str | float | timedelta,
    *,
    after: int,
    growth: int = 1,
    longest: str | float | timedelta | None = None,
    scope: str | None = None,
    name: str | None = None,
) -> Rule:
    """Return a rule that refuses everything for a while after too many refusals by the other rules of its scope.

    It counts the final refusals of `hit`, `hold` and `wait`, from the first one for `duration`. Not counted are checks,
    refusals by `concurrent` rules and limits of 0, answers of the failure policy, and its own refusals. Open holds are
    settled as usual. `reset` ends a penalty.

    If strangers can cause refusals of a key, they can lock it. For logins, use the account and the address together as
    the key.

    Args:
        duration: The duration of a penalty, and of the time in which refusals are counted: text like `15m`, seconds or a
            timedelta.
        after: The number of refusals after which a penalty begins.
        growth: The factor by which each further penalty is longer, from 1 to 100.
        longest: The duration of the longest penalty; required with `growth`. The next penalty has `duration` again when
            this time has passed since the end of a penalty.
        scope: The scope; see the module. It counts the refusals of the rules with the same scope.
        name: The rule's name.
    """
    if type(after) is not int or after < 1:
        raise ConfigError(
            f"after= of a penalty is a whole number of refusals, at least 1, as in penalty('15m', after=3), not {after!r}"
        )
    quota = Quota(after, period_from(duration, "duration"))
    longest_us = None if longest is None else period_from(longest, "longest penalty")
    return make_rule("penalty", quota, scope, name=name, growth=growth, longest_us=longest_us)


def rules_from(specs: Iterable[str | Rule]) -> tuple[Rule, ...]:
    """Return the rules of a limiter from text and rules; text means sliding windows.

    A quota with a burst means a token bucket.

    Raises:
        ConfigError: Two rules have the same name, or no key fits all rules.
    """
    rules: list[Rule] = []
    for spec in specs:
        if isinstance(spec, Rule):
            rules.append(spec)
        elif isinstance(spec, str):
            rules += [sliding_window(q) if q.burst is None else token_bucket(q) for q in parse_quotas(spec)]
        else:
            raise ConfigError(f"a rule is text like '5/minute' or sliding_window('5/minute'), not {spec!r}")
    rules = _distinct(rules)
    check_penalties(rules)
    plain = [rule.name for rule in rules if rule.scope is None]
    scoped = [rule.name for rule in rules if rule.scope not in (None, SHARED)]
    if plain and scoped:
        raise ConfigError(
            f"{plain[0]!r} has no scope but {scoped[0]!r} has one, so no key could serve both; give every rule a scope"
        )
    return tuple(rules)


def check_penalties(rules: Collection[Rule]) -> None:
    """Refuse a penalty without a rule whose refusals it could count, and a penalty among too many rules.

    Raises:
        ConfigError: There is such a penalty.
    """
    rated = {rule.scope for rule in rules if rule.is_rate}
    for rule in rules:
        if rule.kind == "penalty" and rule.scope not in rated:
            scope = "without a scope" if rule.scope is None else f"with the scope {rule.scope!r}"
            remedy = "give both the same scope" if rated else "add one, such as '5/minute'"
            raise ConfigError(
                f"rule {rule.name!r} is a penalty and counts the refusals of rules {scope}, but there is none; {remedy}"
            )
        if rule.kind == "penalty" and len(rules) > MAX_WITH_PENALTY:
            raise ConfigError(
                f"a limiter with a penalty has at most {MAX_WITH_PENALTY} rules, not {len(rules)}"
            )


def scopes_of(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the scopes that a key of these rules needs; empty for plain keys."""
    return frozenset(rule.scope for rule in rules if rule.scope is not None and rule.scope != SHARED)


def leased(rules: tuple[Rule, ...], lease_us: int) -> tuple[Rule, ...]:
    """Return rules that allow for a time of `lease_us` between charging units and admitting them."""
    return tuple(replace(rule, lease_us=lease_us) for rule in rules)


def make_rule(
    kind: Kind,
    quota: str | Quota,
    scope: str | None = None,
    tiers: Mapping[str, Any] | None = None,
    name: str | None = None,
    buckets: int = DEFAULT_BUCKETS,
    strict: bool = True,
    *,
    burst: int | None = None,
    unit: str = REQUESTS,
    span: Span | None = None,
    timezone: str | None = None,
    growth: int = 1,
    longest_us: int | None = None,
) -> Rule:
    """Return a rule of a kind that is known only at run time.

    Raises:
        ConfigError: The arguments do not fit together.
    """
    check_count("buckets", buckets, 1, MAX_BUCKETS)
    if scope is not None:
        scope = check_text("a scope, like 'user' or '*' for everybody together,", scope)
    unit = check_text("a unit, like 'tokens',", unit)
    if kind == "calendar":
        check_timezone(timezone)
    quota = quota if isinstance(quota, Quota) else Quota.parse(quota)
    if burst is not None:
        if quota.burst not in (None, burst):
            raise ConfigError(f"burst={burst} contradicts {str(quota)!r}; write it once")
        quota = replace(quota, burst=burst)
    if kind == "penalty":
        if unit != REQUESTS:
            raise ConfigError(f"a penalty counts refusals, not {unit!r}; leave out the unit")
        longest_us = _longest_penalty(quota, growth, longest_us)
    rule = Rule(
        kind,
        quota,
        default_name(kind, quota, span, scope, unit) if name is None else check_text("a rule's name", name),
        scope,
        buckets=buckets,
        strict=strict,
        unit=unit,
        span=span,
        timezone=timezone,
        growth=growth,
        longest_us=longest_us or 0,
    )
    rule.quota_from(quota)
    tiers = {} if tiers is None else tiers
    if not isinstance(tiers, Mapping) or not all(isinstance(tier, str) for tier in tiers):
        raise ConfigError(
            f"tiers is a mapping from names to quotas, like {{'pro': {rule.data_of(quota)!r}}}, not {tiers!r}"
        )
    by_tier = {}
    for tier, tier_quota in tiers.items():
        try:
            own = rule.quota_from(tier_quota)
            by_tier[tier] = replace(own, burst=burst) if own.burst is None and own.limit else own
        except ConfigError as error:
            raise ConfigError(f"tier {tier!r}: {error}") from None
    return replace(rule, tiers=MappingProxyType(by_tier))


def default_name(kind: Kind, quota: Quota, span: Span | None, scope: str | None, unit: str) -> str:
    """Return the name of a rule without `name=`, such as `per-minute`, `per-hour-user` or `calendar-month`."""
    first = {"concurrent": kind, "calendar": f"calendar-{span}", "penalty": kind}.get(kind)
    first = first or f"per-{period_in_words(quota.period_us)}"
    parts = (first, "shared" if scope == SHARED else scope, "" if unit == REQUESTS else unit)
    return "-".join(filter(None, parts))


def _longest_penalty(quota: Quota, growth: int, longest_us: int | None) -> int:
    """Return the duration of the longest penalty.

    Raises:
        ConfigError: The arguments do not fit together.
    """
    check_count("growth", growth, 1, MAX_GROWTH)
    if (growth > 1) is not (longest_us is not None):
        raise ConfigError(
            "growth= and longest= of a penalty belong together, as in growth=2, longest='1 day'"
        )
    if longest_us is not None and longest_us < quota.period_us:
        first, longest = format_period(quota.period_us), format_period(longest_us)
        raise ConfigError(f"the longest penalty, {longest}, cannot be shorter than the first one, {first}")
    return quota.period_us if longest_us is None else longest_us


def _with_kind(name: str, kind: Kind) -> str:
    return f"{name}-{kind.replace('_', '-')}"


def _distinct(rules: list[Rule]) -> list[Rule]:
    """Return the rules with their kind appended to default names that are used twice."""
    used = Counter(rule.name for rule in rules)
    named: list[Rule] = []
    for rule in rules:
        is_lengthened = used[rule.name] > 1 and rule._has_default_name
        own = replace(rule, name=_with_kind(rule.name, rule.kind)) if is_lengthened else rule
        if any(own.name == other.name or own.identity == other.identity for other in named):
            raise ConfigError(f"two rules are called {rule.name!r}; give one of them another name=")
        named.append(own)
    return named


def _restore(values: dict[str, Any]) -> Rule:
    return Rule(**{**values, "tiers": MappingProxyType(values["tiers"])})
