"""Replaying traffic against a policy: what it would have done, decided by what decides live."""

from headgate_server.replay.engine import ReplayedLimiter, needs_key, scopes_of
from headgate_server.replay.errors import ReplayError
from headgate_server.replay.report import as_json_text, make_report
from headgate_server.replay.requests import DEFAULT_BUFFER, LogCounts, LoggedRequest, Selection, read_requests
from headgate_server.replay.running import Replayed, Simulation, run
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
    "as_json_text",
    "make_report",
    "needs_key",
    "read_requests",
    "report_text",
    "run",
    "scopes_of",
]
