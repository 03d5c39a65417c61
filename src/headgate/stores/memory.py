"""The memory store: exact and fast, but not shared or durable.

The counters are in `headgate.stores.counters`; this module has the public class and the notes.
"""

from __future__ import annotations

from heapq import heappop, heappush

from headgate._checks import check_count
from headgate._fork import watch
from headgate.clock import Clock, SteadyClock, check_clock
from headgate.errors import StoreError
from headgate.quota import MAX_UNITS
from headgate.rules import Rule
from headgate.stores.base import AsyncGate, AsyncNotes, Closing, Gate, Guarantees, HeldInForks, check_note
from headgate.stores.counters import Counters, ImmediateGate, MemoryGate, PenaltyGate
from headgate.stores.penalties import has_penalty

DEFAULT_MAX_KEYS = 1_000_000
DEFAULT_MAX_NOTES = 200_000
_DROPPED_PER_NEW_NOTE = 2


class MemoryStore(Closing):
    """Counts in this process's memory.

    Args:
        max_keys: Maximum number of states of all rules; beyond it, new keys share an overflow state.
        clock: The clock; by default the monotonic clock, so that changes of the machine's time have no effect.
        max_notes: Maximum number of notes. Live notes are never dropped: beyond it, new notes raise `StoreError`.
    """

    guarantees = Guarantees(may_lose="everything when the process ends; each process counts separately")
    remote = False
    has_rules = False

    def __init__(
        self,
        *,
        max_keys: int = DEFAULT_MAX_KEYS,
        clock: Clock | None = None,
        max_notes: int = DEFAULT_MAX_NOTES,
    ) -> None:
        for name, most in (("max_keys", max_keys), ("max_notes", max_notes)):
            check_count(name, most, 1, MAX_UNITS)
        self.max_keys = max_keys
        self.max_notes = max_notes
        self.clock: Clock = check_clock(clock) or SteadyClock()
        self._counters = Counters(self.clock, max_keys)
        self._notes = Notes(self._counters, max_notes)
        self._forks = HeldInForks()
        watch(self)

    @property
    def overflowed(self) -> int:
        """Number of calls that were counted in an overflow state."""
        return self._counters.overflowed

    @property
    def notes(self) -> AsyncNotes:
        """The store itself."""
        return self

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        gate = PenaltyGate if has_penalty(rules) else MemoryGate
        return gate(self._counters, limiter, rules)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        return ImmediateGate(self.bind(limiter, rules))

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        """See `AsyncNotes.note`.

        Raises:
            StoreError: There are `max_notes` live notes already.
        """
        lasting = check_note(name, text, seconds, replaces)
        return self._counters.alone(self._notes.add, name, text, lasting, replaces)

    async def get_note(self, name: str) -> str | None:
        """See `AsyncNotes.get_note`."""
        return self._counters.alone(self._notes.get, name)

    def close(self) -> None:
        """Delete all counts and notes."""
        self._counters.alone(self._clear)

    def _clear(self) -> None:
        self._notes.clear()
        self._counters.clear()

    async def aclose(self) -> None:
        """Delete all counts and notes."""
        self.close()

    def __len__(self) -> int:
        """Return the number of states, including expired states that were not removed yet."""
        return self._counters.keys

    # A fork during a call of another thread would leave the lock locked in the child, and a state half written. So the lock
    # is held during a fork. The forking thread may itself be inside a call, in a signal handler; then both processes
    # continue that call.

    def before_fork(self) -> None:
        self._forks.before(self._counters.lock)

    def after_fork_in_parent(self) -> None:
        self._forks.after_in_parent(self._counters.lock)

    def after_fork_in_child(self) -> None:
        self._counters.after_fork_in_child(self._forks)


class Notes:
    """The notes of a store by name. The caller holds the store's lock."""

    def __init__(self, counters: Counters, max_notes: int) -> None:
        self._now = counters.now
        self._max_notes = max_notes
        self._by_name: dict[str, tuple[int, str]] = {}  # expiry and text
        self._expiring: list[tuple[int, str]] = []  # a heap of expiries and names

    def __len__(self) -> int:
        return len(self._by_name)

    def clear(self) -> None:
        """Delete all notes."""
        self._by_name.clear()
        self._expiring.clear()

    def get(self, name: str) -> str | None:
        expires, text = self._by_name.get(name, (0, None))
        return text if expires > self._now() else None

    def add(self, name: str, text: str, lasting: int, replaces: str | None) -> str:
        """Keep a text under a name, unless a text other than `replaces` is kept there, and return the kept text."""
        now = self._now()
        self._drop_expired(now)
        expires, kept = self._by_name.get(name, (0, text))
        if expires > now and kept not in (text, replaces):
            return kept
        if name not in self._by_name and len(self._by_name) >= self._max_notes:
            raise StoreError(
                f"the memory store keeps {self._max_notes} notes already and none has expired; "
                f"create it with a higher max_notes=, or use a store outside of this process, like 'sqlite:///limits.db'"
            )
        self._by_name[name] = max(expires, now + lasting), text
        if expires < now + lasting:
            heappush(self._expiring, (now + lasting, name))
        return text

    def _drop_expired(self, now: int) -> None:
        """Drop a few expired notes: more than one per new note, so that they do not accumulate."""
        for _ in range(_DROPPED_PER_NEW_NOTE):
            if not self._expiring or self._expiring[0][0] > now:
                return
            expired = heappop(self._expiring)
            if self._by_name.get(expired[1], expired)[0] == expired[0]:  # not extended since
                self._by_name.pop(expired[1], None)
