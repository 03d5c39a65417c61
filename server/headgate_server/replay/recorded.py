"""What Headgate records of its own decisions: one JSON object to a line, which this module writes and reads.

    {"headgate": 1, "at": 1700000000000000, "limiter": "api", "key": "alice", "cost": 1, "tier": null, "allowed": true}

`at` is in microseconds since the epoch. A key of bytes is `{"hex": "…"}`. A key with scopes is in `keys` instead, by scope.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headgate.keys import Key, PlainKey
from headgate_server.replay.errors import BadLine
from headgate_server.replay.expressions import Getter, Row
from headgate_server.replay.formats import unknown_field

VERSION = 1
_FIELDS = ("limiter", "key", "cost", "tier", "allowed", "operation")


def record_line(
    at: int, limiter: str, operation: str, key: Key | None, cost: int, tier: str | None, allowed: bool
) -> str:
    """Return a decision as a line, without its end."""
    line: dict[str, Any] = {"headgate": VERSION, "at": at, "limiter": limiter, "operation": operation}
    if isinstance(key, Mapping):
        line["keys"] = {scope: _written(part) for scope, part in key.items()}
    elif key is not None:
        line["key"] = _written(key)
    return json.dumps(line | {"cost": cost, "tier": tier, "allowed": allowed}, separators=(",", ":"))


class RecordedFormat:
    """Lines that Headgate has recorded."""

    name = "headgate"

    @staticmethod
    def fits(row: object) -> bool:
        """Return whether a line looks like one of these."""
        return isinstance(row, dict) and "headgate" in row and "at" in row

    def read(self, line: str) -> Row:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise BadLine("not JSON") from None
        if not self.fits(row) or row["headgate"] != VERSION:
            raise BadLine("not a line that Headgate has recorded")
        return row

    def time(self) -> Callable[[Row], object]:
        return lambda row: row["at"]

    def getter(self, name: str) -> Getter:
        if name not in _FIELDS:
            raise unknown_field(name, _FIELDS, self.name)

        def get(row: Row) -> str | None:
            value = key_of(row) if name == "key" else row.get(name)
            return None if value is None else str(value)

        return get


def key_of(row: Row) -> Key | None:
    """Return the key of a recorded line.

    Raises:
        BadLine: It has one that cannot be read.
    """
    try:
        if "keys" in row:
            return {scope: _read(part) for scope, part in row["keys"].items()}
        return _read(row["key"]) if "key" in row else None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadLine("a key that cannot be read") from None


def _written(part: PlainKey) -> str | dict[str, str]:
    return part if isinstance(part, str) else {"hex": part.hex()}


def _read(part: object) -> PlainKey:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        return bytes.fromhex(part["hex"])
    raise TypeError
