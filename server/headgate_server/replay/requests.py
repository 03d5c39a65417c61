"""Requests of several logs, in the order of time.

Reading is lazy. A server writes a line at the end of a request, often with the time of its start, so lines are slightly out
of order: each log has a buffer that sorts a bounded number of lines. A line with a time before the last line that left the
buffer is skipped and counted. Invalid lines are counted by reason, with a few examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush, heappushpop, merge
from itertools import chain, count
from typing import NamedTuple

from headgate.keys import Key
from headgate.quota import MAX_UNITS
from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.expressions import Getter, Row, compile_expression
from headgate_server.replay.fields import LogFormat
from headgate_server.replay.formats import LINES_LOOKED_AT, choose_format
from headgate_server.replay.recording import RECORDED, key_of
from headgate_server.replay.sources import LONGEST_LINE, LogSource
from headgate_server.replay.times import TimeReader

DEFAULT_KEY = "{client|network}"
DEFAULT_ROUTE = "{method} {path|shape}"
DEFAULT_BUFFER = 50_000
"""Size of the sorting buffers of all logs, in lines."""

_LEAST_BUFFER = 100
_LONGEST_KEY = 256
_EXAMPLES = 3
_LONGEST_EXAMPLE = 160
_REFUSED = "429"
_NO_KEY = "no key: a field of the key is missing"


class LoggedRequest(NamedTuple):
    """One request of a log.

    Attributes:
        at: The time, in microseconds since the epoch.
        order: Number of the line, to keep the order of requests with equal times.
        key: The key for the limiter.
        caller: The key as text, for the report.
        cost: The number of units.
        tier: The caller's tier.
        route: The route, or `None`.
        was_refused: Whether it was refused in reality.
    """

    at: int
    order: int
    key: Key | None
    caller: str
    cost: int
    tier: str | None
    route: str | None
    was_refused: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """Options for reading a log: its format, and expressions for the values of a request.

    Attributes:
        format: The format; see `choose_format`.
        time: The field with the time, for JSON and CSV; by default the known names.
        key: The key; `None` for `DEFAULT_KEY`. It applies to every scope that is not in `scopes`.
        scopes: Keys by scope.
        named_scopes: The scopes of the limiter; empty for plain keys.
        needs_key: Whether a line without a key is skipped; false if all rules are shared by all callers.
        cost: The number of units.
        tier: The caller's tier, or `None`.
        route: The group in the report; `None` for `DEFAULT_ROUTE`, if lines have these fields.
        limiter: The limiter of recorded lines; `None` for all.
        buffer: Size of the sorting buffers, in lines.
    """

    format: str = "auto"
    time: str | None = None
    key: str | None = None
    scopes: Mapping[str, str] = field(default_factory=dict)
    named_scopes: tuple[str, ...] = ()
    needs_key: bool = True
    cost: str = "1"
    tier: str | None = None
    route: str | None = None
    limiter: str | None = None
    buffer: int = DEFAULT_BUFFER


@dataclass(slots=True)
class BadLines:
    """Invalid lines with the same reason."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LogCounts:
    """Counts of the lines that were read.

    Attributes:
        lines: All lines.
        bad: Invalid lines, by reason.
        too_late: Skipped lines, which were too old to be sorted.
        was_refused: Requests that were refused in reality.
        problems: Errors that ended the reading of a log early.
        formats: The format of each log.
        times: The readers of times, one for each log.
    """

    lines: int = 0
    bad: dict[str, BadLines] = field(default_factory=dict)
    too_late: int = 0
    was_refused: int = 0
    problems: list[str] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    times: list[TimeReader] = field(default_factory=list)

    @property
    def without_zone(self) -> int:
        """Number of times without a time zone."""
        return sum(reader.without_zone for reader in self.times)

    def add_bad(self, reason: str, where: str, line: str) -> None:
        """Count an invalid line."""
        bad = self.bad.setdefault(reason, BadLines())
        bad.count += 1
        if len(bad.examples) < _EXAMPLES:
            shown = line if len(line) <= _LONGEST_EXAMPLE else line[:_LONGEST_EXAMPLE] + "…"
            bad.examples.append(f"{where}: {shown}")


Extract = Callable[[str], LoggedRequest]
"""Returns the request of a line, or raises BadLine."""


