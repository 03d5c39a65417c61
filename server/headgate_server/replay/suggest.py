"""Limits from real traffic: the peaks of each key, and the smallest limits that refuse at most a given share.

The log is read once; time, caller and cost of each request are kept. First, sliding windows with an unreachable limit admit
every request. This gives the peak of each key, and for every limit an upper bound of its refusals: a limit can only refuse
requests that exceed it when nothing is refused. Below that bound, a binary search replays the candidates, so all shares in
the output are exact.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headgate import CostTooHigh, Rule, sliding_window, token_bucket
from headgate.clock import MICROSECONDS
from headgate.quota import Quota
from headgate.stores import MemoryStore, Request
from headgate_server.describe import toml_key
from headgate_server.formatting import moment, number, percent, span
from headgate_server.replay.errors import ReplayError
from headgate_server.replay.report import table
from headgate_server.replay.requests import LoggedRequest
from headgate_server.replay.simulation import MAX_KEYS, ReplayClock
from headgate_server.replay.tally import percentile

WINDOWS = (("second", 1), ("minute", 60), ("hour", 3_600), ("day", 86_400))
"""Name and seconds of the windows."""

PERIODS_NEEDED = 3
"""Periods of a window that the log must cover; with fewer, its peaks may be chance."""
REQUESTS_NEEDED = 1_000
KEYS_NEEDED = 20
REFUSALS_NEEDED = 10

_NO_LIMIT = 10**15
_PRECISION = 50
_HOUR = 3_600
_REQUESTS_BETWEEN_PROGRESS = 1_000

Progress = Callable[[str], None]


@dataclass(slots=True)
class Profile:
    """The traffic of a log when nothing is refused.

    Attributes:
        times: The time of each request, in microseconds.
        callers: The caller of each request.
        costs: The cost of each request.
        peaks: By caller, the most units used in each window.
        used: By window, the units in use after each request.
        whole_seconds: Whether all times were whole seconds.
    """

    times: array[int] = field(default_factory=lambda: array("q"))
    callers: list[str] = field(default_factory=list)
    costs: array[int] = field(default_factory=lambda: array("q"))
    peaks: dict[str, list[int]] = field(default_factory=dict)
    used: list[array[int]] = field(default_factory=lambda: [array("q") for _ in WINDOWS])
    whole_seconds: bool = True

    @property
    def seconds(self) -> float:
        """Length of the log in seconds."""
        return (self.times[-1] - self.times[0]) / MICROSECONDS

    def fits(self, seconds: int) -> bool:
        """Return whether the log covers enough periods of a window."""
        return self.seconds >= PERIODS_NEEDED * seconds


def profile(requests: Iterable[LoggedRequest], progress: Progress) -> Profile:
    """Return the traffic of a log."""
    found = Profile()
    clock = ReplayClock()
    rules = tuple(sliding_window(Quota(_NO_LIMIT, seconds * MICROSECONDS)) for _, seconds in WINDOWS)
    decide = MemoryStore(max_keys=MAX_KEYS, clock=clock).bind("profile", rules).decide
    names: dict[str, str] = {}
    for count, request in enumerate(requests):
        if not count % _REQUESTS_BETWEEN_PROGRESS:
            progress("reading")
        caller = names.setdefault(request.caller, request.caller)  # keep one copy of each name
        clock.at = request.at
        found.times.append(request.at)
        found.callers.append(caller)
        found.costs.append(request.cost)
        if request.at % MICROSECONDS:
            found.whole_seconds = False
        decision = decide(Request("hit", caller, request.cost))[0]
        used = [_NO_LIMIT - fields[2] for fields in decision.fields]
        for units, in_use in zip(found.used, used, strict=True):
            units.append(in_use)
        found.peaks[caller] = list(map(max, found.peaks.get(caller, used), used))
    return found


def refusals(found: Profile, rule: Rule, above: set[str], most: int) -> Counter[str]:
    """Return the refusals of a rule by caller.

    Args:
        found: The traffic.
        rule: The rule to replay.
        above: Callers whose requests can be refused.
        most: Number of refusals after which the replay ends.
    """
    refused: Counter[str] = Counter()
    left = most
    clock = ReplayClock()
    decide = MemoryStore(max_keys=MAX_KEYS, clock=clock).bind("candidate", (rule,)).decide
    for at, caller, cost in zip(found.times, found.callers, found.costs, strict=True):
        if caller not in above:
            continue
        clock.at = at
        try:
            allowed = decide(Request("hit", caller, cost))[0].allowed
        except CostTooHigh:
            allowed = False
        if not allowed:
            refused[caller] += 1
            left -= 1
            if left < 0:
                break
    return refused


def smallest(
    found: Profile, window: int, enough: int, rule: Callable[[int], Rule], allowed: int
) -> tuple[int, Counter[str]]:
    """Return the smallest limit that refuses at most `allowed` requests, and its refusals.

    The limit is exact up to 50 units, and within two per cent above.

    Args:
        found: The traffic.
        window: Index of the window with the peaks of callers.
        enough: A limit that is high enough.
        rule: Returns the rule with a limit.
        allowed: Maximum number of refusals.
    """

    def replayed(limit: int) -> Counter[str]:
        above = {caller for caller, peaks in found.peaks.items() if peaks[window] > limit}
        return refusals(found, rule(limit), above, allowed)

    low, high = 0, max(1, enough)
    best = replayed(high)
    while high - low > max(1, high // _PRECISION):
        middle = (low + high) // 2
        refused = replayed(middle)
        if refused.total() > allowed:
            low = middle
        else:
            high, best = middle, refused
    return high, best


class Proposal(NamedTuple):
    """A token bucket with the smallest limit of a window as its rate.

    Attributes:
        most_in_an_hour: Units that one caller can use in an hour.
        rule: The rule, as in a policy file.
        refused: Its refusals, by caller.
    """

    most_in_an_hour: float
    rule: str
    refused: Counter[str]


def smallest_limits(
    found: Profile, share: float, progress: Progress
) -> tuple[list[dict[str, Any]], list[Proposal]]:
    """Return the peaks and smallest limits of every window, and a proposal for each window that the log covers."""
    allowed = int(len(found.times) * share)
    windows, proposals = [], []
    for index, (name, seconds) in enumerate(WINDOWS):
        window = {"window": name, "covered": found.fits(seconds), "peaks": _peaks(found, index)}
        window |= dict.fromkeys(("limit", "refused", "burst", "bucket_refused"))
        windows.append(window)
        if not found.fits(seconds):
            continue
        progress(f"looking for limits per {name}")
        period = seconds * MICROSECONDS
        enough = sorted(found.used[index], reverse=True)[allowed]
        limit, refused = smallest(found, index, enough, _window_rule(period), allowed)
        window |= {"limit": limit, "refused": refused.total()}
        if name == "second" and found.fits(WINDOWS[1][1]):
            continue  # longer windows are better evidence
        # With the limit as its burst, a bucket admits everything that the window admits.
        burst, refused = smallest(found, index, limit, _bucket_rule(limit, period), allowed)
        window |= {"burst": burst, "bucket_refused": refused.total()}
        most = burst + limit * _HOUR / seconds
        proposals.append(Proposal(most, f"{limit}/{name} burst {burst}", refused))
    return windows, proposals


def _peaks(found: Profile, window: int) -> dict[str, int]:
    peaks = sorted(each[window] for each in found.peaks.values())
    return {f"p{percent}": percentile(peaks, percent) for percent in (50, 90, 99)} | {"most": peaks[-1]}


def _window_rule(period: int) -> Callable[[int], Rule]:
    return lambda limit: sliding_window(Quota(limit, period))


def _bucket_rule(limit: int, period: int) -> Callable[[int], Rule]:
    return lambda burst: token_bucket(Quota(limit, period, burst))


def suggestion(
    requests: Iterable[LoggedRequest], share: float, name: str, progress: Progress
) -> dict[str, Any]:
    """Return a proposal with its evidence, as JSON.

    Args:
        requests: The log.
        share: Maximum share of refused requests.
        name: The name of the limiter.
        progress: Called regularly with the name of the current step.

    Raises:
        ReplayError: The log is too short for a proposal.
    """
    found = profile(requests, progress)
    if not found.times:
        return {"requests": 0}
    if not any(found.fits(seconds) for _, seconds in WINDOWS):
        raise ReplayError(
            f"the log covers {span(found.seconds)}, which is too short for a proposal; at least {PERIODS_NEEDED} "
            f"seconds are needed, better {PERIODS_NEEDED} hours"
        )
    windows, proposals = smallest_limits(found, share, progress)
    best = min(proposals, key=lambda proposal: proposal.most_in_an_hour)
    refused = best.refused.total()
    return {
        "headgate_suggestion": 1,
        "requests": len(found.times),
        "keys": len(found.peaks),
        "from": found.times[0] / MICROSECONDS,
        "to": found.times[-1] / MICROSECONDS,
        "whole_seconds": found.whole_seconds,
        "refuse_at_most": share,
        "limiter": name,
        "rule": best.rule,
        "refused": refused,
        "refused_share": refused / len(found.times),
        "refused_keys": len(best.refused),
        "windows": windows,
        "thin": _thin(found, share),
    }


def _thin(found: Profile, share: float) -> list[str]:
    """Return the reasons why the proposal is uncertain."""
    reasons = []
    if len(found.times) < REQUESTS_NEEDED:
        reasons.append(f"there are only {number(len(found.times))} requests")
    if len(found.peaks) < KEYS_NEEDED:
        reasons.append(f"there are only {number(len(found.peaks))} keys")
    if not found.fits(_HOUR):
        reasons.append(f"the log covers only {span(found.seconds)}")
    if 0 < share * len(found.times) < REFUSALS_NEEDED:
        reasons.append(
            f"{percent(share)} of {number(len(found.times))} requests are {share * len(found.times):.1g}, "
            f"too few for a reliable limit"
        )
    return reasons


def suggestion_text(report: dict[str, Any]) -> str:
    """Return a proposal as lines for a policy file, with the evidence in comments."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    log = report["log"]
    files = "".join(c if c.isprintable() else "?" for c in ", ".join(log["files"]))
    refused_keys = report["refused_keys"]
    yield f"# Proposed by `headgate suggest` from {files}:"
    yield (
        f"# {number(report['requests'])} requests of {number(report['keys'])} keys, "
        f"{moment(report['from'])} to {moment(report['to'])} UTC."
    )
    skipped = log["bad"] + log["too_late"]
    if skipped:
        yield f"# {number(skipped)} of {number(log['lines'])} lines were skipped; `headgate replay` shows the reasons."
    if report["thin"]:
        yield f"# THIN DATA: {'; '.join(report['thin'])}. This is only a guess."
    yield (
        f"# It would have refused {number(report['refused'])} of these requests ({percent(report['refused_share'])}), "
        f"from {number(refused_keys)} keys."
    )
    yield "# These limits leave nothing for growth: raise them, and try them as a shadow rule first."
    yield f"[limiters.{toml_key(report['limiter'])}]"
    yield f'rules = ["{report["rule"]}"]'
    yield "#"
    most = percent(report["refuse_at_most"])
    title = f"Highest use per key, and the smallest limits that refuse at most {most}:"
    headings = [
        "window",
        "half of keys",
        "90 %",
        "99 %",
        "most",
        "sliding window",
        "refuses",
        "token bucket",
        "refuses",
    ]
    rows = [_row(row, report["requests"]) for row in report["windows"]]
    yield from (f"# {line}" for line in table(title, headings, rows))
    if report["whole_seconds"]:
        yield "# Times in the log are whole seconds, so peaks within a second look higher than they are."


def _row(row: dict[str, Any], requests: int) -> list[str]:
    peaks = [number(row["peaks"][name]) for name in ("p50", "p90", "p99", "most")]
    if not row["covered"]:
        return [row["window"], *peaks, "the log is too short", "", "", ""]
    window = [f"{row['limit']}/{row['window']}", percent(row["refused"] / requests)]
    if row["burst"] is None:
        return [row["window"], *peaks, *window, "-", "-"]
    bucket = [
        f"{row['limit']}/{row['window']} burst {row['burst']}",
        percent(row["bucket_refused"] / requests),
    ]
    return [row["window"], *peaks, *window, *bucket]
