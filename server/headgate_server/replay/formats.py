"""Log formats: JSON, CSV, common, combined, and the configured formats of nginx and Apache.

A text format is compiled to a pattern. A field ends at the first character of the text after it; in quotes, a backslash
escapes. So a line is parsed in linear time.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence

from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.expressions import Row
from headgate_server.replay.fields import LogFormat, Value
from headgate_server.replay.recording import RECORDED, is_recorded, read_recorded

AUTO = "auto"
NAMED = ("combined", "common", "json", "csv", RECORDED)
LINES_LOOKED_AT = 20

_DELIMITERS = ",;\t|"

_QUOTED = r"[^\"\\]*(?:\\.[^\"\\]*)*"
_COMBINED = re.compile(
    rf'(\S+) (\S+) ([^\[]*?) ?\[([^\]]*)\] "({_QUOTED})" (\d\d\d|-) (\S+)(?: "({_QUOTED})" "({_QUOTED})")?'
)
_COMBINED_NAMES = (
    "remote_addr",
    "ident",
    "remote_user",
    "time_local",
    "request",
    "status",
    "body_bytes_sent",
    "http_referer",
    "http_user_agent",
)

_NGINX = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_APACHE = re.compile(r"%(?:[!\d,]*)[<>]?(?:\{([^}]*)\})?(\^?[a-zA-Z]+|%)")
_APACHE_LETTERS = {
    "h": "remote_addr",
    "a": "remote_addr",
    "u": "remote_user",
    "t": "time_local",
    "r": "request",
    "s": "status",
    "b": "body_bytes_sent",
    "B": "body_bytes_sent",
    "O": "bytes_sent",
    "m": "request_method",
    "U": "uri",
    "q": "query_string",
    "v": "server_name",
    "V": "host",
}
"""Names of nginx for fields of Apache; other fields are named by their letter."""
_APACHE_NAMED = {"i": "http_", "o": "sent_http_", "e": "env_", "C": "cookie_", "n": "note_", "a": "peer_"}
_APACHE_EPOCHS = {"%s"} | {
    moment + unit for moment in ("", "begin:", "end:") for unit in ("sec", "msec", "usec")
}


def choose_format(
    wanted: str, first_lines: Sequence[str], source: str, time: str | None
) -> tuple[LogFormat, bool]:
    """Return the format of a log, and whether its first line is a header.

    Args:
        wanted: One of `NAMED`, `csv:` with columns, a format of nginx or Apache, or `auto`.
        first_lines: The first lines that are not empty.
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
        return LogFormat("json", _read_json, _json_value, time_name=time), False
    if wanted == "csv":
        return csv_format(first_lines[0] if first_lines else "", time), True
    if wanted.startswith("csv:"):
        return csv_format(wanted.removeprefix("csv:"), time), False
    if "$" in wanted:
        return nginx(wanted), False
    if "%" in wanted:
        return apache(wanted), False
    raise ReplayError(
        f"unknown format {wanted!r}; use {', '.join(NAMED)}, or the log format of nginx ('$remote_addr …') or "
        f"Apache ('%h …')"
    )


def _detected(first_lines: Sequence[str], source: str, time: str | None) -> tuple[LogFormat, bool]:
    for line in first_lines:  # the first one may be incomplete
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
    raise ReplayError(f"{source}: the format was not detected{shown}. Set it with --format")


def _is_header(line: str) -> bool:
    """Return whether a line looks like a header: at least two names, none of them a number."""
    try:
        names = csv_format(line).names
    except ReplayError:
        return False
    return len(names) > 1 and all(name.replace("_", "").replace("@", "")[:1].isalpha() for name in names)


