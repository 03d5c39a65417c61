"""From the lines of several logs to requests in the order of time.

Lines are read as they are needed. A server writes a line when a request ends, but may date it by its begin, so lines are a
little out of order: each log has a buffer that sorts so many lines at a time. A line that is older than what has left the
buffer is left out and counted, because deciding it at another time would be a guess. What could not be read is counted by
reason, with a few examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush, heappushpop, merge
from itertools import chain, count
from typing import NamedTuple

from headgate.keys import Key
from headgate.quota import MAX_UNITS
from headgate_server.replay.detection import LINES_LOOKED_AT, choose_format
from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.expressions import Getter, compile_expression
from headgate_server.replay.formats import LogFormat
from headgate_server.replay.recorded import RecordedFormat, key_of
from headgate_server.replay.sources import LONGEST_LINE, LogSource
from headgate_server.replay.times import TimeReader

DEFAULT_KEY = "{client|network}"
DEFAULT_ROUTE = "{method} {path|shape}"
DEFAULT_BUFFER = 50_000
"""Lines that are held to be sorted, over all logs."""

_LEAST_BUFFER = 100
_LONGEST_KEY = 256
_EXAMPLES = 3
_LONGEST_EXAMPLE = 160
_REFUSED = frozenset(("429",))


class LoggedRequest(NamedTuple):
    """One request of a log.

    Attributes:
        at: When, in microseconds since the epoch.
        order: Tells requests of the same time apart: those of a log stay in their order.
        key: Who, as the limiter is asked.
        caller: Who, as the report says it.
        cost: How many units.
        tier: The caller's tier.
        route: What was asked for.
        was_refused: Whether the log says that it was refused then.
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
    """What to make of a line: expressions, and which format it has.

    Attributes:
        format: As for `choose_format`.
        time: The field with the time, for JSON and CSV; by default those that are known.
        key: Who a request counts for; `None` for `DEFAULT_KEY`. It stands for every scope that `scopes` does not name.
        scopes: Who it counts for, by scope.
        named_scopes: The scopes that the limiter counts by; none for plain keys.
        needs_key: Whether a line without a key is left out; not if all rules count everybody together.
        cost: How many units.
        tier: The caller's tier; `None` for none.
        route: What the report groups by; `None` for `DEFAULT_ROUTE`, where lines have that.
        limiter: Of recorded lines only those of this limiter; `None` for all.
        buffer: How many lines are held to be sorted.
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
    """Lines that could not be read for one reason."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LogCounts:
    """What was read, and what could not be.

    Attributes:
        lines: All lines.
        empty: Lines with nothing in them.
        bad: Lines that could not be read, by reason.
        without_key: Lines without a key.
        other_limiters: Recorded lines of other limiters, or of operations that decide nothing.
        unsorted: Lines that were older than one before them, and were put in order.
        too_late: Lines that were too old for that, and were left out.
        latest_us: By how much the worst of these was late.
        was_refused: Requests that were refused at the time.
        problems: Logs whose end could not be read, in words.
        formats: The format of each log.
    """

    lines: int = 0
    empty: int = 0
    bad: dict[str, BadLines] = field(default_factory=dict)
    without_key: BadLines = field(default_factory=BadLines)
    other_limiters: int = 0
    unsorted: int = 0
    too_late: int = 0
    latest_us: int = 0
    was_refused: int = 0
    problems: list[str] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    times: list[TimeReader] = field(default_factory=list)

    @property
    def without_zone(self) -> int:
        """How many times named no zone."""
        return sum(reader.without_zone for reader in self.times)

    def add_bad(self, reason: str, where: str, line: str) -> None:
        """Count a line that could not be read."""
        _count(self.bad.setdefault(reason, BadLines()), where, line)

    def add_without_key(self, where: str, line: str) -> None:
        """Count a line without a key."""
        _count(self.without_key, where, line)


def _count(lines: BadLines, where: str, line: str) -> None:
    lines.count += 1
    if len(lines.examples) < _EXAMPLES:
        shown = line if len(line) <= _LONGEST_EXAMPLE else line[:_LONGEST_EXAMPLE] + "…"
        lines.examples.append(f"{where}: {shown}")


