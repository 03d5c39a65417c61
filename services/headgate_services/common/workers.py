"""Detection of worker processes that count separately.

`headgate run` refuses `--workers` on a limit in memory. Other servers, such as `uvicorn --workers 2`, start workers
without this check. Workers have a parent process, a command line and an environment in common, so the first one binds
an abstract socket named after these, and the others find the name in use. The name is free again when the process ends.

Abstract sockets exist on Linux only. Processes that were started separately are not detected.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from hashlib import sha256

logger = logging.getLogger(__name__)

_claimed: set[str] = set()


def report_separate_counts(service: str, separate_counts: str) -> None:
    """Log an ERROR if another worker of this service counts in memory too.

    Args:
        service: The name of the service.
        separate_counts: Description of the counts in memory with the setting that moves them; empty to skip the check.
    """
    if separate_counts and not _is_first_worker(service):
        logger.error(
            "This is one of several worker processes, and each counts separately: "
            "together they admit a multiple of the limit: %s",
            separate_counts,
        )


def _is_first_worker(service: str) -> bool:
    if sys.platform != "linux":
        return True
    shared = repr((service, os.getppid(), sys.argv, sorted(os.environ.items())))
    name = f"\0headgate-{sha256(shared.encode()).hexdigest()}"
    if name in _claimed:  # this process runs the service twice
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(name)
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    claim.detach()  # open until the process ends
    _claimed.add(name)
    return True
