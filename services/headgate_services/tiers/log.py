"""The one door through which this service's lines reach the log, credentials removed."""

from __future__ import annotations

import logging

from headgate import Limiter, token_bucket
from headgate.observe import redact

logger = logging.getLogger("headgate_services.tiers")


def _redact_redis_credentials(text: str) -> str:
    """Return the text with every credential masked: `redis://***@host:6379/0`.

    Whatever the scheme and its case, also in queries (`?password=…`), also with an `@` inside of the password.
    """
    return redact(text)


def log(level: int, message: str, *arguments: object) -> None:
    """Write a line."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", _redact_redis_credentials(message % arguments))


class LimitedLog:
    """Lines that every request might cause: only so many are written, and the next one says how many were not."""

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
