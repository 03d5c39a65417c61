"""Server-sent events: the history first, then the newest tick and one a second.

Nothing is queued for anybody. A stream remembers the tick it has sent last and looks for later ones in the history, which is
bounded; the next piece is written only when the reader has taken enough of the last one. A reader that takes nothing for
`STALLED` seconds is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from headgate_server.problems import ApiProblem
from headgate_server.statistics import Statistics
from headgate_server.wire import Tick

STALLED = 10.0
"""Seconds without a byte taken after which a reader is gone, or as good as."""

MOST_STREAMS = 100
PIECE_BYTES = 65_536
"""How much of the history is written before the reader must have taken some of it."""

RETRY_MS = 1000
"""What a browser waits before it asks again."""


class Events:
    """The open streams of this process."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._open = 0
        self._has_ended = False
        self._new = asyncio.Event()
        self._latest: tuple[int, bytes] = (0, b"")
        """How many ticks there have been, and the last of them as an event."""

    def publish(self, tick: Tick) -> None:
        """Send a tick to everybody."""
        self._latest = self._latest[0] + 1, b"event: tick\ndata: %b\n\n" % msgspec.json.encode(tick)
        self._wake()

    def end(self) -> None:
        """End all streams, so that the server can stop; readers come back by themselves when there is one again."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._new.set()
        self._new = asyncio.Event()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Return the pieces of a response; it counts as open from now on, until it is closed.

        Raises:
            ApiProblem: 503 if there are too many streams already, or no more.
        """
        if self._has_ended:
            raise ApiProblem(503, "the server is about to stop", ((b"retry-after", b"1"),))
        if self._open >= MOST_STREAMS:
            raise ApiProblem(503, "there are too many streams of events", ((b"retry-after", b"5"),))
        pieces = self._pieces()
        await anext(pieces)  # it does not wait, so no other stream can be opened in between
        return pieces

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        self._open += 1
        try:
            yield b""
            new, (seen, event) = self._new, self._latest
            yield b"retry: %d\n\nevent: history\ndata: " % RETRY_MS
            whole = self._statistics.history.seconds.whole()  # one text for all who ask within a second
            for start in range(0, len(whole), PIECE_BYTES):
                yield whole[start : start + PIECE_BYTES]
            yield b"\n\n" + event
            while not self._has_ended:
                if self._latest[0] == seen:
                    await new.wait()
                # Who was too slow for some ticks goes on with the newest; totals are in every tick.
                new, (count, event) = self._new, self._latest
                if count != seen:
                    seen = count
                    yield event
        finally:
            self._open -= 1