def _read_json(line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("not JSON") from None
    if not isinstance(row, dict):
        raise BadLine("not a JSON object")
    return row


def _json_value(name: str) -> Value:
    """Return the getter of a value by its name, or by its path through objects: `request.headers.User-Agent`."""
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
    """Return the format of values with a separator: the most frequent of comma, semicolon, tab and bar in the header.

    Args:
        columns: The names of the columns, as in the header of a log.
        time: The column with the time, instead of the common names.

    Raises:
        ReplayError: A name is empty or used twice.
    """
    delimiter = max(_DELIMITERS, key=columns.count)
    try:
        names = next(csv.reader([columns], delimiter=delimiter), [])
    except csv.Error:
        names = []
    names = [name.strip().removeprefix("\ufeff") for name in names]
    if not names or len(set(names)) != len(names) or not all(names):
        raise ReplayError(
            f"the first line of a CSV log must have a different name for each column, not {columns[:200]!r}; "
            f"or set the names with --format csv:time,client,path"
        )

    def read(line: str) -> Row:
        try:
            row = next(csv.reader((line,), delimiter=delimiter, strict=True), [])
        except csv.Error:
            raise BadLine("not CSV") from None
        if len(row) != len(names):
            raise BadLine(f"not {len(names)} columns")
        return [value.strip() for value in row]

    return LogFormat("csv", read, _by_position(names), names, time)


def _text_format(
    name: str, pattern: re.Pattern[str], names: tuple[str, ...], *, whole_line: bool = True
) -> LogFormat:
    """Return a format defined by a pattern with a group for each name."""
    match = pattern.fullmatch if whole_line else pattern.match

    def read(line: str) -> Row:
        found = match(line)
        if found is None:
            raise BadLine(f"does not match the format {name}")
        return found.groups()

    return LogFormat(name, read, _by_position(names), names)


def _by_position(names: Sequence[str]) -> Callable[[str], Value | None]:
    """Return a function from a name to the getter of its value, for rows in the order of `names`."""

    def own(name: str) -> Value | None:
        if name not in names:
            return None
        index = names.index(name)
        return lambda row: row[index]

    return own


def combined() -> LogFormat:
    """Return the combined format of nginx and Apache, also for the common format and for lines with additional fields."""
    return _text_format("combined", _COMBINED, _COMBINED_NAMES, whole_line=False)


def nginx(text: str) -> LogFormat:
    """Return a `log_format` of nginx: `$remote_addr [$time_local] "$request"`.

    Raises:
        ReplayError: Lines of this format cannot be parsed.
    """
    pieces: list[tuple[str, str]] = []
    end = 0
    for found in _NGINX.finditer(text):
        pieces.append((text[end : found.start()], found[1] or found[2]))
        end = found.end()
    return _format(text, pieces, text[end:])


def apache(text: str) -> LogFormat:
    r"""Return a `LogFormat` of Apache: `%h %t \"%r\" %>s`.

    Raises:
        ReplayError: Lines of this format cannot be parsed.
    """
    text = text.replace('\\"', '"')
    pieces: list[tuple[str, str]] = []
    end, plain = 0, ""
    for found in _APACHE.finditer(text):
        plain += text[end : found.start()]
        end = found.end()
        if found[2] == "%":
            plain += "%"
            continue
        name = _apache_name(found[2], found[1], text)
        if name == "time_local" and not plain.endswith("["):  # %t includes the brackets
            pieces.append((plain + "[", name))
            plain = "]"
        else:
            pieces.append((plain, name))
            plain = ""
    return _format(text, pieces, plain + text[end:])


def _apache_name(letter: str, argument: str | None, text: str) -> str:
    if letter == "t" and argument:
        if argument not in _APACHE_EPOCHS:
            raise ReplayError(
                f"format {text!r}: the time %{{{argument}}}t is not supported; use %t, %{{msec}}t or %{{usec}}t"
            )
        return "msec"
    if argument and letter in _APACHE_NAMED:
        return _APACHE_NAMED[letter] + re.sub(r"\W", "_", argument).lower()
    return _APACHE_LETTERS.get(letter, letter)


def _format(text: str, pieces: list[tuple[str, str]], tail: str) -> LogFormat:
    if not pieces:
        raise ReplayError(
            f"format {text!r} has no fields; write variables of nginx like $remote_addr, or fields of Apache like %h"
        )
    pattern, names = "", []
    for index, (before, name) in enumerate(pieces):
        after = pieces[index + 1][0] if index + 1 < len(pieces) else tail
        is_last = index + 1 == len(pieces)
        if not after and not is_last:
            raise ReplayError(
                f"format {text!r}: there must be a separator between {name} and {pieces[index + 1][1]}"
            )
        pattern += re.escape(before) + f"({_until(after)})"
        names.append(name if name not in names else f"{name}_{index + 1}")
    return _text_format("custom", re.compile(pattern + re.escape(tail)), tuple(names))


def _until(after: str) -> str:
    if not after:
        return ".*"
    return _QUOTED if after[0] == '"' else f"[^{re.escape(after[0])}]*"
