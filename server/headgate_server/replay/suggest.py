"""Limits from real traffic: for each key its peaks, and the smallest rules that would refuse at most a given share.

The log is read once; what matters of it (when, who, how much) goes into a temporary file, which is read several times. The
first time every request is admitted by sliding windows without a limit worth the name. That shows what each key used at
most, and for every limit an upper bound of what it would refuse: a request can only be refused at a limit if it was above
that limit when nothing was refused. Each further time some candidates between what is known to refuse too much and what is
known to be enough are asked for real, until the smallest one is found. The last time the proposal itself is replayed. So
every share that is shown was decided, not estimated.
"""

from __future__ import annotations

import marshal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from headgate import CostTooHigh, Rule, sliding_window, token_bucket
from headgate.clock import MICROSECONDS
from headgate.policy import LimiterPolicy, parse_policy
from headgate.quota import Quota
from headgate.stores import Gate, MemoryStore, Request
from headgate_server.describe import toml_key
from headgate_server.replay.engine import MAX_KEYS, ReplayClock
from headgate_server.replay.errors import ReplayError
from headgate_server.replay.requests import LoggedRequest
from headgate_server.replay.running import Simulation
from headgate_server.replay.sketches import Histogram, KeySample
from headgate_server.replay.tally import MOST_KEYS
from headgate_server.replay.text import table
from headgate_server.wording import moment, number, percent, span

WINDOWS = (("second", 1), ("minute", 60), ("hour", 3_600), ("day", 86_400))
"""Name and seconds of the windows that are looked at."""

PERIODS_NEEDED = 3
"""How many periods of a window the log must cover; with fewer, its peaks may be chance."""
REQUESTS_NEEDED = 1_000
KEYS_NEEDED = 20
REFUSALS_NEEDED = 10

_NO_LIMIT = 10**15
_CANDIDATES = (0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 3 / 4)
"""How far below what is known to be enough: most limits are a little below it."""
_PRECISION = 50
_MOST_PASSES = 12
_HOUR = 3_600

_BATCH = 1_000

Use = tuple[int, str, int]
"""What matters of a request: when, who, how much."""


class RequestTrace:
    """The requests of a log, so that they can be read more than once.

    Args:
        requests: The requests; they are read while the first pass is.
        progress: Called now and then, with what is being done.
    """

    def __init__(self, requests: Iterable[LoggedRequest], progress: Callable[[str], None]) -> None:
        self._requests: Iterable[LoggedRequest] | None = requests
        self._progress = progress
        self._file = tempfile.TemporaryFile(prefix="headgate-suggest-")  # noqa: SIM115  # closed by `close`
        self._passes = 0

    def read(self) -> Iterator[Use]:
        """Yield all requests, once more from the first one."""
        self._passes += 1
        doing = "reading" if self._passes == 1 else f"looking for limits, pass {self._passes - 1}"
        for batch in self._first() if self._requests is not None else self._again():
            self._progress(doing)
            yield from batch

    def close(self) -> None:
        """Let go of the temporary file."""
        self._file.close()

    def _first(self) -> Iterator[list[Use]]:
        requests, self._requests = iter(self._requests or ()), None
        while batch := [(request.at, request.caller, request.cost) for request in islice(requests, _BATCH)]:
            marshal.dump(batch, self._file)
            yield batch

    def _again(self) -> Iterator[list[Use]]:
        self._file.seek(0)
        while True:
            try:
                yield marshal.load(self._file)
            except EOFError:
                return


@dataclass(slots=True)
class KeyPeaks:
    """What a key used at most in each window, in units."""

    requests: int = 0
    peaks: list[int] = field(default_factory=lambda: [0] * len(WINDOWS))


