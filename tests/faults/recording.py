"""The history of one worker while it is written: a file in shared memory, so that `kill -9` loses nothing of it.

A call takes one slot. It is there before the call is made, with a start and no end, and gets its end with the answer.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from struct import Struct

from tests.faults.history import HistoryCall, VerdictSeen

OPERATIONS = ("", "hit", "check", "record", "hold", "settle", "confirm", "renew", "hits")
OUTCOMES = ("unknown", "admitted", "refused", "done", "nothing", "cancelled")
MOST_RULES = 2
SOLO = 1000
"""Numbers of keys from here on are of one worker alone."""

_BEGIN = Struct("<BHiiiq")  # limiter, key, cost, times, hold, start
_ANSWER = Struct("<BB")  # outcome, how many rules answered
_VERDICT = Struct("<?iiq")
_END = Struct("<q")
_BEGIN_AT, _ANSWER_AT = 1, 1 + _BEGIN.size
_VERDICTS_AT = _ANSWER_AT + _ANSWER.size
_END_AT = _VERDICTS_AT + MOST_RULES * _VERDICT.size
_SIZE = _END_AT + _END.size
_GAP = 256
"""So many empty slots in a row are behind the last call; a few may be before it, of threads that were just beginning."""


class Recorder:
    """Writes the calls of a worker; threads may share it."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.capacity = capacity
        with path.open("w+b") as file:
            file.truncate(capacity * _SIZE)
            self._memory = mmap.mmap(file.fileno(), capacity * _SIZE)
        self._numbers = count()

    def begin(
        self, operation: int, limiter: int, key: int, cost: int, start: int, hold: int = -1, times: int = 1
    ) -> int:
        """Note that a call begins, and return its number.

        Raises:
            IndexError: The file is full.
        """
        number = next(self._numbers)
        if number >= self.capacity:
            raise IndexError("the history is full")
        at = number * _SIZE
        _BEGIN.pack_into(self._memory, at + _BEGIN_AT, limiter, key, cost, times, hold, start)
        self._memory[at] = operation  # last: from here on there is a call
        return number

    def finish(self, number: int, outcome: int, end: int, verdicts: Sequence[Sequence[int | None]]) -> None:
        """Note what came of a call."""
        at = number * _SIZE
        for i, (allowed, limit, remaining, retry_us, *_) in enumerate(verdicts):
            retry = -1 if retry_us is None else retry_us
            _VERDICT.pack_into(
                self._memory, at + _VERDICTS_AT + i * _VERDICT.size, allowed, limit, remaining, retry
            )
        _ANSWER.pack_into(self._memory, at + _ANSWER_AT, outcome, len(verdicts))
        _END.pack_into(self._memory, at + _END_AT, end)

    def lower(self, number: int, cost: int, times: int) -> None:
        """Note that a call was about less than when it began."""
        at = number * _SIZE + _BEGIN_AT
        limiter, key, _, _, hold, start = _BEGIN.unpack_from(self._memory, at)
        _BEGIN.pack_into(self._memory, at, limiter, key, cost, times, hold, start)


def read_calls(
    path: Path, worker: int, limiters: Sequence[str], *, shared: bool = True
) -> Iterator[HistoryCall]:
    """Yield the calls that a worker has recorded; unless workers count together, its keys are all its own."""
    data = path.read_bytes()
    gap = 0
    for number, at in enumerate(range(0, len(data), _SIZE)):
        operation = OPERATIONS[data[at]]
        if not operation:
            gap += 1
            if gap == _GAP:
                return
            continue
        gap = 0
        limiter, key, cost, times, hold, start = _BEGIN.unpack_from(data, at + _BEGIN_AT)
        (end,) = _END.unpack_from(data, at + _END_AT)
        outcome, rules = _ANSWER.unpack_from(data, at + _ANSWER_AT) if end else (0, 0)
        verdicts = []
        for i in range(rules):
            allowed, limit, left, retry = _VERDICT.unpack_from(data, at + _VERDICTS_AT + i * _VERDICT.size)
            verdicts.append(VerdictSeen(allowed, limit, left, None if retry < 0 else retry))
        yield HistoryCall(
            worker,
            number,
            operation,
            limiters[limiter],
            f"k{key}" if shared and key < SOLO else f"w{worker}-{key}",
            cost,
            start,
            end or None,
            OUTCOMES[outcome],
            tuple(verdicts),
            None if hold < 0 else hold,
            times,
        )
