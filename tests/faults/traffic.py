"""What the workers ask: the limiters, and the calls that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headgate import Rule, concurrent, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.algorithms import MAX_ENTRIES
from tests.faults.history import RuleSpec


@dataclass(frozen=True, slots=True)
class Subject:
    """A limiter that is hammered.

    Attributes:
        rules: Its rules.
        quotas: Quotas that some calls bring along.
        tiers: Tiers that some calls have.
        scoped: Whether its key is a mapping.
        records: Whether units are recorded, also beyond the limit.
        places: Whether a rule counts only what is held.
    """

    rules: tuple[Rule, ...]
    quotas: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ("pro",)
    scoped: bool = False
    records: bool = False
    places: bool = False

    def key(self, name: str) -> Any:
        """Return a key as the limiter wants it."""
        return {"user": name} if self.scoped else name


def subjects(scale: int = 1) -> dict[str, Subject]:
    """Return the limiters by name; the faster a store is, the larger the scale that keeps them busy."""
    n = scale
    return {
        "log": Subject((sliding_log(f"{40 * n}/s", tiers={"pro": f"{60 * n}/s"}),), (f"{50 * n}/s",)),
        "window": Subject(
            (sliding_window(f"{300 * n}/2s", buckets=8, tiers={"pro": f"{400 * n}/2s"}),),
            (f"{350 * n}/2s",),
            records=True,
        ),
        "fixed": Subject((fixed_window(f"{150 * n}/s", tiers={"pro": f"{200 * n}/s"}),), records=True),
        "bucket": Subject(
            (token_bucket(f"{100 * n}/s", burst=50 * n, tiers={"pro": f"{150 * n}/s burst {40 * n}"}),)
        ),
        "places": Subject(
            (
                concurrent(6, lease="700ms", tiers={"pro": 8}),
                sliding_log(f"{min(500 * n, MAX_ENTRIES)}/s", name="rate"),
            ),
            places=True,
        ),
        "mixed": Subject(
            (
                sliding_window(f"{80 * n}/s", scope="user", buckets=10, tiers={"pro": f"{120 * n}/s"}),
                token_bucket(f"{400 * n}/s", burst=100 * n, scope="*"),
            ),
            scoped=True,
        ),
    }


def specs(
    scale: int = 1, more_limits: dict[str, tuple[int, ...]] | None = None
) -> dict[str, tuple[RuleSpec, ...]]:
    """Return the same limiters as the checker needs to know them."""
    found = {}
    for name, subject in subjects(scale).items():
        more = (more_limits or {}).get(name, ())
        found[name] = tuple(
            _spec(rule, subject.quotas, more if i == 0 else ()) for i, rule in enumerate(subject.rules)
        )
    return found


def _spec(rule: Rule, texts: tuple[str, ...], more: tuple[int, ...]) -> RuleSpec:
    quotas = [rule.quota, *rule.tiers.values(), *(rule.quota_from(text) for text in texts)]
    limits = (*(quota.limit for quota in quotas), *more)
    bursts = (
        (*((quota.burst or quota.limit) for quota in quotas), *more) if rule.kind == "token_bucket" else ()
    )
    return RuleSpec(rule.kind, rule.quota.period_us, limits, bursts, rule.buckets, rule.scope == "*")
