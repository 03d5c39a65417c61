"""Logging as JSON on standard error."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from headgate_services.common.starting import set_up_log


def configure_logging(level: str, render: Processor | None = None) -> None:
    """Log our records of `level` and above, and warnings of other libraries, to standard error; by default as JSON."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=lambda *names: logging.getLogger("headgate_services.petitions"),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                render or structlog.processors.JSONRenderer(),
            ],
        )
    )
    set_up_log(handler, level)
