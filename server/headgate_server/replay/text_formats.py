r"""Lines of text: the common and combined formats, and formats as nginx and Apache are configured with.

A format becomes a pattern once. Each field ends where the text after it begins; inside quotes a backslash escapes. So a line
is read in time proportional to its length, whatever is in it.
"""

from __future__ import annotations

import re

from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.expressions import Row
from headgate_server.replay.fields import LogFormat, Value

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
"""The names that nginx has for fields of Apache; others keep their letter as their name."""
_APACHE_NAMED = {"i": "http_", "o": "sent_http_", "e": "env_", "C": "cookie_", "n": "note_", "a": "peer_"}
_APACHE_EPOCHS = {"%s"} | {
    moment + unit for moment in ("", "begin:", "end:") for unit in ("sec", "msec", "usec")
}


def _text_format(
    name: str, pattern: re.Pattern[str], names: tuple[str, ...], *, whole_line: bool = True
) -> LogFormat:
    """Return the format of lines that a pattern splits into fields, with a group for each name."""
    match = pattern.fullmatch if whole_line else pattern.match

    def read(line: str) -> Row:
        found = match(line)
        if found is None:
            raise BadLine(f"not a line of the format {name}")
        return found.groups()

    def own(field: str) -> Value | None:
        if field not in names:
            return None
        index = names.index(field)
        return lambda row: row[index]

    return LogFormat(name, read, own, names)


def combined() -> LogFormat:
    """Return the combined format of nginx and Apache; also the common format, and what stands behind either."""
    return _text_format("combined", _COMBINED, _COMBINED_NAMES, whole_line=False)


def nginx(text: str) -> LogFormat:
    """Return a format as `log_format` of nginx has it: `$remote_addr [$time_local] "$request"`.

    Raises:
        ReplayError: It cannot be read back.
    """
    pieces: list[tuple[str, str]] = []
    end = 0
    for found in _NGINX.finditer(text):
        pieces.append((text[end : found.start()], found[1] or found[2]))
        end = found.end()
    return _format(text, pieces, text[end:])


def apache(text: str) -> LogFormat:
    r"""Return a format as `LogFormat` of Apache has it: `%h %t \"%r\" %>s`.

    Raises:
        ReplayError: It cannot be read back.
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
        if name == "time_local" and not plain.endswith("["):  # %t writes its brackets itself
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
                f"format {text!r}: the time %{{{argument}}}t cannot be read; use %t, %{{msec}}t or %{{usec}}t"
            )
        return "msec"
    if argument and letter in _APACHE_NAMED:
        return _APACHE_NAMED[letter] + re.sub(r"\W", "_", argument).lower()
    return _APACHE_LETTERS.get(letter, letter)


def _format(text: str, pieces: list[tuple[str, str]], tail: str) -> LogFormat:
    if not pieces:
        raise ReplayError(
            f"format {text!r} has no fields; write nginx variables like $remote_addr, or Apache's like %h"
        )
    pattern, names = "", []
    for index, (before, name) in enumerate(pieces):
        after = pieces[index + 1][0] if index + 1 < len(pieces) else tail
        is_last = index + 1 == len(pieces)
        if not after and not is_last:
            raise ReplayError(
                f"format {text!r}: nothing stands between {name} and {pieces[index + 1][1]}, so their values run together"
            )
        pattern += re.escape(before) + f"({_until(after)})"
        names.append(name if name not in names else f"{name}_{index + 1}")
    return _text_format("of your own", re.compile(pattern + re.escape(tail)), tuple(names))


def _until(after: str) -> str:
    if not after:
        return ".*"
    return _QUOTED if after[0] == '"' else f"[^{re.escape(after[0])}]*"
