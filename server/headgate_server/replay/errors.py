"""What goes wrong with a log, as a whole or in one line."""

from __future__ import annotations

from headgate import ConfigError


class ReplayError(ConfigError):
    """The log cannot be replayed as asked; the message says what to write instead."""


class BadLine(Exception):
    """One line cannot be read. It is counted and shown in the report, and reading goes on.

    Args:
        reason: Why, in a few words; lines are counted by it, so it must not contain the line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
