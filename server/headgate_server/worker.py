"""One of several processes that share a port; `headgate_server.supervisor` starts it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

logger = logging.getLogger("headgate.server")

READY = b"ready\n"


class Worker:
    """The worker that this process is.

    Args:
        listener: The shared listening socket.
        parent: A connection to the parent process; it ends with that process.
        folder: A folder that the workers share, for figures and metrics.
        name: The name of this worker.
    """

    def __init__(self, listener: socket.socket, parent: socket.socket, folder: Path, name: str) -> None:
        self.listener = listener
        self.folder = folder
        self.name = name
        self._parent = parent
        self._is_orphan = False

    def report_ready(self) -> None:
        """Tell the parent that requests are answered from now on, and stop when the parent ends."""
        # The parent sends nothing, so only the end of the connection can be read.
        asyncio.get_running_loop().add_reader(self._parent, self._stop)
        with suppress(OSError):  # the parent has ended, and the reader will be called
            self._parent.send(READY)

    def _stop(self) -> None:
        logger.error("the parent process has ended, so this worker stops")
        self._is_orphan = True
        asyncio.get_running_loop().remove_reader(self._parent)
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Delete the shared folder if the parent can no longer do it."""
        if self._is_orphan:
            shutil.rmtree(self.folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Run a worker, and return the exit code.

    Args:
        arguments: The function that serves, as `package.module:function`; the file descriptors of the listening socket and
            of the connection to the parent; the shared folder; the worker's name; and arguments of the function.
    """
    function, listener, parent, folder, name, *rest = arguments
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the application handles it
    worker = Worker(
        socket.socket(fileno=int(listener)), socket.socket(fileno=int(parent)), Path(folder), name
    )
    try:
        exit_code: int = resolve_name(function)(worker, *rest)
    finally:
        worker.close()
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
