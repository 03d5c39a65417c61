"""Fields of a log line: common names for every format, and the format type.

A format parses single lines. Besides the common names below, fields have their names in the log.
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
"""Names of a field in logs, by its common name, in the order of preference."""

Value = Callable[[Row], object]
"""Returns the unconverted value of a field."""


@dataclass(frozen=True, slots=True)
class LogFormat:
    """A log format.

    Attributes:
        name: The name of the format in reports.
        read: Parses a line; raises BadLine if it is invalid.
        own: Returns the getter of a field by its name in the log, or `None` if lines cannot have it.
        names: The fields of every line, for error messages; empty if lines differ.
        time_name: The field with the time, instead of the common names.
    """

    name: str
    read: Callable[[str], Row]
    own: Callable[[str], Value | None]
    names: Sequence[str] = ()
    time_name: str | None = None

    def time(self) -> Value:
        """Return the getter of the unconverted time.

        Raises:
            ReplayError: The format has no known time field.
        """
        names = ALIASES["time"] if self.time_name is None else (self.time_name,)
        found = [value for value in map(self.own, names) if value is not None]
        if not found:
            raise ReplayError(
                f"the format has no time; set its field with --time, or use $time_local, $time_iso8601 or $msec of "
                f"nginx, or %t of Apache. The fields are {', '.join(self.names)}"
            )
        return first_of(found)

    def getter(self, name: str) -> Getter:
        """Return the getter of a field as text, which returns `None` if the field is missing.

        Raises:
            ReplayError: Lines of this format cannot have the field.
        """
        getters = list(self._getters(name))
        if not getters:
            usable = [common for common in ALIASES if common != "time" and any(self._getters(common))]
            known = ", ".join(dict.fromkeys([*usable, *self.names]))
            raise ReplayError(f"unknown field {name!r} in this log ({self.name}); use one of {known}")
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
    """Return the getter of a field as text: missing if empty or `-`; of an array, the first entry."""

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
    """Return the getter of `path` or `query` from a target such as `/index.html?page=2`."""
    is_path = name == "path"

    def get(row: Row) -> str | None:
        text = target(row)
        if text is None:
            return None
        path, _, query = text.partition("?")
        return path if is_path else query or None

    return get


def _part_of_request(name: str, request: Getter) -> Getter:
    """Return the getter of `method` or `target` from a request line such as `GET /index.html HTTP/1.1`."""
    index = 0 if name == "method" else 1

    def get(row: Row) -> str | None:
        words = (request(row) or "").split(" ", 2)
        return words[index] if len(words) > 1 and words[index] not in ("", "-") else None

    return get
