"""Replaying traffic against a policy: what it would have done, decided by what decides live."""

from headgate.replay.engine import ReplayedLimiter, needs_key, scopes_of
from headgate.replay.errors import ReplayError
from headgate.replay.requests import DEFAULT_BUFFER, LogCounts, LoggedRequest, Selection, read_requests
from headgate.replay.sources import LogSource

__all__ = [
    "DEFAULT_BUFFER",
    "LogCounts",
    "LogSource",
    "LoggedRequest",
    "ReplayError",
    "ReplayedLimiter",
    "Selection",
    "needs_key",
    "read_requests",
    "scopes_of",
]
