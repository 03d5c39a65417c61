"""Errors of a log or of one line."""

from __future__ import annotations

from headgate import ConfigError


class ReplayError(ConfigError):
    """The log cannot be replayed with these options; the message contains a suggestion."""


class BadLine(Exception):
    """An invalid line. It is counted and shown in the report.

    Args:
        reason: The reason in a few words, without parts of the line, because lines are counted by reason.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
