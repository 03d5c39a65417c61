"""Lines of JSON: Caddy, Traefik, Envoy, what Headgate records, and everybody's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from headgate_server.replay.errors import BadLine
from headgate_server.replay.expressions import Getter, Row, first_of
from headgate_server.replay.formats import (
    COMMON_NAMES,
    Aliases,
    of_request,
    of_target,
    present,
    unknown_field,
)

CADDY: Aliases = {
    "time": ("ts",),
    "client": ("request.client_ip", "request.remote_ip", "request.remote_addr"),
    "user": ("user_id",),
    "method": ("request.method",),
    "target": ("request.uri",),
    "host": ("request.host",),
    "status": ("status",),
    "agent": ("request.headers.User-Agent",),
    "bytes": ("size",),
}
TRAEFIK: Aliases = {
    "time": ("StartUTC", "StartLocal", "time"),
    "client": ("ClientHost",),
    "user": ("ClientUsername",),
    "method": ("RequestMethod",),
    "target": ("RequestPath",),
    "host": ("RequestHost",),
    "status": ("DownstreamStatus",),
    "agent": ("request_User-Agent",),
    "bytes": ("DownstreamContentSize",),
}
ENVOY: Aliases = {
    "time": ("start_time", "START_TIME"),
    "client": (
        "downstream_remote_address_without_port",
        "downstream_remote_address",
        "DOWNSTREAM_REMOTE_ADDRESS",
    ),
    "user": ("user",),
    "method": ("method", ":method"),
    "target": ("x-envoy-original-path", "path", ":path"),
    "host": ("authority", ":authority"),
    "status": ("response_code",),
    "agent": ("user_agent", "user-agent"),
    "bytes": ("bytes_sent",),
}
ANY: Aliases = {
    "time": (
        "time",
        "timestamp",
        "@timestamp",
        "ts",
        "time_iso8601",
        "time_local",
        "msec",
        "start_time",
        "datetime",
        "date",
        "when",
        "when_iso",
    ),
    "client": ("client", "remote_addr", "client_ip", "remote_ip", "clientip", "client_addr", "ip", "remote"),
    "user": ("user", "remote_user", "user_id", "username"),
    "method": ("method", "request_method", "verb", "http_method"),
    "target": ("target", "request_uri", "uri", "url"),
    "path": ("path", "request_path"),
    "query": ("query", "args", "query_string"),
    "host": ("host", "http_host", "server_name", "authority"),
    "status": ("status", "status_code", "response_code", "response"),
    "agent": ("agent", "user_agent", "http_user_agent", "userAgent"),
    "bytes": ("bytes", "size", "body_bytes_sent", "bytes_sent", "response_size"),
}
KINDS: Mapping[str, Aliases] = {"caddy": CADDY, "traefik": TRAEFIK, "envoy": ENVOY, "json": ANY}

_MARKS = (("caddy", ("ts", "request")), ("traefik", ("ClientHost",)), ("traefik", ("ClientAddr",)))
_ENVOY_MARKS = ("downstream_remote_address", "response_code", "upstream_host", "response_flags", "authority")


def kind_of(row: Mapping[str, object]) -> str:
    """Return the kind of log that a line looks like."""
    for kind, names in _MARKS:
        if all(name in row for name in names):
            return kind
    if "start_time" in row and sum(name in row for name in _ENVOY_MARKS) >= 2:
        return "envoy"
    return "json"


class JsonFormat:
    """Lines that are JSON objects.

    A name with dots leads into objects: `request.headers.User-Agent`. Of an array, the first entry counts.

    Args:
        kind: One of `KINDS`.
        time: The field with the time, instead of those that are known.
    """

    def __init__(self, kind: str, time: str | None = None) -> None:
        self.name = kind
        self._aliases = KINDS[kind]
        self._time = (time,) if time else self._aliases["time"]
        self._decode = json.JSONDecoder().decode

    def read(self, line: str) -> Row:
        try:
            row = self._decode(line)
        except (ValueError, RecursionError):
            raise BadLine("not JSON") from None
        if not isinstance(row, dict):
            raise BadLine("JSON, but no object")
        return row

    def time(self) -> Callable[[Row], object]:
        return first_of([_value(name) for name in self._time])

    def getter(self, name: str) -> Getter:
        getters = [_text(name)] if name not in COMMON_NAMES else []
        getters += [_text(alias) for alias in self._aliases.get(name, ())]
        if name in ("path", "query"):
            getters.append(of_target(name, self.getter("target")))
        if name in ("method", "target"):
            getters.append(of_request(name, _text("request")))
        if not getters:
            raise unknown_field(name, [*self._aliases, "and whatever the lines have"], self.name)
        return first_of(getters)


def _value(name: str) -> Callable[[Row], object]:
    """Return what gets a value by its name, or else by its path through objects."""
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


def _text(name: str) -> Getter:
    value_of = _value(name)

    def get(row: Row) -> str | None:
        value = value_of(row)
        if isinstance(value, list):
            value = value[0] if value else None
        if value is None or isinstance(value, dict | list):
            return None
        if isinstance(value, bool):
            return "true" if value else "false"
        return present(value if isinstance(value, str) else str(value))

    return get
