"""What was decided before now, in bounded memory: the last minutes by the second, an hour and a day in longer steps.

Seconds are written once, as they are sent, and are bounded in bytes: however many limiters there are and however many read,
there is one text of the last minutes. An hour and a day are rings of steps. All of it is kept in a small file, so that it
outlives workers and restarts. Limiters that decided nothing in a step take no room in it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from headgate_server.files import replace_file
from headgate_server.wire import Figures, HistoryAnswer, HistoryStep, Row, Second, Tick

logger = logging.getLogger("headgate.server")

SECONDS_KEPT = 300
MOST_BYTES = 1 << 20
"""Of the seconds as they are sent; of more, the oldest go."""

SAVE_EVERY = 10
"""Seconds between two writings of the file."""

_encode = msgspec.json.Encoder().encode


class _Time(Struct):
    """When a second was."""

    time: int


_decode_time = msgspec.json.Decoder(_Time).decode


class DecisionHistory:
    """What was decided until now; in memory only, until `keep_in` names a file."""

    def __init__(self) -> None:
        self.seconds = Seconds()
        """The last minutes."""
        self._rings = {"hour": Ring(step=60, length=60), "day": Ring(step=900, length=96)}
        self._file: Path | None = None
        self._is_failing = False

    def keep_in(self, file: Path) -> None:
        """Go on with what is in a file, if it is there, and save there from now on."""
        self._file = file
        try:
            kept = msgspec.msgpack.decode(file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("the figures of the last day in %s cannot be read: %s", file, error)
            return
        for name, ring in self._rings.items():
            ring.steps.extend(kept.rings.get(name, ()))
        self.seconds.extend(kept.seconds)

    def add(self, tick: Tick) -> None:
        """Take note of a second; of several, if none was taken note of since the last."""
        rows = rows_of(tick.limiters)
        self.seconds.add(tick.time, rows, tick.seconds)
        for ring in self._rings.values():
            ring.add(tick.time, rows, tick.seconds)

    def range(self, name: str) -> HistoryAnswer | None:
        """Return what is known of a range; `None` if there is no such range."""
        ring = self._rings.get(name)
        return None if ring is None else HistoryAnswer(ring.step, list(ring.steps))

    def save(self) -> None:
        """Write the file, if there is one. That it cannot be written is logged once, until it can."""
        if self._file is None:
            return
        kept = _Kept(list(self.seconds), {name: list(ring.steps) for name, ring in self._rings.items()})
        try:
            replace_file(self._file, msgspec.msgpack.encode(kept))
        except OSError as error:
            if not self._is_failing:
                logger.warning("the figures of the last day cannot be kept in %s: %s", self._file, error)
            self._is_failing = True
        else:
            self._is_failing = False


class _Kept(Struct):
    """What is in the file."""

    seconds: list[bytes]
    rings: dict[str, list[HistoryStep]]


class Seconds:
    """The last minutes, second by second, as they are sent."""

    def __init__(self) -> None:
        self._written: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._whole: bytes | None = None

    def __iter__(self) -> Iterator[bytes]:
        return (second for _, second in self._written)

    def add(self, time: int, rows: dict[str, Row], seconds: int) -> None:
        """Write one more, and forget the oldest if there are too many.

        Seconds in the future, left over from before the clock was set back, are dropped.
        """
        while self._written and self._written[-1][0] >= time:
            self._bytes -= len(self._written.pop()[1])
        self._append(time, _encode(Second(time, rows, seconds)))

    def extend(self, written: Iterable[bytes]) -> None:
        """Add seconds that were written already."""
        for second in written:
            self._append(_decode_time(second).time, second)

    def _append(self, time: int, second: bytes) -> None:
        self._written.append((time, second))
        self._bytes += len(second)
        while len(self._written) > SECONDS_KEPT or self._bytes > MOST_BYTES:
            self._bytes -= len(self._written.popleft()[1])
        self._whole = None

    def whole(self) -> bytes:
        """Return all of them as one JSON object; the same one until there is another second."""
        if self._whole is None:
            self._whole = b'{"ticks":[%b]}' % b",".join(self)
        return self._whole


class Ring:
    """So many steps of so many seconds, oldest first.

    Attributes:
        step: Seconds of each.
        steps: What was decided in each; one in which nothing was is missing.
    """

    def __init__(self, step: int, length: int) -> None:
        self.step = step
        self.steps: deque[HistoryStep] = deque(maxlen=length)
        self._span = step * length

    def add(self, time: int, rows: Mapping[str, Row], seconds: int) -> None:
        """Add the decisions of the last `seconds` to the step that contains `time`.

        Steps in the future, left over from before the clock was set back, are dropped.
        """
        begin = time - time % self.step
        while self.steps and self.steps[-1].time > begin:
            self.steps.pop()
        while self.steps and self.steps[0].time <= begin - self._span:
            self.steps.popleft()
        if not self.steps or self.steps[-1].time != begin:
            self.steps.append(HistoryStep(begin))
        latest = self.steps[-1]
        latest.seconds = min(self.step, latest.seconds + seconds)
        for name, row in rows.items():
            known = latest.limiters.get(name, (0, 0, 0, 0))
            latest.limiters[name] = tuple(map(int.__add__, known, row))  # type: ignore[assignment]


def rows_of(limiters: Mapping[str, Figures]) -> dict[str, Row]:
    """Return figures in short, of the limiters that have decided something."""
    rows = {name: msgspec.structs.astuple(figures) for name, figures in limiters.items()}
    return {name: row for name, row in rows.items() if any(row)}
