"""Log formats of JSON and CSV lines, and the choice of a format: by name, or from the first lines of a log."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence

from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.expressions import Row
from headgate_server.replay.fields import LogFormat, Value
from headgate_server.replay.recording import RECORDED, is_recorded, read_recorded
from headgate_server.replay.text_formats import apache, combined, nginx

AUTO = "auto"
NAMED = ("combined", "common", "json", "csv", RECORDED)
LINES_LOOKED_AT = 20

_DELIMITERS = ",;\t|"


def choose_format(
    wanted: str, first_lines: Sequence[str], source: str, time: str | None
) -> tuple[LogFormat, bool]:
    """Return the format of a log, and whether its first line names columns.

    Args:
        wanted: A name out of `NAMED`, `csv:` and columns, a format of nginx or Apache, or `auto`.
        first_lines: The first few lines that are not empty.
        source: The name of the log in errors.
        time: The field with the time, for JSON and CSV.

    Raises:
        ReplayError: The format is unknown, or cannot be detected.
    """
    if wanted == AUTO:
        return _detected(first_lines, source, time)
    if wanted in ("combined", "common"):
        return combined(), False
    if wanted == RECORDED:
        return LogFormat(RECORDED, read_recorded, _json_value), False
    if wanted == "json":
        return json_format(time), False
    if wanted == "csv":
        return csv_format(first_lines[0] if first_lines else "", time), True
    if wanted.startswith("csv:"):
        return csv_format(wanted.removeprefix("csv:"), time), False
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
        if line.startswith("{"):
            try:
                name = RECORDED if is_recorded(json.loads(line)) else "json"
            except (ValueError, RecursionError):
                continue
            return choose_format(name, first_lines, source, time)
        try:
            combined().read(line)
        except BadLine:
            continue
        return combined(), False
    header = first_lines[0] if first_lines else ""
    if _is_header(header):
        return csv_format(header, time), True
    shown = f"; it begins with {header[:80]!r}" if header else "; it is empty"
    raise ReplayError(f"{source}: its first lines do not show its format{shown}. Name it with --format")


def _is_header(line: str) -> bool:
    """Return whether a line looks like names of columns: at least two, none of them a number."""
    try:
        names = csv_format(line).names
    except ReplayError:
        return False
    return len(names) > 1 and all(name.replace("_", "").replace("@", "")[:1].isalpha() for name in names)


def json_format(time: str | None = None) -> LogFormat:
    """Return the format of JSON objects, one to a line.

    A name with dots leads into objects: `request.headers.User-Agent`.
    """
    return LogFormat("json", _read_json, _json_value, time_name=time)


def _read_json(line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("not JSON") from None
    if not isinstance(row, dict):
        raise BadLine("JSON, but no object")
    return row


def _json_value(name: str) -> Value:
    """Return how to get a value by its name, or else by its path through objects."""
    path = name.split(".")
    if len(path) == 1:
        return lambda row: row.get(name)

    def get(row: Row) -> object:
        if name in row:
            return row[name]
        value = row
        for part in path:
            if not isinstance(value, dict):
                return None
            value = value.get(part)
        return value

    return get


def csv_format(columns: str, time: str | None = None) -> LogFormat:
    """Return the format of values between commas, semicolons, tabs or bars, whichever the header has most of.

    Args:
        columns: The names of the columns, as the first line of a log has them.
        time: The column with the time, instead of the known names.

    Raises:
        ReplayError: The columns have no names, or the same name twice.
    """
    delimiter = max(_DELIMITERS, key=columns.count)
    try:
        names = next(csv.reader([columns], delimiter=delimiter), [])
    except csv.Error:
        names = []
    names = [name.strip().removeprefix("\ufeff") for name in names]
    if not names or len(set(names)) != len(names) or not all(names):
        raise ReplayError(
            f"the first line of a CSV log names its columns, each once, which {columns[:200]!r} does not; "
            f"name them as --format csv:time,client,path"
        )

    def read(line: str) -> Row:
        try:
            row = next(csv.reader((line,), delimiter=delimiter, strict=True), [])
        except csv.Error:
            raise BadLine("not CSV") from None
        if len(row) != len(names):
            raise BadLine(f"not {len(names)} columns")
        return [value.strip() for value in row]

    def own(name: str) -> Value | None:
        if name not in names:
            return None
        index = names.index(name)
        return lambda row: row[index]

    return LogFormat("csv", read, own, names, time)
