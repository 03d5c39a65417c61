"""Figures of a replay: decisions by rule, key, route and time.

Memory is bounded for keys and routes: of more keys than `MOST_KEYS`, the first ones are followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headgate import Decision
from headgate.clock import MICROSECONDS
from headgate.observe import TopKeys
from headgate.policy import in_words
from headgate_server.replay.requests import LoggedRequest

if TYPE_CHECKING:
    from headgate_server.replay.simulation import ReplayedLimiter

MOST_KEYS = 100_000
"""Keys that are followed one by one."""
MOST_CALLERS = 10_000
"""Refused callers that are counted exactly; of more, the worst ones are, a little too low."""
MOST_ROUTES = 1_000
MOST_BARS = 180
SHOWN_CALLERS = 20
SHOWN_ROUTES = 20

ADMITTED, REFUSED = 0, 1
OTHER_ROUTES = "(other routes)"
NO_ROUTE = "(unknown)"

_EXACT_BITS = 13


class Histogram:
    """Counts of values: exact below 8192, above that rounded up by at most 0.03 %, so that memory is bounded.

    Attributes:
        total: How many values there are.
        highest: The highest of them, exactly; 0 for an empty histogram.
        counts: How often each value occurred, rounded up.
    """

    def __init__(self) -> None:
        self.total = 0
        self.highest = 0
        self.counts: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count a value."""
        self.total += 1
        self.highest = max(self.highest, value)
        if value >= 1 << _EXACT_BITS:
            shift = value.bit_length() - _EXACT_BITS
            value = -(-value >> shift) << shift
        self.counts[value] = self.counts.get(value, 0) + 1

    def smallest_with_at_most_above(self, count: int) -> int:
        """Return the smallest value that at most `count` values are above."""
        left = self.total
        for value in sorted(self.counts):
            left -= self.counts[value]
            if left <= count:
                return min(value, self.highest)
        return 0

    def percentile(self, percent: float) -> int:
        """Return the value that `percent` per cent of the values are not above; 0 if it is empty."""
        return self.smallest_with_at_most_above(int(self.total * (100 - percent) / 100))


@dataclass(slots=True)
class KeyFigures:
    """Figures of one key.

    Attributes:
        requests: All of its requests.
        refused: Its refused requests.
        use: The most it used of the limit that bound it, in parts per thousand.
    """

    requests: int = 0
    refused: int = 0
    use: int = 0


class ReplayTally:
    """The decisions of a limiter about a log.

    Args:
        limiter: The limiter; the report shows its rules.
    """

    def __init__(self, limiter: ReplayedLimiter) -> None:
        self._limiter = limiter
        self._rules = limiter.policy.rules
        self.counts = [0, 0]
        self.follows_all_keys = True
        self._too_costly = 0
        self._never = 0
        self._minutes: dict[int, list[int]] = {}
        self._routes: dict[str, list[int]] = {}
        self._keys: dict[str, KeyFigures] = {}
        self._worst: TopKeys[str] = TopKeys(MOST_CALLERS)
        self._waits_ms = Histogram()
        self._refused_by = [0] * len(self._rules)
        self._refused_alone = [0] * len(self._rules)

    def add(self, request: LoggedRequest, decision: Decision | None) -> None:
        """Count a decision; `None` for a cost that is never admitted."""
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
            self._refused(request.caller, decision)

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

    def _refused(self, caller: str, decision: Decision | None) -> None:
        self._worst.add(caller)
        if decision is None:
            self._too_costly += 1
            return
        wait = decision.retry_after_us
        if wait is None:
            self._never += 1
        else:
            self._waits_ms.add(-(wait // -1000))
        refusing = [index for index, fields in enumerate(decision.fields) if not fields[0]]
        for index in refusing:
            self._refused_by[index] += 1
        if len(refusing) == 1:
            self._refused_alone[refusing[0]] += 1

    def as_json(self) -> dict[str, Any]:
        """Return the figures for the report."""
        requests = sum(self.counts)
        shadow = self._limiter.shadow_counts()
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
            "shadow": [
                {
                    "name": rule.name,
                    "words": in_words(rule),
                    "asked": shadow[rule.name].asked,
                    "refused": shadow[rule.name].refused,
                }
                for rule in self._limiter.policy.shadow
            ],
            "worst_callers": [
                {
                    "key": caller,
                    "refused": refused,
                    "requests": self._keys[caller].requests if caller in self._keys else None,
                }
                for caller, refused in self._worst.top(SHOWN_CALLERS)
            ],
            "routes": self._worst_routes(),
            "hours": [
                {"from": start, "admitted": admitted, "refused": refused}
                for start, admitted, refused in self._bins(3600)
            ],
            "timeline": self._timeline(),
            "waits": self._waits(),
            "headroom": self._headroom(),
        }

    def _worst_routes(self) -> list[dict[str, Any]]:
        if self._routes.keys() == {NO_ROUTE}:
            return []  # the log does not have them
        by_refused = sorted(self._routes.items(), key=lambda item: (-item[1][REFUSED], -item[1][ADMITTED]))
        return [
            {"route": route, "admitted": counts[ADMITTED], "refused": counts[REFUSED]}
            for route, counts in by_refused[:SHOWN_ROUTES]
        ]

    def _timeline(self) -> dict[str, Any]:
        """Return the counts in as many bins of whole minutes as a chart has room for."""
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
        waits = self._waits_ms
        return {
            "p50": waits.percentile(50) / 1000,
            "p90": waits.percentile(90) / 1000,
            "p99": waits.percentile(99) / 1000,
            "longest": waits.highest / 1000,
            "never": self._never + self._too_costly,
        }

    def _headroom(self) -> dict[str, Any]:
        """Return how much of its limit each key used at most, of the keys that were never refused."""
        use = Histogram()
        for key in self._keys.values():
            if not key.refused:
                use.add(key.use)
        return {
            "keys": use.total,
            "p50": use.percentile(50) / 1000,
            "p90": use.percentile(90) / 1000,
            "p99": use.percentile(99) / 1000,
            "near": sum(1 for key in self._keys.values() if not key.refused and key.use > 900),
        }
