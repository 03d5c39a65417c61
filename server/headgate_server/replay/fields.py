"""Fields of a log line: the few names that work with every format, and the format type.

A format reads one line at a time and knows nothing of files and policies. Besides the common names below, a field has the
name that the log gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headgate_server.replay.errors import ReplayError
from headgate_server.replay.expressions import Getter, Row, first_of

ALIASES: Mapping[str, tuple[str, ...]] = {
    "time": (
        *("StartUTC", "StartLocal", "time", "timestamp", "@timestamp", "ts", "msec", "time_iso8601"),
        *("time_local", "start_time", "START_TIME", "datetime", "date"),
    ),
    "client": (
        *("client", "remote_addr", "client_ip", "remote_ip", "clientip", "client_addr", "ip", "remote"),
        *("request.client_ip", "request.remote_ip", "request.remote_addr", "ClientHost"),
        *("downstream_remote_address_without_port", "downstream_remote_address", "DOWNSTREAM_REMOTE_ADDRESS"),
    ),
    "user": ("user", "remote_user", "user_id", "username", "ClientUsername"),
    "method": (
        *("method", "request_method", "verb", "http_method", "request.method", "RequestMethod", ":method"),
    ),
    "path": ("x-envoy-original-path", "path", "request_path", "uri", ":path"),
    "query": ("query", "args", "query_string"),
    "target": (
        *("target", "request_uri", "uri", "url", "request.uri", "RequestPath"),
        *("x-envoy-original-path", "path", ":path"),
    ),
    "host": (
        *("host", "http_host", "server_name", "authority", "request.host", "RequestHost", ":authority"),
    ),
    "status": ("status", "status_code", "response_code", "response", "DownstreamStatus"),
    "agent": (
        *("agent", "user_agent", "http_user_agent", "userAgent", "user-agent"),
        *("request.headers.User-Agent", "request_User-Agent"),
    ),
    "bytes": (*("bytes", "size", "body_bytes_sent", "bytes_sent", "response_size", "DownstreamContentSize"),),
}
"""By common name, the names that logs use for it; a line's first match counts."""

Value = Callable[[Row], object]
"""Returns a field of a line as the line has it."""


@dataclass(frozen=True, slots=True)
class LogFormat:
    """One way to write a log.

    Attributes:
        name: The name of the format in reports.
        read: Parses a line; raises BadLine if it is not written in this format.
        own: Returns how to get a field by the name that the log gives it, or `None` if no line can have it.
        names: The fields of every line, for error messages; empty if lines differ.
        time_name: The field with the time, instead of the known names.
    """

    name: str
    read: Callable[[str], Row]
    own: Callable[[str], Value | None]
    names: Sequence[str] = ()
    time_name: str | None = None

    def time(self) -> Value:
        """Return the function that gets the time of a line, as it is written.

        Raises:
            ReplayError: No field is known as the time.
        """
        names = ALIASES["time"] if self.time_name is None else (self.time_name,)
        found = [value for value in map(self.own, names) if value is not None]
        if not found:
            raise ReplayError(
                f"the format has no time: name the field with --time, or use $time_local, $time_iso8601 or $msec of "
                f"nginx, or %t of Apache. There is {', '.join(self.names)}"
            )
        return first_of(found)

    def getter(self, name: str) -> Getter:
        """Return the function that gets a field of a line as text, or `None` if it is missing.

        Raises:
            ReplayError: No line of this format can have it.
        """
        getters = list(self._getters(name))
        if not getters:
            usable = [common for common in ALIASES if common != "time" and any(self._getters(common))]
            known = ", ".join(dict.fromkeys([*usable, *self.names]))
            raise ReplayError(f"there is no field {name!r} in this log ({self.name}); it has {known}")
        return first_of(getters)

    def _getters(self, name: str) -> Iterator[Getter]:
        for alias in dict.fromkeys((*ALIASES.get(name, ()), name)):
            value = self.own(alias)
            if value is not None:
                yield _part_of_target(name, _as_text(value)) if name == "path" else _as_text(value)
        if name in ("path", "query"):
            yield from (_part_of_target(name, target) for target in self._getters("target"))
        if name in ("method", "target") and (request := self.own("request")) is not None:
            yield _part_of_request(name, _as_text(request))


def _as_text(value_of: Value) -> Getter:
    """Return a field as text. Empty text and `-` mean that it is missing; of an array, the first entry counts."""

    def get(row: Row) -> str | None:
        value = value_of(row)
        if isinstance(value, str):
            return None if not value or value == "-" else value
        if isinstance(value, list):
            value = value[0] if value else None
        if value is None or isinstance(value, dict | list):
            return None
        return ("true" if value else "false") if isinstance(value, bool) else str(value)

    return get


def _part_of_target(name: str, target: Getter) -> Getter:
    """Return how to get `path` or `query` from a target such as `/index.html?page=2`."""
    is_path = name == "path"

    def get(row: Row) -> str | None:
        text = target(row)
        if text is None:
            return None
        path, _, query = text.partition("?")
        return path if is_path else query or None

    return get


def _part_of_request(name: str, request: Getter) -> Getter:
    """Return how to get `method` or `target` from a request line such as `GET /index.html HTTP/1.1`."""
    index = 0 if name == "method" else 1

    def get(row: Row) -> str | None:
        words = (request(row) or "").split(" ", 2)
        return words[index] if len(words) > 1 and words[index] not in ("", "-") else None

    return get
