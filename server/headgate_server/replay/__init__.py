"""Replay of logged traffic against a policy, decided by the functions that decide live."""

from headgate_server.replay.errors import ReplayError
from headgate_server.replay.limiter import ReplayedLimiter, needs_key, scopes_of
from headgate_server.replay.report import make_report
from headgate_server.replay.requests import DEFAULT_BUFFER, LogCounts, LoggedRequest, Selection, read_requests
from headgate_server.replay.simulation import Replayed, Simulation, run
from headgate_server.replay.sources import LogSource
from headgate_server.replay.text import report_text

__all__ = [
    "DEFAULT_BUFFER",
    "LogCounts",
    "LogSource",
    "LoggedRequest",
    "ReplayError",
    "Replayed",
    "ReplayedLimiter",
    "Selection",
    "Simulation",
    "make_report",
    "needs_key",
    "read_requests",
    "report_text",
    "run",
    "scopes_of",
]
