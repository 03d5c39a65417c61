"""Settings that cannot work, and lists in one variable."""

from __future__ import annotations

from headgate import ConfigError


class SettingsError(ConfigError):
    """The service cannot run as it is configured; each line of the message begins with the variable's name."""


def split_list(text: str) -> tuple[str, ...]:
    """Return the entries of a list with commas, without white space around them; empty ones are skipped."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())
