"""Starting a service: settings, log, server; and one place where what keeps it from starting is said."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from headgate.errors import HeadgateError
from headgate.hosting import serve
from headgate.observe import RedactingFilter, redact


class Launch(NamedTuple):
    """A service that is ready to be served.

    Attributes:
        app: The ASGI application.
        host: Where to listen.
        port: Which port; 0 for any free one.
        access_log: Whether every request is a line in the log.
    """

    app: Any
    host: str
    port: int
    access_log: bool = True


def run(prepare: Callable[[], Launch]) -> int:
    """Serve what `prepare` makes until it is told to stop, and return the exit code.

    Whatever keeps it from starting is said on standard error, before the port is opened, without credentials.
    """
    try:
        launch = prepare()
    except HeadgateError as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    return serve(launch.app, launch.host, launch.port, access_log=launch.access_log)


def log_to_stderr(level: str) -> None:
    """Log to standard error, everybody's credentials removed; the level is ours, and does not make libraries chatty."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    set_up_log(handler, level)


def set_up_log(handler: logging.Handler, level: str) -> None:
    """Send our lines of this level and above, and the warnings of others, to a handler, credentials removed."""
    handler.addFilter(RedactingFilter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("headgate").setLevel(level)
    logging.getLogger("uvicorn").setLevel(max(logging.INFO, logging.getLevelName(level)))
