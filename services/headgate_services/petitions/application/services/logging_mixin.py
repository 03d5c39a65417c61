"""Structured log lines with the component that wrote them."""

from __future__ import annotations

from typing import Any

import structlog


class LoggingMixin:
    """Provides a service with `self._log`, whose lines carry the service's component."""

    _log: Any

    def _init_logger(self, component: str) -> None:
        """Create the logger; call this in `__init__`."""
        # A lazy logger: the configuration at the time of each line applies.
        self._log = structlog.get_logger(component=component)
