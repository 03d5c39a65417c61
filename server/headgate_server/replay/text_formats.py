r"""Lines of text: the common and combined formats, and formats as nginx and Apache are configured with.

A format becomes a pattern once. Each field ends where the text after it begins; inside quotes a backslash escapes. So a line
is read in time proportional to its length, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.expressions import Getter, Row, first_of
from headgate_server.replay.formats import Aliases, of_request, of_target, present, unknown_field

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

_ALIASES: Aliases = {
    "time": ("msec", "time_iso8601", "time_local"),
    "client": ("remote_addr",),
    "user": ("remote_user",),
    "method": ("request_method",),
    "target": ("request_uri",),
    "path": ("uri",),
    "query": ("args", "query_string"),
    "host": ("host", "http_host", "server_name"),
    "status": ("status",),
    "agent": ("http_user_agent",),
    "bytes": ("body_bytes_sent", "bytes_sent"),
}

_NGINX = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_APACHE = re.compile(r"%(?:[!\d,]*)[<>]?(?:\{([^}]*)\})?(\^?[a-zA-Z]+|%)")
_APACHE_LETTERS = {
    "h": "remote_addr",
    "a": "remote_addr",
    "A": "server_addr",
    "l": "ident",
    "u": "remote_user",
    "t": "time_local",
    "r": "request",
    "s": "status",
    "b": "body_bytes_sent",
    "B": "body_bytes_sent",
    "O": "bytes_sent",
    "I": "request_length",
    "D": "duration",
    "T": "request_time",
    "m": "request_method",
    "U": "uri",
    "q": "query_string",
    "H": "server_protocol",
    "v": "server_name",
    "V": "host",
    "p": "server_port",
    "P": "pid",
    "L": "log_id",
    "k": "keepalives",
    "X": "connection_status",
    "f": "filename",
    "R": "handler",
    "S": "bytes_both",
}
_APACHE_NAMED = {"i": "http_", "o": "sent_http_", "e": "env_", "C": "cookie_", "n": "note_", "a": "peer_"}
_APACHE_EPOCHS = {"%s"} | {
    moment + unit for moment in ("", "begin:", "end:") for unit in ("sec", "msec", "usec")
}


class TextFormat:
    """Lines that a pattern reads into named fields.

    Args:
        name: What the format is called in reports.
        pattern: The pattern, with a group per field.
        names: The fields, in order.
        whole_line: Whether nothing may follow.
    """

    def __init__(
        self, name: str, pattern: re.Pattern[str], names: tuple[str, ...], *, whole_line: bool
    ) -> None:
        self.name = name
        self._names = names
        self._match = pattern.fullmatch if whole_line else pattern.match

    def read(self, line: str) -> Row:
        found = self._match(line)
        if found is None:
            raise BadLine(f"not a line of the format {self.name}")
        return found.groups()

    def time(self) -> Callable[[Row], object]:
        name = next((name for name in _ALIASES["time"] if name in self._names), None)
        if name is None:
            raise ReplayError(
                "the format has no time; it needs $time_local, $time_iso8601 or $msec of nginx, or %t of Apache"
            )
        index = self._names.index(name)
        return lambda row: row[index]

    def getter(self, name: str) -> Getter:
        if name in self._names:
            return self._at(self._names.index(name))
        own = [self._at(self._names.index(alias)) for alias in _ALIASES.get(name, ()) if alias in self._names]
        own += self._made(name)
        if not own:
            usable = [alias for alias in _ALIASES if alias != "time" and self._has(alias)]
            raise unknown_field(name, [*usable, *self._names], self.name)
        return first_of(own)

    def _made(self, name: str) -> list[Getter]:
        """Return getters of what is a part of another field."""
        has_request = "request" in self._names
        if name in ("method", "target") and has_request:
            return [of_request(name, self.getter("request"))]
        if name in ("path", "query") and (has_request or "request_uri" in self._names):
            return [of_target(name, self.getter("target"))]
        return []

    def _has(self, alias: str) -> bool:
        return any(name in self._names for name in _ALIASES[alias]) or bool(self._made(alias))

    def _at(self, index: int) -> Getter:
        return lambda row: present(row[index])


def combined() -> TextFormat:
    """Return the combined format of nginx and Apache; also the common format, and what stands behind either."""
    return TextFormat("combined", _COMBINED, _COMBINED_NAMES, whole_line=False)


def nginx(text: str) -> TextFormat:
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


def apache(text: str) -> TextFormat:
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
    name = _APACHE_LETTERS.get(letter)
    if name is None:
        raise ReplayError(f"format {text!r}: %{letter} is not known")
    return name


def _format(text: str, pieces: list[tuple[str, str]], tail: str) -> TextFormat:
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
    return TextFormat("of your own", re.compile(pattern + re.escape(tail)), tuple(names), whole_line=True)


def _until(after: str) -> str:
    if not after:
        return ".*"
    return _QUOTED if after[0] == '"' else f"[^{re.escape(after[0])}]*"
