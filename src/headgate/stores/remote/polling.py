"""Waiting for a socket, and for nothing else."""

from __future__ import annotations

import select


def wait_for(fileno: int, seconds: float, *, for_writing: bool = False) -> bool:
    """Return whether there is something to read, or room to write if that is wanted, within so many seconds."""
    if not hasattr(select, "poll"):  # on Windows
        return any(select.select([fileno], [fileno] if for_writing else [], [], max(0.0, seconds)))
    # One for each time: two threads may wait for the same socket, but not by the same object.
    poll = select.poll()
    poll.register(fileno, select.POLLIN | select.POLLOUT if for_writing else select.POLLIN)
    return bool(poll.poll(max(0.0, seconds * 1000)))
