"""Structured logging with a component."""

from __future__ import annotations

from typing import Any

import structlog


class LoggingMixin:
    """Adds `self._log`, a logger with the service's component in every line."""

    _log: Any

    def _init_logger(self, component: str) -> None:
        """Create the logger; call this in `__init__`."""
        # A lazy logger, so that later changes of the configuration apply.
        self._log = structlog.get_logger(component=component)
