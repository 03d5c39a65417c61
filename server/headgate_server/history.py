"""History of decisions in bounded memory: the last minutes by second, the last hour and day in longer steps.

Seconds are encoded once, for all clients, and bounded in bytes. The hour and the day are rings of steps. The history is
saved in a small file, so that it survives workers and restarts. Limiters without decisions in a step take no space in it.
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
MAX_BYTES = 1 << 20
"""Bytes of all encoded seconds; beyond it, the oldest are dropped."""

SAVE_EVERY = 10
"""Seconds between two writes of the file."""

_encode = msgspec.json.Encoder().encode


class _Time(Struct):
    """The time of an encoded second."""

    time: int


_decode_time = msgspec.json.Decoder(_Time).decode


class DecisionHistory:
    """The history of decisions; in memory only, until `keep_in` names a file."""

    def __init__(self) -> None:
        self.seconds = Seconds()
        """The last minutes by second."""
        self._rings = {"hour": Ring(step=60, length=60), "day": Ring(step=900, length=96)}
        self._file: Path | None = None
        self._is_failing = False

    def keep_in(self, file: Path) -> None:
        """Load the history from a file if it exists, and save it there from now on."""
        self._file = file
        try:
            kept = msgspec.msgpack.decode(file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("cannot read the history in %s: %s", file, error)
            return
        for name, ring in self._rings.items():
            ring.steps.extend(kept.rings.get(name, ()))
        self.seconds.extend(kept.seconds)

    def add(self, tick: Tick) -> None:
        """Add the decisions since the last tick."""
        rows = rows_of(tick.limiters)
        self.seconds.add(tick.time, rows, tick.seconds)
        for ring in self._rings.values():
            ring.add(tick.time, rows, tick.seconds)

    def range(self, name: str) -> HistoryAnswer | None:
        """Return the history of a range; `None` if the range is unknown."""
        ring = self._rings.get(name)
        return None if ring is None else HistoryAnswer(ring.step, list(ring.steps))

    def save(self) -> None:
        """Write the file, if there is one; failures in a row are logged once."""
        if self._file is None:
            return
        kept = _Kept(list(self.seconds), {name: list(ring.steps) for name, ring in self._rings.items()})
        try:
            replace_file(self._file, msgspec.msgpack.encode(kept))
        except OSError as error:
            if not self._is_failing:
                logger.warning("cannot write the history to %s: %s", self._file, error)
            self._is_failing = True
        else:
            self._is_failing = False


class _Kept(Struct):
    """The content of the file."""

    seconds: list[bytes]
    rings: dict[str, list[HistoryStep]]


class Seconds:
    """The last minutes by second, encoded."""

    def __init__(self) -> None:
        self._encoded_seconds: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._whole: bytes | None = None

    def __iter__(self) -> Iterator[bytes]:
        return (second for _, second in self._encoded_seconds)

    def add(self, time: int, rows: dict[str, Row], seconds: int) -> None:
        """Add a second, and drop the oldest if there are too many.

        Seconds in the future, left over from before the clock was set back, are dropped.
        """
        while self._encoded_seconds and self._encoded_seconds[-1][0] >= time:
            self._bytes -= len(self._encoded_seconds.pop()[1])
        self._append(time, _encode(Second(time, rows, seconds)))

    def extend(self, encoded: Iterable[bytes]) -> None:
        """Add encoded seconds."""
        for second in encoded:
            self._append(_decode_time(second).time, second)

    def _append(self, time: int, second: bytes) -> None:
        self._encoded_seconds.append((time, second))
        self._bytes += len(second)
        while len(self._encoded_seconds) > SECONDS_KEPT or self._bytes > MAX_BYTES:
            self._bytes -= len(self._encoded_seconds.popleft()[1])
        self._whole = None

    def whole(self) -> bytes:
        """Return all seconds as one JSON object, which is cached until the next second."""
        if self._whole is None:
            self._whole = b'{"ticks":[%b]}' % b",".join(self)
        return self._whole


class Ring:
    """A number of steps of equal length, oldest first.

    Attributes:
        step: Length of a step in seconds.
        steps: The decisions of each step; steps without ticks are missing.
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
    """Return the short form of figures, of limiters with decisions only."""
    rows = {name: msgspec.structs.astuple(figures) for name, figures in limiters.items()}
    return {name: row for name, row in rows.items() if any(row)}
