"""The server's log."""

from __future__ import annotations

import logging
import sys
import time

from headgate.observe import RedactingFilter

AUDIT = "headgate.audit"
"""The logger of resets and of refused tokens."""

STRANGER = "stranger"
"""The attribute of audit records about callers without a valid token: the address and the problem."""

MOST_ALIKE = 10
"""Records of one kind that are logged in a period."""

MOST_KINDS = 200
"""Kinds that are counted in a period, to bound the memory; further unauthenticated callers are counted together."""

PERIOD = 60.0


class SparingFilter(logging.Filter):
    """Limits the records of one kind per minute, and adds the number of suppressed records to the next one.

    Requests cause some records, and a client must not be able to fill a disk. Records are of one kind if they come from
    the same line of code and are about the same unauthenticated caller, so that records of one kind never hide others.
    Audit records about callers with a valid token are always logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}
        """Start of the period of a kind, and the number of its records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        stranger = getattr(record, STRANGER, "")
        if record.name == AUDIT and not stranger:
            return True
        now = time.monotonic()
        kind = (record.pathname, record.lineno, stranger)
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            self._forget_old(now)
            if len(self._kinds) >= MOST_KINDS:
                kind = (record.pathname, record.lineno, "")
        began, seen = self._kinds.get(kind, (now, 0))
        if now - began >= PERIOD:
            if seen > MOST_ALIKE:
                record.msg = f"{record.getMessage()} ({seen - MOST_ALIKE} more like this were not logged)"
                record.args = None
            began, seen = now, 0
        self._kinds[kind] = began, seen + 1
        return seen < MOST_ALIKE

    def _forget_old(self, now: float) -> None:
        self._kinds = {kind: state for kind, state in self._kinds.items() if now - state[0] < PERIOD}


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
    # Uvicorn's messages about its start and stop would repeat ours.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
