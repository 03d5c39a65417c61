"""Counting decisions for a report: by rule, key, route and time. Memory is bounded whatever the log has in it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from headgate import Decision
from headgate.observe import TopKeys
from headgate.policy import in_words
from headgate_server.replay.engine import ReplayedLimiter
from headgate_server.replay.requests import LoggedRequest
from headgate_server.replay.sketches import Histogram, KeySample, Timeline

MOST_KEYS = 50_000
"""Keys that are followed one by one; of more, a fair sample is."""
MOST_CALLERS = 10_000
"""Refused callers that are counted exactly; of more, the worst ones are, a little too low."""
MOST_ROUTES = 1_000
SHOWN_CALLERS = 20
SHOWN_ROUTES = 20

ADMITTED, REFUSED = 0, 1
OTHER_ROUTES = "(other routes)"
NO_ROUTE = "(unknown)"

_USE_STEPS = 10
WAIT_STEPS = (
    (1, "up to 1 s"),
    (10, "up to 10 s"),
    (60, "up to 1 min"),
    (600, "up to 10 min"),
    (3600, "up to 1 h"),
    (21_600, "up to 6 h"),
    (86_400, "up to 1 day"),
)
_WAIT_ENDS = [seconds * 1000 for seconds, _ in WAIT_STEPS]
LONGER = "longer"


@dataclass(slots=True)
class KeyFigures:
    """What is kept of one key.

    Attributes:
        requests: How many it had.
        refused: How many of these were refused.
        use: The most it used of the limit that bound it, in parts per thousand.
    """

    requests: int = 0
    refused: int = 0
    use: int = 0


class ReplayTally:
    """What a limiter decided about a log.

    Args:
        limiter: The limiter; of its rules, the names and words are shown.
    """

    def __init__(self, limiter: ReplayedLimiter) -> None:
        self._limiter = limiter
        self._rules = limiter.policy.rules
        self.counts = [0, 0]
        self.too_costly = 0
        self.never = 0
        self.timeline = Timeline(2)
        self.routes: dict[str, list[int]] = {}
        self.keys: KeySample[KeyFigures] = KeySample(MOST_KEYS, KeyFigures)
        self.worst: TopKeys[str] = TopKeys(MOST_CALLERS)
        self.waits_ms = Histogram()
        self.wait_steps = [0] * (len(WAIT_STEPS) + 1)
        self.said_no = [0] * len(self._rules)
        self.alone = [0] * len(self._rules)
        self.binding: dict[str, int] = {rule.name: 0 for rule in self._rules}

    def add(self, request: LoggedRequest, decision: Decision | None) -> None:
        """Count a decision; `None` for a cost that is never admitted."""
        outcome = ADMITTED if decision is not None and decision.allowed else REFUSED
        self.counts[outcome] += 1
        self.timeline.at(request.at)[outcome] += 1
        self._route(request.route)[outcome] += 1
        caller = request.caller
        key = self.keys.get(caller) or self.keys.add(caller)
        if key is not None:
            key.requests += 1
            if outcome == REFUSED:
                key.refused += 1
            elif decision is not None and (limit := decision.limit):
                use = 1000 - (decision.remaining or 0) * 1000 // limit
                if use > key.use:
                    key.use = use
        if outcome == REFUSED:
            self._refused(caller, decision)

    def _route(self, route: str | None) -> list[int]:
        routes = self.routes
        route = NO_ROUTE if route is None else route
        counts = routes.get(route)
        if counts is None:
            if len(routes) >= MOST_ROUTES:
                return routes.setdefault(OTHER_ROUTES, [0, 0])
            counts = routes[route] = [0, 0]
        return counts

    def _refused(self, caller: str, decision: Decision | None) -> None:
        self.worst.add(caller)
        if decision is None:
            self.too_costly += 1
            return
        wait = decision.retry_after_us
        if wait is None:
            self.never += 1
        else:
            wait_ms = -(wait // -1000)
            self.waits_ms.add(wait_ms)
            self.wait_steps[bisect_left(_WAIT_ENDS, wait_ms)] += 1
        if decision.rule is not None:
            self.binding[decision.rule] += 1
        no = [index for index, fields in enumerate(decision.fields) if not fields[0]]
        for index in no:
            self.said_no[index] += 1
        if len(no) == 1:
            self.alone[no[0]] += 1

    def as_json(self) -> dict[str, Any]:
        """Return the figures for the report."""
        requests = sum(self.counts)
        shadow = self._limiter.shadow_counts()
        return {
            "requests": requests,
            "admitted": self.counts[ADMITTED],
            "refused": self.counts[REFUSED],
            "refused_share": self.counts[REFUSED] / requests if requests else 0.0,
            "keys": self._keys(),
            "rules": [
                {
                    "name": rule.name,
                    "words": in_words(rule),
                    "refused": self.said_no[index],
                    "refused_alone": self.alone[index],
                    "longest_wait": self.binding[rule.name],
                }
                for index, rule in enumerate(self._rules)
            ],
            "too_costly": self.too_costly,
            "shadow": [
                {
                    "name": rule.name,
                    "words": in_words(rule),
                    "asked": shadow[rule.name].asked,
                    "refused": shadow[rule.name].refused,
                    "failed": shadow[rule.name].failed,
                }
                for rule in self._limiter.policy.shadow
            ],
            "worst_callers": self._worst(),
            "routes": self._routes(),
            "hours": [
                {"from": start, "admitted": counts[ADMITTED], "refused": counts[REFUSED]}
                for start, counts in self.timeline.coarser(3600)
            ],
            "hour_seconds": max(3600, self.timeline.seconds),
            "timeline": {
                "seconds": self.timeline.seconds,
                "bins": [[start, *counts] for start, counts in self.timeline.coarser(0)],
            },
            "waits": self._waits(),
            "headroom": self._headroom(),
            "overflowed": self._limiter.overflowed,
        }

    def _keys(self) -> dict[str, Any]:
        refused = sum(1 for key in self.keys.values() if key.refused) * self.keys.scale
        return {
            "all": self.keys.keys,
            "refused": refused,
            "exact": self.keys.is_complete,
            "sampled": sum(1 for _ in self.keys.values()),
        }

    def _worst(self) -> list[dict[str, Any]]:
        found = []
        for caller, refused in self.worst.top(SHOWN_CALLERS):
            known = self.keys.get(caller)
            found.append(
                {"key": caller, "refused": refused, "requests": None if known is None else known.requests}
            )
        return found

    def _routes(self) -> list[dict[str, Any]]:
        if self.routes.keys() == {NO_ROUTE}:
            return []  # the log does not say what was asked for
        by_refused = sorted(self.routes.items(), key=lambda item: (-item[1][REFUSED], -item[1][ADMITTED]))
        return [
            {"route": route, "admitted": counts[ADMITTED], "refused": counts[REFUSED]}
            for route, counts in by_refused[:SHOWN_ROUTES]
        ]

    def _waits(self) -> dict[str, Any]:
        waits = self.waits_ms
        words = (*(words for _, words in WAIT_STEPS), LONGER)
        return {
            "p50": waits.percentile(50) / 1000,
            "p90": waits.percentile(90) / 1000,
            "p99": waits.percentile(99) / 1000,
            "longest": waits.highest / 1000,
            "never": self.never + self.too_costly,
            "steps": [
                {"words": up_to, "refused": refused}
                for up_to, refused in zip(words, self.wait_steps, strict=True)
            ],
        }

    def _headroom(self) -> dict[str, Any]:
        """Return how much of its limit each key used at most: of those that were never refused."""
        steps = [0] * _USE_STEPS
        use = Histogram()
        for key in self.keys.values():
            if not key.refused:
                steps[min(_USE_STEPS - 1, max(0, key.use - 1) * _USE_STEPS // 1000)] += 1
                use.add(key.use)
        scale = self.keys.scale
        return {
            "keys": use.total * scale,
            "p50": use.percentile(50) / 1000,
            "p90": use.percentile(90) / 1000,
            "p99": use.percentile(99) / 1000,
            "most": use.highest / 1000,
            "steps": [
                {"from": index / _USE_STEPS, "to": (index + 1) / _USE_STEPS, "keys": keys * scale}
                for index, keys in enumerate(steps)
            ],
        }
