"""Server-sent events: the history first, then the newest tick and one a second.

There are no queues per client. A stream continues with the newest tick after the last one that it sent. The next piece
is written only when the client has read enough of the last one. A client that reads nothing for `STALLED` seconds is
dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from headgate_server.problems import ApiProblem
from headgate_server.statistics import Statistics
from headgate_server.wire import Tick

STALLED = 10.0
"""Seconds after which a client that reads nothing is dropped."""

MAX_STREAMS = 100
PIECE_BYTES = 65_536
"""Bytes of the history that are written at once."""

RETRY_MS = 1000
"""Milliseconds until a browser reconnects."""


class Events:
    """The open streams of this process."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._open = 0
        self._has_ended = False
        self._new = asyncio.Event()
        self._latest: tuple[int, bytes] = (0, b"")
        """The number of ticks, and the last one as an event."""

    def publish(self, tick: Tick) -> None:
        """Send a tick to all clients."""
        self._latest = self._latest[0] + 1, b"event: tick\ndata: %b\n\n" % msgspec.json.encode(tick)
        self._wake()

    def end(self) -> None:
        """End all streams, so that the server can stop; browsers reconnect by themselves."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._new.set()
        self._new = asyncio.Event()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Return the pieces of a stream; it counts as open until it is closed.

        Raises:
            ApiProblem: 503 if there are too many streams, or the server stops.
        """
        if self._has_ended:
            raise ApiProblem(503, "the server is stopping", ((b"retry-after", b"1"),))
        if self._open >= MAX_STREAMS:
            raise ApiProblem(503, "there are too many event streams", ((b"retry-after", b"5"),))
        pieces = self._pieces()
        await anext(pieces)  # runs without waiting, so that the stream is counted immediately
        return pieces

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        self._open += 1
        try:
            yield b""
            new, (seen, event) = self._new, self._latest
            yield b"retry: %d\n\nevent: history\ndata: " % RETRY_MS
            whole = self._statistics.history.seconds.whole()  # the same bytes for all clients within a second
            for start in range(0, len(whole), PIECE_BYTES):
                yield whole[start : start + PIECE_BYTES]
            yield b"\n\n" + event
            while not self._has_ended:
                if self._latest[0] == seen:
                    await new.wait()
                # A slow client continues with the newest tick; every tick has the totals.
                new, (count, event) = self._new, self._latest
                if count != seen:
                    seen = count
                    yield event
        finally:
            self._open -= 1
