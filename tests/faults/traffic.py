"""The limiters under test: a fixed set, and random limiters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from headgate import Rule, calendar, concurrent, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.algorithms import MAX_ENTRIES
from tests.faults.history import RuleSpec

DAY_US = 86_400_000_000
ROOMY = 1000
"""A limit that no run reaches; also the highest limit that every kind of rule supports on a shared store."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Definition of a limiter under test.

    Attributes:
        rules: Its rules.
        quotas: Quotas that some calls pass as the argument `quota`.
        others: The same rules with different limits, in force after a reload; empty if a reload changes nothing.
        records: Whether `record` is called, which may exceed the limit.
    """

    rules: tuple[Rule, ...]
    quotas: tuple[Any, ...] = ()
    others: tuple[Rule, ...] = ()
    records: bool = False

    @property
    def has_scopes(self) -> bool:
        """Whether its key is a mapping."""
        return any(rule.scope for rule in self.rules)

    @property
    def has_places(self) -> bool:
        """Whether a rule counts open holds only."""
        return any(rule.kind == "concurrent" for rule in self.rules)

    def key(self, name: str) -> Any:
        """Return a key in the form that the limiter needs."""
        return {"user": name} if self.has_scopes else name

    def cost(self, units: int) -> Any:
        """Return the same cost for every rule, by unit if the rules count several units."""
        names = {rule.unit for rule in self.rules}
        return units if len(names) == 1 else dict.fromkeys(names, units)

    def roomy(self) -> tuple[Rule, ...]:
        """Return the rules with limits that are never reached, so that decisions show all counts; keep token buckets."""
        return tuple(
            rule if rule.kind == "token_bucket" else with_limit(rule, max(ROOMY, rule.quota.limit))
            for rule in self.rules
        )

    def specs(self, *further: tuple[Rule, ...]) -> tuple[RuleSpec, ...]:
        """Return the rules in the form that the checker needs; `further` contains variants of them that are also used."""
        variants = [rules for rules in (self.others, *further) if rules]
        return tuple(self._spec(*rules) for rules in zip(self.rules, *variants, strict=True))

    def _spec(self, rule: Rule, *variants: Rule) -> RuleSpec:
        texts = [text if isinstance(text, str) else text.get(rule.name) for text in self.quotas]
        given = [rule.quota_from(text) for text in texts if text]
        quotas = [rule.quota, *rule.tiers.values(), *(variant.quota for variant in variants), *given]
        bursts = tuple(quota.burst or quota.limit for quota in quotas) if rule.kind == "token_bucket" else ()
        is_calendar = rule.kind == "calendar"  # days of UTC are windows since the epoch
        return RuleSpec(
            "fixed_window" if is_calendar else rule.kind,
            DAY_US if is_calendar else rule.quota.period_us,
            tuple(quota.limit for quota in quotas),
            bursts,
            rule.buckets,
            rule.scope == "*",
        )


def with_limit(rule: Rule, limit: int) -> Rule:
    """Return a rule with another limit."""
    return replace(rule, quota=replace(rule.quota, limit=limit))


def subjects(scale: int = 1) -> dict[str, Subject]:
    """Return the fixed limiters by name; a faster store needs a larger scale to reach the limits."""
    n = scale
    log = sliding_log(f"{40 * n}/s", tiers={"pro": f"{60 * n}/s"})
    fixed = fixed_window(f"{150 * n}/s", tiers={"pro": f"{200 * n}/s"})
    return {
        "log": Subject((log,), (f"{50 * n}/s",), (with_limit(log, 45 * n),)),
        "window": Subject(
            (sliding_window(f"{300 * n}/2s", buckets=8, tiers={"pro": f"{400 * n}/2s"}),),
            (f"{350 * n}/2s",),
            records=True,
        ),
        "fixed": Subject((fixed,), others=(with_limit(fixed, 170 * n),), records=True),
        "bucket": Subject(
            (token_bucket(f"{100 * n}/s", burst=50 * n, tiers={"pro": f"{150 * n}/s burst {40 * n}"}),)
        ),
        "places": Subject(
            (
                concurrent(6, lease="700ms", tiers={"pro": 8}),
                sliding_log(f"{min(500 * n, MAX_ENTRIES)}/s", name="rate"),
            ),
        ),
        "mixed": Subject(
            (
                sliding_window(f"{80 * n}/s", scope="user", buckets=10, tiers={"pro": f"{120 * n}/s"}),
                token_bucket(f"{400 * n}/s", burst=100 * n, scope="*"),
            ),
        ),
    }


def random_subject(rng: Random) -> Subject:
    """Return a limiter with one to three rules of any kind."""
    has_scopes, has_units = rng.random() < 0.3, rng.random() < 0.3
    rules = []
    for i in range(rng.choice((1, 1, 2, 3))):
        more: dict[str, Any] = {"scope": rng.choice(("user", "*"))} if has_scopes else {}
        if has_units and i:
            more["unit"] = "tokens"
        rules.append(random_rule(rng, f"rule-{i}", more))
    others = tuple(with_limit(rule, max(1, rule.quota.limit - 2)) for rule in rules)
    windows = [rule for rule in rules if rule.kind in ("fixed_window", "sliding_log", "sliding_window")]
    quota = {rule.name: f"{rule.quota.limit + 3}/{rule.quota.period_us // 1000}ms" for rule in windows}
    has_places = any(rule.kind == "concurrent" for rule in rules)
    return Subject(tuple(rules), (quota,) if quota else (), others, records=not has_places)


def random_rule(rng: Random, name: str, more: dict[str, Any]) -> Rule:
    """Return a rule of a random kind, with a higher limit for one tier."""
    kind = rng.choice((*WINDOWS, "token_bucket", "calendar", *("concurrent",) * 3))
    limit = rng.randrange(3, 30) * rng.choice((1, 1, 20))
    pro, seconds = limit + rng.randrange(1, 9), rng.choice((1, 2, 5))
    if kind == "concurrent":
        more.pop("unit", None)
        lease = rng.choice((600, 600, seconds / 2))
        return concurrent(limit, lease=lease, tiers={"pro": pro}, name=name, **more)
    if kind == "calendar":
        return calendar(f"{4 * limit}/day", tiers={"pro": f"{4 * pro}/day"}, name=name, **more)
    if kind == "token_bucket":
        burst = rng.randrange(3, 20) * rng.choice((1, 1, 20))
        tiers = {"pro": f"{pro}/{seconds}s burst {burst}"}
        return token_bucket(f"{limit}/{seconds}s", burst=burst, tiers=tiers, name=name, **more)
    if kind == "sliding_window":
        more["buckets"] = rng.choice((4, 10))
    return WINDOWS[kind](f"{limit}/{seconds}s", tiers={"pro": f"{pro}/{seconds}s"}, name=name, **more)


WINDOWS: dict[str, Callable[..., Rule]] = {
    "fixed_window": fixed_window,
    "sliding_window": sliding_window,
    "sliding_log": sliding_log,
}


def policy_text(store: str, limiters: Mapping[str, Subject], *, others: bool = False) -> str:
    """Return the text of a policy file with some limiters, or with the changed limits of each if `others`."""
    lines = [f'[store]\nurl = "{store}"\n']
    for name, subject in limiters.items():
        rules = (others and subject.others) or subject.rules
        lines.append(f"[limiters.{name}]\nrules = [{', '.join(map(_rule_text, rules))}]\n")
    return "\n".join(lines)


def _rule_text(rule: Rule) -> str:
    def data(quota: Any) -> str:
        return json.dumps(rule.data_of(quota))

    parts = {"kind": json.dumps(rule.kind), "name": json.dumps(rule.name), "quota": data(rule.quota)}
    if rule.kind == "concurrent":
        parts["lease"] = f'"{rule.quota.period_us // 1000}ms"'
    elif rule.unit != "requests":
        parts["unit"] = json.dumps(rule.unit)
    if rule.kind == "sliding_window":
        parts["buckets"] = str(rule.buckets)
    if rule.scope:
        parts["scope"] = json.dumps(rule.scope)
    if rule.tiers:
        tiers = ", ".join(f"{tier} = {data(quota)}" for tier, quota in rule.tiers.items())
        parts["tiers"] = f"{{ {tiers} }}"
    return "{ " + ", ".join(f"{name} = {value}" for name, value in parts.items()) + " }"