@dataclass(slots=True)
class Profile:
    """The traffic of a log.

    Attributes:
        requests: How many there were.
        first: The time of the first one, in microseconds.
        last: That of the last one.
        whole_seconds: Whether all times were whole seconds.
        keys: The peaks of each key.
        used: By window, how much was used after each request.
    """

    requests: int = 0
    first: int = 0
    last: int = 0
    whole_seconds: bool = True
    keys: KeySample[KeyPeaks] = field(default_factory=lambda: KeySample(MOST_KEYS, KeyPeaks))
    used: list[Histogram] = field(default_factory=lambda: [Histogram() for _ in WINDOWS])

    @property
    def seconds(self) -> float:
        """How much time the log covers."""
        return (self.last - self.first) / MICROSECONDS

    def fits(self, seconds: int) -> bool:
        """Return whether the log covers enough periods of a window."""
        return self.seconds >= PERIODS_NEEDED * seconds


def profile(requests: Iterable[Use]) -> Profile:
    """Return what the traffic of a log looks like when nothing is refused."""
    found = Profile()
    clock = ReplayClock()
    rules = tuple(sliding_window(Quota(_NO_LIMIT, seconds * MICROSECONDS)) for _, seconds in WINDOWS)
    ask = MemoryStore(max_keys=MAX_KEYS, clock=clock).bind("profile", rules).ask
    keys, used_in = found.keys, found.used
    for at, caller, cost in requests:
        clock.at = at
        if not found.requests:
            found.first = at
        found.requests += 1
        found.last = at
        if at % MICROSECONDS:
            found.whole_seconds = False
        used = [_NO_LIMIT - fields[2] for fields in ask(_request(caller, cost))[0].fields]
        for histogram, units in zip(used_in, used, strict=True):
            histogram.add(units)
        key = keys.get(caller) or keys.add(caller)
        if key is not None:
            key.requests += 1
            key.peaks = list(map(max, key.peaks, used))
    return found


class Search:
    """Looks for the smallest limit of one kind of rule that refuses at most so many requests.

    Args:
        rule: Returns the rule of a limit.
        window: The index of the window whose peaks say which keys a limit cannot touch.
        enough: A limit that is known to be enough.
    """

    def __init__(self, rule: Callable[[int], Rule], window: int, enough: int) -> None:
        self._rule = rule
        self._window = window
        self._too_small = 0
        self.limit = max(1, enough)
        self.refused: int | None = None
        self._gates: list[tuple[int, Gate]] = []
        self._counts: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether the smallest limit is known, and what it refuses: to the unit, or to two per cent if it is large."""
        return self.refused is not None and self.limit - self._too_small <= max(1, self.limit // _PRECISION)

    def begin(self, store: MemoryStore) -> None:
        """Make the candidates of one pass."""
        low, high = self._too_small, self.limit
        limits = {max(low + 1, high - int((high - low) * part)) for part in _CANDIDATES}
        self._gates = [
            (limit, store.bind(f"{id(self)}-{limit}", (self._rule(limit),))) for limit in sorted(limits)
        ]
        self._counts = dict.fromkeys(limits, 0)

    def ask(self, caller: str, cost: int, peaks: list[int] | None) -> None:
        """Ask all candidates that a request's key could be refused by."""
        peak = None if peaks is None else peaks[self._window]
        for limit, gate in self._gates:
            if peak is not None and peak <= limit:
                return  # so it is for all larger ones
            try:
                allowed = gate.ask(_request(caller, cost))[0].allowed
            except CostTooHigh:
                allowed = False
            if not allowed:
                self._counts[limit] += 1

    def end(self, allowed: int) -> None:
        """Draw the conclusions of a pass."""
        failed = [limit for limit, refused in self._counts.items() if refused > allowed]
        self._too_small = max([self._too_small, *failed])
        self.limit, self.refused = min(
            (limit, refused) for limit, refused in self._counts.items() if limit > self._too_small
        )


