"""Replaying traffic against a policy: what it would have done, decided by what decides live."""

from headgate.replay.engine import ReplayedLimiter, needs_key, scopes_of
from headgate.replay.errors import ReplayError
from headgate.replay.report import as_json_text, make_report
from headgate.replay.requests import DEFAULT_BUFFER, LogCounts, LoggedRequest, Selection, read_requests
from headgate.replay.running import Replayed, Simulation, run
from headgate.replay.sources import LogSource
from headgate.replay.text import report_text

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
