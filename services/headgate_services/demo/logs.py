"""One form for the log lines of all programs in this process, the petitions service's structured ones included."""

from __future__ import annotations

import logging
from typing import Any

from headgate import Limiter
from headgate_services.petitions.logs import configure_logging


def log_problems() -> None:
    """Log problems only to standard error, each in one line, and repeated ones only a few times a minute."""
    configure_logging("WARNING", _problem)
    # A service's warnings are mostly about refusals, which are the demo's point.
    logging.getLogger("headgate_services").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_NotAgain())


def log_everything(level: str) -> None:
    """Log our lines of this level and above, and the warnings of libraries, to standard error."""
    configure_logging(level, _line)


def _problem(logger: Any, method: str, event: Any) -> str:
    """Return a problem in one line: of a traceback, only what it ends with."""
    reasons = [_last_line(str(part)) for part in (event["event"], event.get("exception")) if part]
    return f"headgate demo: {event['logger']}: {': '.join(reasons)}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _line(logger: Any, method: str, event: Any) -> str:
    head = (
        f"{event.pop('timestamp')} {event.pop('level').upper()} {event.pop('logger')}: {event.pop('event')}"
    )
    traceback = event.pop("exception", None)
    details = "".join(f" {name}={value}" for name, value in event.items())
    return head + details + (f"\n{traceback}" if traceback else "")


class _NotAgain(logging.Filter):
    """Keeps what is logged by the same line of code to a few a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._limiter = Limiter("2/minute")

    def filter(self, record: logging.LogRecord) -> bool:
        return bool(self._limiter.hit(f"{record.pathname}:{record.lineno}"))
