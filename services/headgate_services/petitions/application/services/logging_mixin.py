"""Structured log lines that say which part of the service they are from."""

from __future__ import annotations

from typing import Any, ClassVar

import structlog


class LoggingMixin:
    """Gives a service a logger whose lines carry its component."""

    component: ClassVar[str]

    @property
    def log(self) -> Any:
        """The logger. Fetched anew each time, so that whatever is configured now applies."""
        return structlog.get_logger().bind(component=self.component)
