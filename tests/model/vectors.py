"""Compute the answers in the vectors of `headgate.testing` with the model: `python -m tests.model.vectors`.

The files contain the scenarios. To add one, write its steps as described in `headgate.testing.scenarios`, without `binds`
and `verdicts`, and run this module: it plays every scenario and writes the answers. The answers show at which times they
will change next, which helps to choose further steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.model.books import Figures, Quota
from tests.model.limiter import Hold, ModelLimiter, Quotas, Rule, binding

FOLDER = Path(__file__).resolve().parents[2] / "src" / "headgate" / "testing" / "vectors"
Raw = dict[str, Any]
"""A JSON object."""


def answered(text: str) -> str:
    """Return the text of a vector file with the answers of the model, one step on each line."""
    return "[\n" + ",\n".join(_answered_scenario(raw) for raw in json.loads(text)) + "\n]\n"


def _answered_scenario(raw: Raw) -> str:
    player = ModelPlayer(raw["versions"])
    versions = ",\n".join(map(_compact, raw["versions"]))
    steps = ",\n".join(_compact(_answered_step(player, step)) for step in raw["steps"])
    return f'{{"name":{_compact(raw["name"])},\n"versions":[\n{versions}\n],\n"steps":[\n{steps}\n]}}'


def _answered_step(player: ModelPlayer, step: Raw) -> Raw:
    asked = {name: value for name, value in step.items() if name not in ("binds", "verdicts")}
    figures = player.play(step)
    if figures is None:
        return asked
    binds = binding(figures)
    verdicts = [[f.allowed, f.limit, f.remaining, f.retry_after, f.reset_after] for f in figures]
    return asked | ({"binds": binds} if binds else {}) | {"verdicts": verdicts}


class ModelPlayer:
    """Plays the steps of a scenario on the model.

    Args:
        versions: The rules, and then the same rules with other limits.
    """

    def __init__(self, versions: list[list[Raw]]) -> None:
        books: dict[tuple[str, str], Any] = {}
        self._limiters = [ModelLimiter([_rule(**raw) for raw in rules], books) for rules in versions]
        self._holds: dict[int, Hold] = {}

    def play(self, step: Raw) -> list[Figures] | None:
        """Make the call, and return the verdict of each rule, or None if the call makes no decision."""
        op, now = step["op"], step["now"]
        if op == "settle":
            self._holds[step["hold"]].settle(now, step.get("cost", 0))
            return None
        if op == "confirm":
            return self._holds[step["hold"]].confirm(now, step.get("cost"))
        if op == "renew":
            return self._holds[step["hold"]].renew(now)
        return self._call(self._limiters[step.get("version", 0)], step)

    def _call(self, limiter: ModelLimiter, step: Raw) -> list[Figures] | None:
        if step["op"] == "reset":
            limiter.reset(step["key"])
            return None
        call = step["now"], step["key"], step.get("cost", 0), step.get("tier"), _quotas(limiter, step)
        if step["op"] == "record":
            limiter.record(limiter.request(*call))
            return None
        if step["op"] == "hold":
            figures, self._holds[step["hold"]] = limiter.hold(*call)
            return figures
        return limiter.hit(*call) if step["op"] == "hit" else limiter.check(*call)


def _quotas(limiter: ModelLimiter, step: Raw) -> Quotas:
    given: Raw = step.get("quotas", {})
    return {
        rule.name: _quota(rule.quota.period, **given[rule.name])
        for rule in limiter.rules
        if rule.name in given
    }


def _rule(
    kind: str,
    limit: int,
    period_us: int,
    name: str,
    burst: int | None = None,
    longest_us: int = 0,
    **options: Any,
) -> Rule:
    tiers = {tier: _quota(period_us, **raw) for tier, raw in options.pop("tiers", {}).items()}
    return Rule(kind, Quota(limit, period_us, burst), name, tiers=tiers, longest=longest_us, **options)


def _quota(period: int, limit: int, burst: int | None = None) -> Quota:
    return Quota(limit, period, burst)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    for path in sorted(FOLDER.iterdir()):
        path.write_text(answered(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.name)
