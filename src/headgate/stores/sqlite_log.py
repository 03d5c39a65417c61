"""Sliding windows and logs with many entries in SQLite, at a cost per hit that does not grow with them.

A state of up to `LONGEST_STATE` numbers is one row, read and written as a whole. A larger one keeps only its newest entries
in that row, the *tail*. The older ones are in *chunks*, rows of a table of their own. A hit reads one chunk at most, the one
whose entries are expiring, and writes none unless a chunk fills up or has expired.

`algorithms/sliding_window.py` says what the entries mean, and decides. `LargeLog.digest` returns a short state in place of
the whole log, and the pure functions run on that, on the tail, or on one chunk. What they drop at a write is dropped here by
raising the *floor*: entries up to that index do not exist any more, though some may still stand in the oldest chunk.

The row of a large log begins with a tag of one byte, which no other state has. Then come 64-bit integers: birth, floor,
number of chunks, units in them, and the tail. A trigger in the file deletes the chunks with the row.
"""

from __future__ import annotations

import sqlite3
import struct
from bisect import bisect_right

from headgate.algorithms import Algorithm, Receipt, SlidingWindow, State
from headgate.errors import StoreConflict

LONGEST_STATE = 1 + 2 * 128
"""How many numbers a state may have to be kept in one row: a birth and 128 entries."""

PER_CHUNK = 48
"""Entries. SQLite keeps a row of up to about 1,000 bytes in one place; a larger one takes a page of its own besides."""

SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS headgate_chunks (
        id BLOB NOT NULL,        -- that of the state
        start INTEGER NOT NULL,  -- its entries have this index or a later one, those of older chunks an earlier one
        units INTEGER NOT NULL,  -- of all its entries
        entries BLOB NOT NULL,   -- index and units of each, in order: 64-bit integers, little-endian
        PRIMARY KEY (id, start)
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER IF NOT EXISTS headgate_states_delete AFTER DELETE ON headgate_states
    BEGIN
        DELETE FROM headgate_chunks WHERE id = OLD.id;
    END
    """,
)
# The newest chunk that begins at or before an index, and the units of all before it.
_BORDER = """
    SELECT start, entries, (
        SELECT coalesce(sum(units), 0) FROM headgate_chunks WHERE id = :row AND start < border.start
    ) FROM headgate_chunks AS border WHERE id = :row AND start <= :floor ORDER BY start DESC LIMIT 1
"""
_LATER = "SELECT start, units, entries FROM headgate_chunks WHERE id = ? AND start > ? ORDER BY start"
_AT = "SELECT start, entries FROM headgate_chunks WHERE id = ? AND start <= ? ORDER BY start DESC LIMIT 1"
_WRITE = "INSERT OR REPLACE INTO headgate_chunks VALUES (?, ?, ?, ?)"
_DELETE = "DELETE FROM headgate_chunks WHERE id = ? AND start = ?"
_DELETE_OLDER = "DELETE FROM headgate_chunks WHERE id = ? AND start < ?"
_DELETE_ALL = "DELETE FROM headgate_chunks WHERE id = ?"

_TAG = b"L"
_HEADER = 4
NO_STATE = "SQLite: the row {!r} of headgate_states does not hold a state"
_LAST = 2**63 - 1
"""An index after every other."""


class LargeLog:
    """What one call has read of a large log.

    The call looks (`digest`), and may then write: `charge` after a look at the same time, or `refund`. Both write chunks;
    the row is for the caller to write, from `pack`.

    Attributes:
        birth: That of the state.
        tail: Index and units of the newest entries; if it is empty after a refund, so is the log.
    """

    def __init__(
        self, connection: sqlite3.Connection, row: bytes, window: SlidingWindow, header: State, tail: State
    ) -> None:
        self._connection = connection
        self._row = row
        self._window = window
        self.birth, self._floor, self._chunks, self._units = header
        self.tail = tail
        # What a look finds: chunks before this index have expired, with so many units, and so have so many in the next one,
        # of which these entries are left.
        self._expired_before = 0
        self._expired_units = 0
        self._expired_in_border = 0
        self._border: State = ()

    @classmethod
    def load(cls, connection: sqlite3.Connection, row: bytes, window: Algorithm, packed: bytes) -> LargeLog:
        """Return the log of which this was kept in the row of its state.

        Raises:
            StoreConflict: It is none.
        """
        try:
            numbers = unpack(packed[1:])
        except (struct.error, TypeError) as error:
            raise StoreConflict(NO_STATE.format(row)) from error
        tail = numbers[_HEADER:]
        if packed[:1] != _TAG or not tail or len(tail) % 2 or not isinstance(window, SlidingWindow):
            raise StoreConflict(NO_STATE.format(row))
        return cls(connection, row, window, numbers[:_HEADER], tail)

    @classmethod
    def of(cls, connection: sqlite3.Connection, row: bytes, window: SlidingWindow, state: State) -> LargeLog:
        """Return the log that takes the place of a state that has become too large for its row."""
        log = cls(connection, row, window, (state[0], state[1] - 1, 0, 0), state[1:])
        log._move_to_chunks()
        return log

    def pack(self) -> bytes:
        """Return what is to be kept in the row: with no chunk left, a state like any other."""
        if not self._chunks:
            return pack((self.birth, *self.tail))
        return _TAG + pack((self.birth, self._floor, self._chunks, self._units, *self.tail))

    def fresh_at(self) -> int:
        """See `Algorithm.fresh_at`."""
        return self._window.fresh_at(self.tail)

    def digest(self, now: int, cost: int) -> State:
        """Return a short state that the window decides, at this time and cost, as it would decide the whole log."""
        window, newest = self._window, self.tail[-2]
        expired = (max(now, newest * window.width) - window.lifetime) // window.width
        if newest <= expired:
            return self.birth, newest, self.tail[-1]
        self._look(max(expired, self._floor))
        in_chunks = self._units - self._expired_units - self._expired_in_border
        count = in_chunks + sum(_after(self._floor, self.tail)[1::2])
        missing = count + cost - window.limit if cost else 0
        # With a limit of 0 more would have to go than there are: no waiting helps, so there is nothing to look for.
        oldest = self._oldest(missing) if 0 < missing <= count else ()
        rest = count - sum(oldest[1::2])
        return (self.birth, *oldest, newest, rest) if rest else (self.birth, *oldest)

    def charge(self, now: int, cost: int, birth: int) -> LargeLog | State:
        """Count units after a look at the same time, and return what is to be kept."""
        after = self._window.record((self.birth, *self.tail), now, cost, birth)
        assert after is not None
        if after[0] != self.birth:
            self._connection.execute(_DELETE_ALL, (self._row,))
            return after
        if self._expired_units:
            dropped = self._connection.execute(_DELETE_OLDER, (self._row, self._expired_before))
            self._chunks -= dropped.rowcount
            self._units -= self._expired_units
        self.tail = after[1:]
        if self._chunks:
            self._move_to_chunks()
        return self

    def whole(self) -> State:
        """Return the state with all entries that exist."""
        chunks = self._connection.execute(_LATER, (self._row, -1))
        entries = [number for _, _, packed in chunks for number in self._unpack(packed)]
        return self.birth, *_after(self._floor, (*entries, *self.tail))

    def replaced_by(self, state: State | None) -> State | None:
        """Drop what is not in the row, and return a state that takes the place of the whole log."""
        self._connection.execute(_DELETE_ALL, (self._row,))
        return state

    def refund(self, receipt: Receipt, cost: int, now: int) -> bool:
        """Give back up to `cost` of the receipt's units, and return whether there were any to give back."""
        birth, index, _ = receipt
        if birth != self.birth or index <= self._floor:
            return False
        if index < self.tail[0]:
            return self._refund_in_chunk(receipt, cost, now)
        after = self._window.refund((birth, *self.tail), receipt, cost, now) or (birth,)
        is_changed = after[1:] != self.tail
        self.tail = after[1:]
        if not self.tail and self._chunks:
            self._move_to_tail()
        return is_changed

    def _refund_in_chunk(self, receipt: Receipt, cost: int, now: int) -> bool:
        birth, index, _ = receipt
        chunk = self._chunk_at(index)
        if chunk is None:  # all that was in it has been given back
            return False
        start, before = chunk
        after = (self._window.refund((birth, *before), receipt, cost, now) or (birth,))[1:]
        if after == before:
            return False
        self._units -= sum(before[1::2]) - sum(after[1::2])
        if after:
            self._write(start, after)
        else:
            self._delete(start)
        return True

    def _look(self, floor: int) -> None:
        """Find out what has expired, up to an index. Nothing is written."""
        self._floor = floor
        border = self._connection.execute(_BORDER, {"row": self._row, "floor": floor}).fetchone()
        if border is None:
            return
        start, packed, older = border
        entries = self._unpack(packed)
        units = sum(entries[1::2])
        self._border = _after(floor, entries)
        if self._border:
            self._expired_before, self._expired_units = start, older
            self._expired_in_border = units - sum(self._border[1::2])
        else:
            self._expired_before, self._expired_units = start + 1, older + units

    def _oldest(self, units: int) -> State:
        """Return the oldest live entries that free so many units; a chunk that goes as a whole is one entry."""
        units -= sum(self._border[1::2])
        if units <= 0:
            return self._border
        oldest = list(self._border)
        for start, in_chunk, packed in self._connection.execute(_LATER, (self._row, self._floor)):
            if in_chunk >= units:
                return (*oldest, *self._unpack(packed))
            oldest += start, in_chunk
            units -= in_chunk
        return (*oldest, *_after(self._floor, self.tail))

    def _move_to_chunks(self) -> None:
        """Make as many whole chunks of the tail as there are; the newest entry stays in it."""
        size = 2 * PER_CHUNK
        end = (len(self.tail) - 1) // size * size
        for place in range(0, end, size):
            entries = self.tail[place : place + size]
            self._write(entries[0], entries)
            self._chunks += 1
            self._units += sum(entries[1::2])
        self.tail = self.tail[end:]

    def _move_to_tail(self) -> None:
        """Make a tail of the newest chunk's entries; if all of them are dropped, there is no older chunk."""
        chunk = self._chunk_at(_LAST)
        if chunk is None:
            raise StoreConflict(f"SQLite: headgate_chunks lacks entries of the row {self._row!r}")
        start, entries = chunk
        self._units -= sum(entries[1::2])
        self._delete(start)
        self.tail = _after(self._floor, entries)

    def _chunk_at(self, index: int) -> tuple[int, State] | None:
        """Return start and entries of the chunk in which an entry of this index would be."""
        found = self._connection.execute(_AT, (self._row, index)).fetchone()
        return None if found is None else (found[0], self._unpack(found[1]))

    def _unpack(self, packed: bytes) -> State:
        try:
            return unpack(packed)
        except (struct.error, TypeError) as error:
            raise StoreConflict(f"SQLite: headgate_chunks has no entries in the row {self._row!r}") from error

    def _write(self, start: int, entries: State) -> None:
        self._connection.execute(_WRITE, (self._row, start, sum(entries[1::2]), pack(entries)))

    def _delete(self, start: int) -> None:
        self._connection.execute(_DELETE, (self._row, start))
        self._chunks -= 1


def pack(numbers: State) -> bytes:
    """Return numbers as they are stored."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def unpack(packed: bytes) -> State:
    """Return the numbers that are stored so.

    Raises:
        struct.error: They are none.
        TypeError: They are none.
    """
    return struct.unpack(f"<{len(packed) // 8}q", packed)


def _after(index: int, entries: State) -> State:
    """Return the entries after an index."""
    return entries[2 * bisect_right(entries[::2], index) :]
