"""The lock of the memory store where it is compiled: what `threading.RLock` does, for less than its two calls cost.

While a thread holds Python's global lock (GIL), no other thread and no signal handler runs, and compiled code lets go of it
only where it calls Python. So whether the lock is free can be looked up and the lock be taken in one step, without an
operation of the system's. Plain Python has no such steps and uses `threading.RLock`; so does this lock on a Python without
a global lock.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

IS_FREE_THREADED: bool = "free-threading" in sys.version


class CallLock:
    """A reentrant lock for compiled code.

    Attributes:
        owner: The thread that has taken it, if `depth` is not 0.
        depth: How often it has.
        waiting: How many threads wait.
        freed: What they wait for: a lock that each of them takes, and that is released whenever this one has become free.
        other: The lock that stands for this one where there is no global lock.
    """

    def __init__(self) -> None:
        self.owner: int = 0
        self.depth: int = 0
        self.waiting: int = 0
        self.freed = threading.Lock()
        self.freed.acquire()
        self.other: Any = threading.RLock() if IS_FREE_THREADED else None

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock, and return whether it was taken."""
        if self.other is not None:
            return self.other.acquire(blocking)  # type: ignore[no-any-return]
        me = PyThread_get_thread_ident()  # type: ignore[name-defined]  # noqa: F821  # in C
        if self.depth and self.owner != me:
            if not blocking:
                return False
            self.wait()
        self.owner = me
        self.depth += 1
        return True

    def wait(self) -> None:
        """Return when the lock is free. Another thread may take it before a woken one runs; that one waits again."""
        self.waiting += 1
        try:
            while self.depth:
                self.freed.acquire()  # a signal handler may run here, and raise
        finally:
            self.waiting -= 1

    def release(self) -> None:
        """Release the lock, once.

        Raises:
            RuntimeError: This thread has not taken it, as after a `before_fork` in which a signal handler raised.
        """
        if self.other is not None:
            self.other.release()
            return
        if not self._is_owned():
            raise RuntimeError("cannot release a lock that this thread has not taken")
        self.depth -= 1
        if self.waiting and not self.depth and self.freed.locked():
            self.freed.release()

    # As of `threading.RLock`:

    def _is_owned(self) -> bool:
        return self._recursion_count() > 0

    def _recursion_count(self) -> int:
        if self.other is not None:
            return self.other._recursion_count()  # type: ignore[no-any-return]
        is_own = self.owner == PyThread_get_thread_ident()  # type: ignore[name-defined]  # noqa: F821
        return self.depth if is_own else 0
