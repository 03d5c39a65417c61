"""Figures of a replay: decisions by rule, key, route and time.

Memory is bounded for keys and routes: only the first `MOST_KEYS` keys and `MOST_ROUTES` routes have separate figures.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from headgate import Decision, Rule
from headgate.clock import MICROSECONDS
from headgate.policy import in_words
from headgate_server.replay.requests import LoggedRequest

MOST_KEYS = 100_000
"""Keys with separate figures."""
MOST_ROUTES = 1_000
MOST_BARS = 180
SHOWN_CALLERS = 20
SHOWN_ROUTES = 20

ADMITTED, REFUSED = 0, 1
OTHER_ROUTES = "(other routes)"
NO_ROUTE = "(unknown)"


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Return the value that at most `100 - percent` per cent of sorted values exceed; 0 without values."""
    return ordered[-1 - len(ordered) * (100 - percent) // 100] if ordered else 0


@dataclass(slots=True)
class KeyFigures:
    """Figures of one key.

    Attributes:
        requests: All of its requests.
        refused: Its refused requests.
        use: The highest use of its limit, in parts per thousand.
    """

    requests: int = 0
    refused: int = 0
    use: int = 0


class ReplayTally:
    """The decisions of a limiter for a log.

    Args:
        rules: The live rules of the limiter.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self.counts = [0, 0]
        self.follows_all_keys = True
        self._too_costly = 0
        self._never = 0
        self._minutes: dict[int, list[int]] = {}
        self._routes: dict[str, list[int]] = {}
        self._keys: dict[str, KeyFigures] = {}
        self._waits_ms: array[int] = array("q")
        self._refused_by = [0] * len(self._rules)
        self._refused_alone = [0] * len(self._rules)

    def add(self, request: LoggedRequest, decision: Decision | None) -> None:
        """Count a decision; `None` for a cost above every capacity."""
        outcome = ADMITTED if decision is not None and decision.allowed else REFUSED
        self.counts[outcome] += 1
        minute = request.at // (60 * MICROSECONDS)
        (self._minutes.get(minute) or self._minutes.setdefault(minute, [0, 0]))[outcome] += 1
        self._route(NO_ROUTE if request.route is None else request.route)[outcome] += 1
        key = self._key(request.caller)
        if key is not None:
            key.requests += 1
            if outcome == REFUSED:
                key.refused += 1
            elif decision is not None and (limit := decision.limit):
                key.use = max(key.use, 1000 - (decision.remaining or 0) * 1000 // limit)
        if outcome == REFUSED:
            self._refused(decision)

    def _route(self, route: str) -> list[int]:
        counts = self._routes.get(route)
        if counts is None:
            if len(self._routes) >= MOST_ROUTES:
                route = OTHER_ROUTES
            counts = self._routes.setdefault(route, [0, 0])
        return counts

    def _key(self, caller: str) -> KeyFigures | None:
        key = self._keys.get(caller)
        if key is None:
            if len(self._keys) >= MOST_KEYS:
                self.follows_all_keys = False
                return None
            key = self._keys[caller] = KeyFigures()
        return key

    def _refused(self, decision: Decision | None) -> None:
        if decision is None:
            self._too_costly += 1
            return
        wait = decision.retry_after_us
        if wait is None:
            self._never += 1
        else:
            self._waits_ms.append(-(wait // -1000))
        refusing = [index for index, fields in enumerate(decision.fields) if not fields[0]]
        for index in refusing:
            self._refused_by[index] += 1
        if len(refusing) == 1:
            self._refused_alone[refusing[0]] += 1

    def as_json(self) -> dict[str, Any]:
        """Return the figures for the report."""
        requests = sum(self.counts)
        return {
            "requests": requests,
            "admitted": self.counts[ADMITTED],
            "refused": self.counts[REFUSED],
            "refused_share": self.counts[REFUSED] / requests if requests else 0.0,
            "keys": {
                "all": len(self._keys),
                "refused": sum(1 for key in self._keys.values() if key.refused),
                "exact": self.follows_all_keys,
            },
            "rules": [
                {
                    "name": rule.name,
                    "words": in_words(rule),
                    "refused": self._refused_by[index],
                    "refused_alone": self._refused_alone[index],
                }
                for index, rule in enumerate(self._rules)
            ],
            "too_costly": self._too_costly,
            "worst_callers": self._worst_callers(),
            "routes": self._worst_routes(),
            "hours": [
                {"from": start, "admitted": admitted, "refused": refused}
                for start, admitted, refused in self._bins(3600)
            ],
            "timeline": self._timeline(),
            "waits": self._waits(),
            "headroom": self._headroom(),
        }

    def _worst_callers(self) -> list[dict[str, Any]]:
        refused = (item for item in self._keys.items() if item[1].refused)
        worst = nlargest(SHOWN_CALLERS, refused, key=lambda item: item[1].refused)
        return [{"key": caller, "refused": key.refused, "requests": key.requests} for caller, key in worst]

    def _worst_routes(self) -> list[dict[str, Any]]:
        if self._routes.keys() == {NO_ROUTE}:
            return []  # the log has no routes
        by_refused = sorted(self._routes.items(), key=lambda item: (-item[1][REFUSED], -item[1][ADMITTED]))
        return [
            {"route": route, "admitted": counts[ADMITTED], "refused": counts[REFUSED]}
            for route, counts in by_refused[:SHOWN_ROUTES]
        ]

    def _timeline(self) -> dict[str, Any]:
        """Return the counts in bins of whole minutes, at most `MOST_BARS`."""
        minutes = max(self._minutes, default=0) - min(self._minutes, default=0) + 1
        seconds = -(-minutes // MOST_BARS) * 60
        return {"seconds": seconds, "bins": self._bins(seconds)}

    def _bins(self, seconds: int) -> list[list[int]]:
        """Return start, admitted and refused of every bin with requests, in order."""
        bins: dict[int, list[int]] = {}
        for minute, counts in sorted(self._minutes.items()):
            start = minute * 60 // seconds * seconds
            into = bins.setdefault(start, [start, 0, 0])
            into[1] += counts[ADMITTED]
            into[2] += counts[REFUSED]
        return list(bins.values())

    def _waits(self) -> dict[str, Any]:
        waits = sorted(self._waits_ms)
        return {
            "p50": percentile(waits, 50) / 1000,
            "p90": percentile(waits, 90) / 1000,
            "p99": percentile(waits, 99) / 1000,
            "longest": percentile(waits, 100) / 1000,
            "never": self._never + self._too_costly,
        }

    def _headroom(self) -> dict[str, Any]:
        """Return the highest use of its limit by each key that was never refused."""
        use = sorted(key.use for key in self._keys.values() if not key.refused)
        return {
            "keys": len(use),
            "p50": percentile(use, 50) / 1000,
            "p90": percentile(use, 90) / 1000,
            "p99": percentile(use, 99) / 1000,
            "near": sum(each > 900 for each in use),
        }