class _Skipped(Exception):
    """A recorded line that has nothing to decide here."""


Extract = Callable[[str], LoggedRequest | None]
"""Returns the request of a line, or `None` if it has no key; raises BadLine."""


def read_requests(
    sources: Sequence[LogSource], selection: Selection, counts: LogCounts
) -> Iterator[LoggedRequest]:
    """Yield the requests of several logs in the order of time.

    Raises:
        ReplayError: A log cannot be read as asked; the first few lines of each are looked at when this is called.
    """
    numbers = count()
    room = max(_LEAST_BUFFER, selection.buffer // max(1, len(sources)))
    # All are opened now, so that what is wrong with the last one is not said after an hour.
    opened = [_Opened(source, selection, counts, numbers) for source in sources]
    logs = [in_order(log.requests(), room, counts) for log in opened]
    return logs[0] if len(logs) == 1 else merge(*logs)


class _Opened:
    """One log, whose format is known."""

    def __init__(
        self, source: LogSource, selection: Selection, counts: LogCounts, numbers: Iterator[int]
    ) -> None:
        self._source = source
        self._counts = counts
        lines = source.lines()
        first: list[bytes | None] = []
        texts: list[str] = []
        for line in lines:
            first.append(line)
            if line is not None and (text := _text(line)):
                texts.append(text)
            if len(texts) >= LINES_LOOKED_AT or len(first) >= 10 * LINES_LOOKED_AT:
                break
        self._lines = chain(first, lines)
        log_format, has_header = choose_format(selection.format, texts, source.name, selection.time)
        self._header = texts[0] if has_header and texts else None
        counts.formats[source.name] = log_format.name
        self._extract = _extractor(log_format, selection, counts, numbers)

    def requests(self) -> Iterator[LoggedRequest]:
        """Yield the requests in the order of the lines."""
        counts, extract, header, name = self._counts, self._extract, self._header, self._source.name
        number = 0
        for line in self._lines:
            number += 1
            counts.lines += 1
            if line is None:
                counts.add_bad(f"longer than {LONGEST_LINE:,} bytes", f"{name}:{number}", "…")
                continue
            text = _text(line)
            if not text:
                counts.empty += 1
                continue
            if header is not None:
                header = None
                continue
            try:
                request = extract(text)
            except BadLine as error:
                counts.add_bad(error.reason, f"{name}:{number}", text)
                continue
            except _Skipped:
                counts.other_limiters += 1
                continue
            if request is None:
                counts.add_without_key(f"{name}:{number}", text)
                continue
            if request.was_refused:
                counts.was_refused += 1
            yield request
        if self._source.problem is not None:
            counts.problems.append(self._source.problem)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace").strip()


def in_order(requests: Iterator[LoggedRequest], room: int, counts: LogCounts) -> Iterator[LoggedRequest]:
    """Yield requests in the order of time, with a buffer for so many.

    Bounded by a number and not by a time: a single line with a date far ahead then stays in the buffer, instead of making
    everything after it too late.
    """
    buffer: list[LoggedRequest] = []
    newest = done = -1
    for request in requests:
        at = request.at
        if at < newest:
            if at < done:
                counts.too_late += 1
                counts.latest_us = max(counts.latest_us, done - at)
                continue
            counts.unsorted += 1
        else:
            newest = at
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
    if isinstance(log_format, RecordedFormat):
        return _recorded(log_format, selection, numbers)
    times = TimeReader()
    counts.times.append(times)
    read, read_time, time_of = log_format.read, times.read, log_format.time()
    key_of_row = _keys(log_format, selection)
    cost_of = _cost(selection.cost, log_format)
    tier_of = None if selection.tier is None else compile_expression(selection.tier, log_format.getter)
    route_of = _route(log_format, selection)
    status_of = _optional(log_format, "status")
    needs_key = selection.needs_key

    def extract(line: str) -> LoggedRequest | None:
        row = read(line)
        key, caller = key_of_row(row)
        if key is None and needs_key:
            return None
        at = read_time(time_of(row))
        route = None if route_of is None else route_of(row)
        return LoggedRequest(
            at,
            next(numbers),
            key,
            caller,
            1 if cost_of is None else _units(cost_of(row)),
            None if tier_of is None else tier_of(row),
            route if route is None or len(route) <= _LONGEST_KEY else shortened(route),
            status_of is not None and status_of(row) in _REFUSED,
        )

    return extract


def _keys(log_format: LogFormat, selection: Selection) -> Callable[[object], tuple[Key | None, str]]:
    if not selection.named_scopes:
        plain = compile_expression(selection.key or DEFAULT_KEY, log_format.getter)

        def of_row(row: object) -> tuple[Key | None, str]:
            key = plain(row)
            if key is not None and len(key) > _LONGEST_KEY:
                key = shortened(key)
            return key, key or "unknown"

        return of_row
    parts = [
        (
            scope,
            compile_expression(
                selection.scopes.get(scope) or selection.key or DEFAULT_KEY, log_format.getter
            ),
        )
        for scope in selection.named_scopes
    ]

    def of_scopes(row: object) -> tuple[Key | None, str]:
        key = {}
        for scope, getter in parts:
            part = getter(row)
            if part is None:
                return None, ""
            key[scope] = part if len(part) <= _LONGEST_KEY else shortened(part)
        return key, caller_name(key)

    return of_scopes


def caller_name(key: Key | None) -> str:
    """Return who a key means, for people."""
    if isinstance(key, Mapping):
        return ", ".join(f"{scope}={caller_name(part)}" for scope, part in key.items())
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return key or "everybody"


def shortened(text: str) -> str:
    """Return a long text as its beginning and a digest, so that memory is bounded and no two become one."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{text[:64]}…{digest}"


def _cost(text: str, log_format: LogFormat) -> Getter | None:
    """Return what gets the cost; `None` if it is always 1."""
    if text == "1":
        return None
    if "{" not in text and not (text.isascii() and text.isdigit()):
        raise ReplayError(f"--cost is a whole number, or an expression like {{bytes|per:1024}}, not {text!r}")
    return compile_expression(text, log_format.getter)


def _units(text: str | None) -> int:
    if text is None:
        raise BadLine("no cost")
    if not (text.isascii() and text.isdigit() and len(text) < 17):
        raise BadLine("a cost that is no whole number")
    return min(int(text), MAX_UNITS)


def _route(log_format: LogFormat, selection: Selection) -> Getter | None:
    if selection.route is not None:
        return compile_expression(selection.route, log_format.getter)
    try:
        return compile_expression(DEFAULT_ROUTE, log_format.getter)
    except ReplayError:
        return None  # lines of this format do not say what was asked for


def _optional(log_format: LogFormat, name: str) -> Getter | None:
    try:
        return log_format.getter(name)
    except ReplayError:
        return None


def _recorded(log_format: RecordedFormat, selection: Selection, numbers: Iterator[int]) -> Extract:
    if selection.key is not None or selection.scopes:
        raise ReplayError(
            "what Headgate has recorded says who each request counts for; leave out --key and --scope"
        )

    def extract(line: str) -> LoggedRequest | None:
        row = log_format.read(line)
        if selection.limiter is not None and row.get("limiter") != selection.limiter:
            raise _Skipped
        if row.get("operation", "hit") not in ("hit", "hold"):
            raise _Skipped
        at, cost, tier, key = row["at"], row.get("cost", 1), row.get("tier"), key_of(row)
        if type(at) is not int or not 0 <= at < 2**53:
            raise BadLine("a time that cannot be read")
        if type(cost) is not int or not 0 <= cost <= MAX_UNITS:
            raise BadLine("a cost that is no whole number")
        if tier is not None and not isinstance(tier, str):
            raise BadLine("a tier that is no text")
        was_refused = row.get("allowed") is False
        return LoggedRequest(at, next(numbers), key, caller_name(key), cost, tier, None, was_refused)

    return extract
