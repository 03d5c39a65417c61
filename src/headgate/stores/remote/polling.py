"""Waiting for a single socket."""

from __future__ import annotations

import select


class Poller:
    """Waits for one socket."""

    def __init__(self, fileno: int) -> None:
        self._fileno = fileno
        self._poll = self._new(select.POLLIN) if hasattr(select, "poll") else None  # not on Windows

    def wait(self, seconds: float, *, for_writing: bool = False) -> bool:
        """Wait up to `seconds`; return whether the socket can be read, or written if that is requested."""
        seconds = max(0.0, seconds)
        if self._poll is None:
            writing = [self._fileno] if for_writing else []
            return any(select.select([self._fileno], writing, [], seconds))
        if for_writing:
            return bool(self._new(select.POLLIN | select.POLLOUT).poll(seconds * 1000))
        try:
            return bool(self._poll.poll(seconds * 1000))
        except RuntimeError:  # another thread waits with it
            return bool(self._new(select.POLLIN).poll(seconds * 1000))

    def _new(self, events: int) -> select.poll:
        poll = select.poll()
        poll.register(self._fileno, events)
        return poll