@dataclass(slots=True)
class WindowLimit:
    """The smallest limit of a window.

    Attributes:
        window: The index of the window.
        limit: The smallest sliding window.
        refused: How many requests it refuses.
        burst: The smallest burst of a token bucket at that rate; `None` if none was looked for.
        bucket_refused: How many requests that refuses.
    """

    window: int
    limit: int
    refused: int
    burst: int | None = None
    bucket_refused: int = 0

    @property
    def most_in_an_hour(self) -> float:
        """What the token bucket lets one caller take in an hour."""
        return (self.burst or self.limit) + self.limit * _HOUR / WINDOWS[self.window][1]


def smallest_limits(trace: RequestTrace, found: Profile, share: float) -> list[WindowLimit]:
    """Return the smallest limit of every window that the log is long enough for."""
    allowed = int(found.requests * share)
    windows = [index for index, (_, seconds) in enumerate(WINDOWS) if found.fits(seconds)]
    searches = {
        index: Search(
            _window_rule(WINDOWS[index][1]), index, found.used[index].smallest_with_at_most_above(allowed)
        )
        for index in windows
    }
    _search(trace, list(searches.values()), found, allowed)
    limits = [WindowLimit(index, search.limit, search.refused or 0) for index, search in searches.items()]
    # With a burst of the whole limit, a bucket admits all that the window does.
    buckets = [
        (limit, Search(_bucket_rule(limit.limit, WINDOWS[limit.window][1]), limit.window, limit.limit))
        for limit in limits
        if WINDOWS[limit.window][0] != "second" or len(limits) == 1
    ]
    _search(trace, [search for _, search in buckets], found, allowed)
    for limit, search in buckets:
        limit.burst, limit.bucket_refused = search.limit, search.refused or 0
    return limits


def _window_rule(seconds: int) -> Callable[[int], Rule]:
    return lambda limit: sliding_window(Quota(limit, seconds * MICROSECONDS))


def _bucket_rule(limit: int, seconds: int) -> Callable[[int], Rule]:
    return lambda burst: token_bucket(Quota(limit, seconds * MICROSECONDS, burst))


def _search(trace: RequestTrace, searches: list[Search], found: Profile, allowed: int) -> None:
    for _ in range(_MOST_PASSES):
        open_ones = [search for search in searches if not search.is_over]
        if not open_ones:
            return
        clock = ReplayClock()
        store = MemoryStore(max_keys=MAX_KEYS, clock=clock)
        for search in open_ones:
            search.begin(store)
        for at, caller, cost in trace.read():
            clock.at = at
            key = found.keys.get(caller)
            for search in open_ones:
                search.ask(caller, cost, None if key is None else key.peaks)
        for search in open_ones:
            search.end(allowed)


def _request(caller: str, cost: int) -> Request:
    return Request("hit", caller, cost)


