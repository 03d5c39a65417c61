"""Where lines come from: files, plain or compressed, and standard input.

Nothing is read further than it must be, and no line longer than `LONGEST_LINE` is ever held whole, whatever the file is.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from headgate_server.replay.errors import ReplayError

LONGEST_LINE = 2**20
"""Bytes; a longer line is counted as bad."""

STANDARD_INPUT = "-"

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 2**16
_PACKED = 2**11
"""Bytes of zstd at a time: they may become some ten thousand times as many."""


class LogSource:
    """The lines of one log.

    Args:
        name: The file, or `-` for standard input.

    Attributes:
        size: Bytes of the file, as it is; `None` if that is not known.
        problem: Why reading ended before the end; `None` if it did not.
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
        """Bytes of the file that were read so far; 0 if that cannot be known."""
        return self._raw.tell() if self._named and not self._raw.closed else 0

    def lines(self) -> Iterator[bytes | None]:
        """Yield the lines without their ends; `None` for one that is too long.

        A file that is broken in the middle ends there, and `problem` says so.

        Raises:
            ReplayError: It is compressed in a way that this installation cannot read.
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
        except Exception as error:
            if not _is_broken(error):
                raise
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
        peek = cast("Callable[[int], bytes]", self._raw.peek)  # type: ignore[attr-defined]  # buffered, both of them
        start = peek(4)[:4]
        if start.startswith(_GZIP):
            return cast("IO[bytes]", gzip.GzipFile(fileobj=self._raw))
        if start == _ZSTD:
            return _zstd(self._raw, self.name)
        return self._raw


def _zstd(raw: BinaryIO, name: str) -> IO[bytes]:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd

            return zstd.ZstdFile(raw)
        import zstandard
    except ModuleNotFoundError as error:  # a Python may have been built without it
        raise ReplayError(
            f"{name} is compressed with zstd, which needs the package 'zstandard' (Python 3.14 has its own): "
            f"pip install 'headgate-server[zstd]', or use `zstd -dc {name} | headgate replay -`"
        ) from error
    return io.BufferedReader(_ZstdStream(raw, zstandard.ZstdDecompressor().decompressobj), _CHUNK)


class _ZstdStream(io.RawIOBase):
    """Frames of zstd as one stream. The package's own reader takes a file that is cut off for one that is complete."""

    def __init__(self, raw: BinaryIO, new_frame: Callable[[], Any]) -> None:
        self._raw = raw
        self._new_frame = new_frame
        self._frame: Any = None
        self._rest = b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._out:
            packed = self._rest or self._raw.read(_PACKED)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it is cut off")
                return 0
            frame = self._frame = self._frame or self._new_frame()
            self._out = memoryview(frame.decompress(packed))
            self._rest = frame.unused_data if frame.eof else b""
            if frame.eof:
                self._frame = None
        size = min(len(into), len(self._out))
        into[:size] = self._out[:size]
        self._out = self._out[size:]
        return size


def _is_broken(error: Exception) -> bool:
    """Return whether an error means that the file is broken: those of zstd are known only where it is installed."""
    return isinstance(error, EOFError | OSError | zlib.error) or type(error).__name__ == "ZstdError"