def read_requests(
    sources: Sequence[LogSource], selection: Selection, counts: LogCounts
) -> Iterator[LoggedRequest]:
    """Yield the requests of several logs in the order of time.

    Raises:
        ReplayError: The format of a log is unknown, or the options do not fit it; the first lines are read at once.
    """
    numbers = count()
    room = max(_LEAST_BUFFER, selection.buffer // max(1, len(sources)))
    # Open all logs now, so that an error in the last one is reported at once.
    opened = [_open(source, selection, counts, numbers) for source in sources]
    logs = [in_order(requests, room, counts) for requests in opened]
    return logs[0] if len(logs) == 1 else merge(*logs)


def _open(
    source: LogSource, selection: Selection, counts: LogCounts, numbers: Iterator[int]
) -> Iterator[LoggedRequest]:
    """Choose the format of a log, and return its requests in the order of the lines."""
    lines = source.lines()
    first: list[bytes | None] = []
    texts: list[str] = []
    for line in lines:
        first.append(line)
        if line is not None and (text := _text(line)):
            texts.append(text)
        if len(texts) >= LINES_LOOKED_AT or len(first) >= 10 * LINES_LOOKED_AT:
            break
    log_format, has_header = choose_format(selection.format, texts, source.name, selection.time)
    counts.formats[source.name] = log_format.name
    extract = _extractor(log_format, selection, counts, numbers)
    return _requests(source, chain(first, lines), extract, counts, has_header=has_header)


def _requests(
    source: LogSource,
    lines: Iterable[bytes | None],
    extract: Extract,
    counts: LogCounts,
    *,
    has_header: bool,
) -> Iterator[LoggedRequest]:
    for number, line in enumerate(lines, start=1):
        counts.lines += 1
        if line is None:
            counts.add_bad(f"longer than {LONGEST_LINE:,} bytes", f"{source.name}:{number}", "…")
            continue
        text = _text(line)
        if not text:
            continue
        if has_header:
            has_header = False
            continue
        try:
            request = extract(text)
        except BadLine as error:
            counts.add_bad(error.reason, f"{source.name}:{number}", text)
            continue
        if request.was_refused:
            counts.was_refused += 1
        yield request
    if source.problem is not None:
        counts.problems.append(source.problem)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace").strip()


def in_order(requests: Iterator[LoggedRequest], room: int, counts: LogCounts) -> Iterator[LoggedRequest]:
    """Yield requests in the order of time, with a buffer of `room` requests.

    The buffer is limited by a number and not by time, so that one line with a date in the far future stays in the buffer
    and does not make all later lines too late.
    """
    buffer: list[LoggedRequest] = []
    done = -1
    for request in requests:
        if request.at < done:
            counts.too_late += 1
            continue
        if len(buffer) < room:
            heappush(buffer, request)
        else:
            oldest = heappushpop(buffer, request)
            done = oldest.at
            yield oldest
    while buffer:
        yield heappop(buffer)


def _extractor(
    log_format: LogFormat, selection: Selection, counts: LogCounts, numbers: Iterator[int]
) -> Extract:
    if log_format.name == RECORDED:
        return _recorded(log_format, selection, numbers)
    times = TimeReader()
    counts.times.append(times)
    read, read_time, time_of = log_format.read, times.read, log_format.time()
    key_of_row = _keys(log_format, selection)
    _check_cost(selection.cost)
    cost_of = compile_expression(selection.cost, log_format.getter)
    tier_of = None if selection.tier is None else compile_expression(selection.tier, log_format.getter)
    route_of = _route(log_format, selection)
    status_of = _optional(log_format, "{status}")
    needs_key = selection.needs_key

    def extract(line: str) -> LoggedRequest:
        row = read(line)
        key = key_of_row(row)
        if key is None and needs_key:
            raise BadLine(_NO_KEY)
        at = read_time(time_of(row))
        return LoggedRequest(
            at,
            next(numbers),
            key,
            key if isinstance(key, str) else caller_name(key),
            _units(cost_of(row)),
            None if tier_of is None else tier_of(row),
            None if route_of is None else _shortened(route_of(row)),
            status_of is not None and status_of(row) == _REFUSED,
        )

    return extract


def _keys(log_format: LogFormat, selection: Selection) -> Callable[[Row], Key | None]:
    default = selection.key or DEFAULT_KEY
    if not selection.named_scopes:
        plain = compile_expression(default, log_format.getter)
        return lambda row: _shortened(plain(row))
    getters = {
        scope: compile_expression(selection.scopes.get(scope) or default, log_format.getter)
        for scope in selection.named_scopes
    }

    def of_scopes(row: Row) -> Key | None:
        key = {}
        for scope, getter in getters.items():
            part = _shortened(getter(row))
            if part is None:
                return None
            key[scope] = part
        return key

    return of_scopes


def caller_name(key: Key | None) -> str:
    """Return a key as text for the report."""
    if isinstance(key, Mapping):
        return ", ".join(f"{scope}={caller_name(part)}" for scope, part in key.items())
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return key or "(all callers)"


def _shortened(text: str | None) -> str | None:
    """Return a long text as its beginning and a digest, to save memory."""
    if text is None or len(text) <= _LONGEST_KEY:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{text[:64]}…{digest}"


def _check_cost(text: str) -> None:
    if "{" not in text and not (text.isascii() and text.isdigit()):
        raise ReplayError(f"--cost is a whole number, or an expression like {{bytes|per:1024}}, not {text!r}")


def _units(text: str | None) -> int:
    if text is None:
        raise BadLine("no cost")
    if not (text.isascii() and text.isdigit() and len(text) < 17):
        raise BadLine("the cost is not a whole number")
    return min(int(text), MAX_UNITS)


def _route(log_format: LogFormat, selection: Selection) -> Getter | None:
    if selection.route is not None:
        return compile_expression(selection.route, log_format.getter)
    return _optional(log_format, DEFAULT_ROUTE)


def _optional(log_format: LogFormat, expression: str) -> Getter | None:
    """Return the getter of an expression; `None` if lines of this format do not have its fields."""
    try:
        return compile_expression(expression, log_format.getter)
    except ReplayError:
        return None


def _recorded(log_format: LogFormat, selection: Selection, numbers: Iterator[int]) -> Extract:
    if selection.key is not None or selection.scopes:
        raise ReplayError("recordings of Headgate contain the keys; remove --key and --scope")

    def extract(line: str) -> LoggedRequest:
        row = log_format.read(line)
        if selection.limiter is not None and row.get("limiter") != selection.limiter:
            raise BadLine("recorded for another limiter")
        if row.get("operation", "hit") not in ("hit", "hold"):
            raise BadLine("recorded for an operation without a decision")
        at, cost, tier, key = row["at"], row.get("cost", 1), row.get("tier"), key_of(row)
        if type(at) is not int or not 0 <= at < 2**53:
            raise BadLine("invalid time")
        if type(cost) is not int or not 0 <= cost <= MAX_UNITS:
            raise BadLine("the cost is not a whole number")
        if tier is not None and not isinstance(tier, str):
            raise BadLine("the tier is not text")
        was_refused = row.get("allowed") is False
        return LoggedRequest(at, next(numbers), key, caller_name(key), cost, tier, None, was_refused)

    return extract
