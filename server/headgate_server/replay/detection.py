"""Which format a log has: as its user says, or as its first lines look."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headgate_server.replay.csv_format import CsvFormat
from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.formats import LogFormat
from headgate_server.replay.json_format import KINDS, JsonFormat, kind_of
from headgate_server.replay.recorded import RecordedFormat
from headgate_server.replay.text_formats import apache, combined, nginx

AUTO = "auto"
NAMED = ("combined", "common", *KINDS, "csv", "headgate")
LINES_LOOKED_AT = 20


def choose_format(
    wanted: str, first_lines: Sequence[str], source: str, time: str | None
) -> tuple[LogFormat, bool]:
    """Return the format of a log, and whether its first line is not a request but names columns.

    Args:
        wanted: A name out of `NAMED`, `csv:` and columns, a format of nginx or Apache, or `auto`.
        first_lines: The first few lines that are not empty.
        source: What the log is called in errors.
        time: The field with the time, for JSON and CSV.

    Raises:
        ReplayError: There is no such format, or none can be found.
    """
    if wanted == AUTO:
        return _detected(first_lines, source, time)
    if wanted in ("combined", "common"):
        return combined(), False
    if wanted == "headgate":
        return RecordedFormat(), False
    if wanted in KINDS:
        return JsonFormat(wanted, time), False
    if wanted == "csv":
        return CsvFormat(first_lines[0] if first_lines else "", time), True
    if wanted.startswith("csv:"):
        return CsvFormat(wanted.removeprefix("csv:"), time), False
    if "$" in wanted:
        return nginx(wanted), False
    if "%" in wanted:
        return apache(wanted), False
    raise ReplayError(
        f"there is no format {wanted!r}; there is {', '.join(NAMED)}, or write it as nginx ('$remote_addr …') or "
        f"Apache ('%h …') is configured with"
    )


def _detected(first_lines: Sequence[str], source: str, time: str | None) -> tuple[LogFormat, bool]:
    for line in first_lines:  # the first one may be broken
        found = _by_line(line, time)
        if found is not None:
            return found, False
    header = first_lines[0] if first_lines else ""
    if _is_header(header):
        return CsvFormat(header, time), True
    shown = f"; it begins with {header[:80]!r}" if header else "; it is empty"
    raise ReplayError(f"{source}: its first lines do not show its format{shown}. Say it with --format")


def _by_line(line: str, time: str | None) -> LogFormat | None:
    if line.startswith("{"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return RecordedFormat() if RecordedFormat.fits(row) else JsonFormat(kind_of(row), time)
    text = combined()
    try:
        text.read(line)
    except BadLine:
        return None
    return text


def _is_header(line: str) -> bool:
    """Return whether a line looks like names of columns: at least two, none of them a number."""
    try:
        names = CsvFormat(line).columns
    except (ReplayError, ValueError):
        return False
    return len(names) > 1 and all(name.replace("_", "").replace("@", "")[:1].isalpha() for name in names)
