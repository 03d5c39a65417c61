"""The server's log."""

from __future__ import annotations

import logging
import sys

from headgate.observe import RedactingFilter


def log_to_stderr(who: str = "") -> None:
    """Log to standard error, credentials masked, unless whoever called has set up a log."""
    if logging.getLogger().handlers:
        return
    prefix = f"{who}: " if who else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # What uvicorn says about its own coming and going is said better by us.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
