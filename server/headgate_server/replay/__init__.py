"""Replay of logged traffic through a policy, decided by the same functions as live traffic."""

from headgate_server.replay.errors import ReplayError
from headgate_server.replay.report import make_report, report_text
from headgate_server.replay.requests import DEFAULT_BUFFER, LogCounts, LoggedRequest, Selection, read_requests
from headgate_server.replay.simulation import Replayed, Simulation, needs_key, run, scopes_of
from headgate_server.replay.sources import LogSource

__all__ = [
    "DEFAULT_BUFFER",
    "LogCounts",
    "LogSource",
    "LoggedRequest",
    "ReplayError",
    "Replayed",
    "Selection",
    "Simulation",
    "make_report",
    "needs_key",
    "read_requests",
    "report_text",
    "run",
    "scopes_of",
]
