"""Log files, plain or compressed with gzip, and standard input.

Reading is lazy, and lines longer than `LONGEST_LINE` are never in memory as a whole.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from headgate_server.replay.errors import ReplayError

LONGEST_LINE = 2**20
"""Bytes; a longer line is invalid."""

STANDARD_INPUT = "-"

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 2**16


class LogSource:
    """The lines of one log.

    Args:
        name: The file, or `-` for standard input.

    Attributes:
        size: Bytes of the file, compressed or not; `None` for standard input.
        problem: The error that ended the reading early, or `None`.
    """

    def __init__(self, name: str) -> None:
        self.name = "standard input" if name == STANDARD_INPUT else name
        self.problem: str | None = None
        self.size: int | None = None
        self._raw: BinaryIO
        self._named = name != STANDARD_INPUT
        try:
            if self._named:
                self._raw = Path(name).open("rb")  # noqa: SIM115  # closed by `close`
                self.size = Path(name).stat().st_size
            else:
                self._raw = sys.stdin.buffer
        except OSError as error:
            raise ReplayError(f"{name}: {(error.strerror or str(error)).lower()}") from error

    @property
    def consumed(self) -> int:
        """Bytes read so far; 0 for standard input."""
        return self._raw.tell() if self._named and not self._raw.closed else 0

    def lines(self) -> Iterator[bytes | None]:
        """Yield the lines; `None` for a line that is too long.

        A corrupt file ends at the error, which is in `problem`.

        Raises:
            ReplayError: It is compressed with zstd.
        """
        stream = self._opened()
        readline = stream.readline
        try:
            while line := readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE and line[-1:] != b"\n":
                    while (rest := readline(_CHUNK)) and rest[-1:] != b"\n":
                        pass
                    yield None
                else:
                    yield line
        except (EOFError, OSError, zlib.error) as error:
            self.problem = f"{self.name}: reading ended early: {error}"

    def close(self) -> None:
        """Close the file."""
        if self._named:
            self._raw.close()

    def __enter__(self) -> LogSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _opened(self) -> IO[bytes]:
        peek = cast("Callable[[int], bytes]", self._raw.peek)  # type: ignore[attr-defined]  # both are buffered
        start = peek(4)[:4]
        if start.startswith(_GZIP):
            return cast("IO[bytes]", gzip.GzipFile(fileobj=self._raw))
        if start == _ZSTD:
            raise ReplayError(
                f"{self.name} is compressed with zstd: use `zstd -dc {self.name} | headgate replay -`"
            )
        return self._raw
