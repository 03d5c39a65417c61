"""Logging of this service, with credentials removed."""

from __future__ import annotations

import logging

from headgate import Limiter, token_bucket
from headgate.observe import redact

logger = logging.getLogger("headgate_services.tiers")


def _redact_redis_credentials(text: str) -> str:
    """Return the text with every credential masked: `redis://***@host:6379/0`.

    Works for every scheme, for queries (`?password=…`), and for passwords that contain an `@`.
    """
    return redact(text)


def log(level: int, message: str, *arguments: object) -> None:
    """Log a message without credentials."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", _redact_redis_credentials(message % arguments))


class LimitedLog:
    """A log with a rate limit, for messages that every request may cause; a message tells how many were dropped."""

    def __init__(self, rate: str = "10/minute") -> None:
        self._limiter = Limiter(token_bucket(rate))
        self._swallowed = 0

    def __call__(self, level: int, message: str, *arguments: object) -> None:
        if not logger.isEnabledFor(level):
            return
        if not self._limiter.hit("lines"):
            self._swallowed += 1
            return
        swallowed, self._swallowed = self._swallowed, 0
        note = f" (and {swallowed} such lines before)" if swallowed else ""
        log(level, message + "%s", *arguments, note)
