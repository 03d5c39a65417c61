"""Wait until a server has a certain state."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Return when a condition is true; fail if that takes much too long.

    A server that is busy or just starting may drop a connection: that is not true yet.
    """
    deadline = time.monotonic() + 60
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)
