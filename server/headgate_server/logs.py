"""The server's log."""

from __future__ import annotations

import logging
import sys
import time

from headgate.observe import RedactingFilter

AUDIT = "headgate.audit"
"""The logger of resets and of refused tokens."""

MOST_ALIKE = 10
"""Records of one kind that are logged in a period."""

PERIOD = 60.0


class SparingFilter(logging.Filter):
    """Lets only so many records of one kind through per minute; the next one that passes says how many did not.

    Requests cause some of them, and a client must not be able to fill a disk. Records are of one kind if they come from
    the same line of code, so there are few kinds. What callers with the right to do so have done is always logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int], tuple[float, int]] = {}
        """When the period of a kind began, and how many records it has had."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        if record.name == AUDIT and record.levelno < logging.WARNING:
            return True
        kind, now = (record.pathname, record.lineno), time.monotonic()
        began, seen = self._kinds.get(kind, (now, 0))
        if now - began >= PERIOD:
            if seen > MOST_ALIKE:
                record.msg = f"{record.getMessage()} ({seen - MOST_ALIKE} more like this were not logged)"
                record.args = None
            began, seen = now, 0
        self._kinds[kind] = began, seen + 1
        return seen < MOST_ALIKE


def log_to_stderr(who: str = "") -> None:
    """Log to standard error, credentials masked, unless the caller has set up a log."""
    if logging.getLogger().handlers:
        return
    prefix = f"{who}: " if who else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s %(name)s: {prefix}%(message)s"))
    handler.addFilter(SparingFilter())
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # What uvicorn says about its own coming and going is said better by us.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
