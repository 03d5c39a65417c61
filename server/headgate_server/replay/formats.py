"""Log formats: how a line becomes fields.

A format reads one line at a time and knows nothing of files, policies or what the fields are for. Every format knows the
same few names, so that an expression works with all of them: `time`, `client`, `user`, `method`, `path` (without the query),
`query`, `target` (with it), `host`, `status`, `agent`, `bytes`. Besides, a field has the name that the log gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headgate_server.replay.errors import ReplayError
from headgate_server.replay.expressions import Getter, Row

COMMON_NAMES = (
    "time",
    "client",
    "user",
    "method",
    "path",
    "query",
    "target",
    "host",
    "status",
    "agent",
    "bytes",
)

Aliases = Mapping[str, tuple[str, ...]]
"""By common name, the names that a log may have for it, the best one first."""


class LogFormat(Protocol):
    """One way to write a log."""

    name: str

    def read(self, line: str) -> Row:
        """Return the line as fields.

        Raises:
            BadLine: It is not written in this format.
        """

    def time(self) -> Callable[[Row], object]:
        """Return what gets the time of a line, as it is written.

        Raises:
            ReplayError: Lines of this format have none that is known as such.
        """

    def getter(self, name: str) -> Getter:
        """Return what gets a field of a line: text, or `None` if it is missing.

        Raises:
            ReplayError: No line of this format can have it.
        """


def present(value: str | None) -> str | None:
    """Return a field's text; `None` if it is empty, or `-`, which is how logs write that there is none."""
    return None if not value or value == "-" else value


def of_target(name: str, target: Getter) -> Getter:
    """Return what gets `path`, `query` or `target` where the log has only the whole target."""
    if name == "target":
        return target
    is_path = name == "path"

    def get(row: Row) -> str | None:
        text = target(row)
        if text is None:
            return None
        path, _, query = text.partition("?")
        return path if is_path else query or None

    return get


def of_request(name: str, request: Getter) -> Getter:
    """Return what gets `method` or `target` of a request line, as in `GET /index.html HTTP/1.1`."""
    index = 0 if name == "method" else 1

    def get(row: Row) -> str | None:
        words = (request(row) or "").split(" ", 2)
        return present(words[index]) if len(words) > 1 else None

    return get


def unknown_field(name: str, names: Sequence[str], format_name: str) -> ReplayError:
    """Return the error for a field that lines of a format do not have."""
    known = ", ".join(dict.fromkeys(names))
    return ReplayError(f"there is no field {name!r} in this log ({format_name}); it has {known}")
