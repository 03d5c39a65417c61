"""Recorded decisions: a hook that appends every hit and hold to a file, and the parser of its lines.

    {"headgate": 1, "at": 1700000000000000, "limiter": "api", "key": "alice", "cost": 1, "tier": null, "allowed": true}

`at` is in microseconds since the epoch. A key of bytes is `{"hex": "…"}`. A key with scopes is in `keys` instead, by scope.

When the file reaches its maximum size or the disk is full, recording ends with a warning. Each line is one append, so the
workers of a server may share a file. Only the owner can read it. With `hash_keys` it contains digests instead of keys; they
cannot be traced back without the salt, which is in a file beside it and can be deleted.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headgate import ConfigError, Decision, Hook
from headgate.clock import Clock, WallClock
from headgate.costs import total
from headgate.keys import Key, PlainKey
from headgate.observe import Call
from headgate_server.replay.errors import BadLine

logger = logging.getLogger("headgate")

__all__ = ["DecisionRecorder"]

RECORDED = "headgate"
"""The name of the format."""
DEFAULT_BYTES = 100_000_000

_VERSION = 1
_RECORDED_OPERATIONS = ("hit", "hold")
_LOOK_EVERY = 256
"""Lines between two checks of the file's size, because other processes may also append to it."""
_SALT_BYTES = 32


class DecisionRecorder(Hook):
    """Hook that appends hits and holds, with their result, to a file.

    A hold is recorded with its initial cost. Settlements and calls of `record` are not recorded.

    Args:
        file: The file.
        max_bytes: Approximate maximum size of the file.
        hash_keys: Whether to record digests instead of keys.
        clock: The clock; by default the wall clock.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        max_bytes: int = DEFAULT_BYTES,
        hash_keys: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = WallClock() if clock is None else clock
        self._path = Path(file)
        self._max_bytes = max_bytes
        self._until_look = 0
        try:
            self._descriptor: int | None = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._salt = _salt_of(self._path) if hash_keys else None
        except OSError as error:
            raise ConfigError(f"decisions cannot be recorded: {error}") from error

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        """Append a line, unless the file or the disk is full."""
        if self._descriptor is None or call.operation not in _RECORDED_OPERATIONS:
            return
        if self._until_look == 0:
            if os.fstat(self._descriptor).st_size >= self._max_bytes:
                self._end(f"it has {self._max_bytes} bytes")
                return
            self._until_look = _LOOK_EVERY
        self._until_look -= 1
        key = call.key if self._salt is None else _hashed(call.key, self._salt)
        cost = total(call.cost)  # a replay has one cost for all rules
        line = record_line(
            self._clock.now_us(), call.limiter, call.operation, key, cost, call.tier, decision.allowed
        )
        try:
            os.write(self._descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._end(str(error))

    def close(self) -> None:
        """End recording."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _end(self, why: str) -> None:
        self.close()
        logger.warning(
            "decisions are no longer recorded to %s: %s; to continue, move the file and restart",
            self._path,
            why,
        )


def _hashed(key: Key | None, salt: bytes) -> Key | None:
    if isinstance(key, Mapping):
        return {scope: _digest(part, salt) for scope, part in key.items()}
    return None if key is None else _digest(key, salt)


def _digest(part: PlainKey, salt: bytes) -> str:
    kind, raw = (b"t", part.encode("utf-8", "surrogatepass")) if isinstance(part, str) else (b"b", part)
    return blake2b(kind + raw, digest_size=16, key=salt).hexdigest()


def _salt_of(file: Path) -> bytes:
    """Return the salt of a recording, the same for all processes that append to it."""
    path = file.with_name(f"{file.name}.salt")
    if not path.exists():
        # Written under another name first, so that other processes never read an incomplete salt.
        descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=path.name)
        with os.fdopen(descriptor, "wb") as new:
            new.write(secrets.token_bytes(_SALT_BYTES))
        with suppress(FileExistsError):  # another process was first; use its salt
            os.link(name, path)
        Path(name).unlink()
    return path.read_bytes()


def record_line(
    at: int, limiter: str, operation: str, key: Key | None, cost: int, tier: str | None, allowed: bool
) -> str:
    """Return a decision as a line, without the newline."""
    line: dict[str, Any] = {"headgate": _VERSION, "at": at, "limiter": limiter, "operation": operation}
    if isinstance(key, Mapping):
        line["keys"] = {scope: _written(part) for scope, part in key.items()}
    elif key is not None:
        line["key"] = _written(key)
    return json.dumps(line | {"cost": cost, "tier": tier, "allowed": allowed}, separators=(",", ":"))


def is_recorded(row: object) -> bool:
    """Return whether a JSON value looks like a recorded line."""
    return isinstance(row, dict) and "headgate" in row and "at" in row


def read_recorded(line: str) -> Any:
    """Return a recorded line as a JSON object.

    Raises:
        BadLine: It is not a recorded line.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("not JSON") from None
    if not is_recorded(row) or row["headgate"] != _VERSION:
        raise BadLine("not recorded by Headgate")
    return row


def key_of(row: Mapping[str, Any]) -> Key | None:
    """Return the key of a recorded line; `None` if it has none.

    Raises:
        BadLine: The key is invalid.
    """
    try:
        if "keys" in row:
            return {scope: _read(part) for scope, part in row["keys"].items()}
        return _read(row["key"]) if "key" in row else None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadLine("invalid key") from None


def _written(part: PlainKey) -> str | dict[str, str]:
    return part if isinstance(part, str) else {"hex": part.hex()}


def _read(part: object) -> PlainKey:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        return bytes.fromhex(part["hex"])
    raise TypeError