def suggestion(
    requests: Iterable[LoggedRequest], share: float, name: str, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return a proposal with its evidence, as it is written for machines.

    Args:
        requests: The log.
        share: How much of all requests may be refused.
        name: What the limiter is called.
        progress: Called now and then, with what is being done.

    Raises:
        ReplayError: There is not enough traffic to say anything.
    """
    with closing(RequestTrace(requests, progress)) as trace:
        return _suggestion(trace, share, name)


def _suggestion(trace: RequestTrace, share: float, name: str) -> dict[str, Any]:
    found = profile(trace.read())
    if found.requests and not any(found.fits(seconds) for _, seconds in WINDOWS):
        raise ReplayError(
            f"the log covers {span(found.seconds)}, too little to propose anything: at least "
            f"{PERIODS_NEEDED} seconds are needed, and {PERIODS_NEEDED} hours to be of use"
        )
    if not found.requests:
        return {"requests": 0}
    limits = smallest_limits(trace, found, share)
    best = min(
        (limit for limit in limits if limit.burst is not None), key=lambda limit: limit.most_in_an_hour
    )
    rule = f"{best.limit}/{WINDOWS[best.window][0]} burst {best.burst}"
    check = Simulation(_policy(name, rule))
    for order, (at, caller, cost) in enumerate(trace.read()):
        check.decide(LoggedRequest(at, order, caller, caller, cost, None, None, False))
    result = check.tally.as_json()
    return {
        "headgate_suggestion": 1,
        "requests": found.requests,
        "keys": found.keys.keys,
        "keys_exact": found.keys.is_complete,
        "from": found.first / MICROSECONDS,
        "to": found.last / MICROSECONDS,
        "whole_seconds": found.whole_seconds,
        "refuse_at_most": share,
        "limiter": name,
        "rule": rule,
        "refused": result["refused"],
        "refused_share": result["refused_share"],
        "refused_keys": result["keys"]["refused"],
        "windows": _windows(found, limits),
        "thin": _thin(found, share),
    }


def _policy(name: str, rule: str) -> LimiterPolicy:
    text = f'[limiters.{toml_key(name)}]\nrules = ["{rule}"]\n'
    return next(iter(parse_policy(text).limiters.values()))


def _windows(found: Profile, limits: list[WindowLimit]) -> list[dict[str, Any]]:
    by_window = {limit.window: limit for limit in limits}
    rows = []
    for index, (name, seconds) in enumerate(WINDOWS):
        peaks = Histogram()
        for key in found.keys.values():
            peaks.add(key.peaks[index])
        limit = by_window.get(index)
        rows.append(
            {
                "window": name,
                "covered": found.fits(seconds),
                "peaks": {f"p{p}": peaks.percentile(p) for p in (50, 90, 99)} | {"most": peaks.highest},
                "limit": None if limit is None else limit.limit,
                "refused": None if limit is None else limit.refused,
                "burst": None if limit is None else limit.burst,
                "bucket_refused": None if limit is None or limit.burst is None else limit.bucket_refused,
            }
        )
    return rows


def _thin(found: Profile, share: float) -> list[str]:
    """Return why the proposal stands on thin ground, in words; nothing if it does not."""
    reasons = []
    if found.requests < REQUESTS_NEEDED:
        reasons.append(f"there are only {number(found.requests)} requests")
    if found.keys.keys < KEYS_NEEDED:
        reasons.append(f"there are only {number(found.keys.keys)} keys")
    if not found.fits(_HOUR):
        reasons.append(f"the log covers only {span(found.seconds)}")
    if 0 < share * found.requests < REFUSALS_NEEDED:
        reasons.append(
            f"{percent(share)} of {number(found.requests)} requests are {share * found.requests:.1g}, "
            f"too few to tell a rare burst from a habit"
        )
    return reasons


def suggestion_text(report: dict[str, Any]) -> str:
    """Return a proposal as lines for a policy file, with the evidence in comments."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    about = "" if report["keys_exact"] else "about "
    log = report["log"]
    files = "".join(c if c.isprintable() else "?" for c in ", ".join(log["files"]))
    refused_keys = report["refused_keys"]
    yield f"# Proposed by `headgate suggest` from {files}:"
    yield (
        f"# {number(report['requests'])} requests of {about}{number(report['keys'])} keys, "
        f"{moment(report['from'])} to {moment(report['to'])} UTC."
    )
    left_out = log["bad"] + log["without_key"]["count"] + log["too_late"]
    if left_out:
        yield f"# {number(left_out)} of {number(log['lines'])} lines were left out; `headgate replay` says why."
    if report["thin"]:
        yield f"# THIN DATA: {'; '.join(report['thin'])}. Take this as a guess."
    yield (
        f"# It would have refused {number(report['refused'])} of these requests ({percent(report['refused_share'])}), "
        f"of {about}{number(refused_keys)} keys."
    )
    yield "# It leaves no room for growth: add some, and watch it as a shadow rule first."
    yield f"[limiters.{toml_key(report['limiter'])}]"
    yield f'rules = ["{report["rule"]}"]'
    yield "#"
    most = percent(report["refuse_at_most"])
    title = f"Units that each key used at most, and the smallest limits that refuse at most {most}:"
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
        yield "# The log's times are whole seconds, so peaks within a second look higher than they are."


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
