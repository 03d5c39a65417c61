"""One of several processes that share a port; started by `headgate_server.supervisor`, not by people."""

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

from headgate import HeadgateError
from headgate_server.app import App
from headgate_server.factory import open_app
from headgate_server.http_server import run
from headgate_server.logs import log_to_stderr
from headgate_server.statistics import SharedFolder
from headgate_server.supervisor import READY, private_limiters

logger = logging.getLogger("headgate.server")


def main(arguments: Sequence[str]) -> int:
    """Serve on an inherited socket until a signal stops it; return the exit code.

    Args:
        arguments: The policy file, the socket's number, the folder for figures, the worker's name.
    """
    config, descriptor, folder, name = arguments
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the file is about to be read anyway
    log_to_stderr(f"worker {name}")
    try:
        app = open_app(config, shared_folder=SharedFolder(Path(folder), name))
    except HeadgateError as error:
        print(f"headgate: {error}", file=sys.stderr)
        return 1
    app.live.on_change(lambda: _warn_of_private(app))
    parent = Parent()
    run(app, socket.socket(fileno=int(descriptor)), parent.report_ready, shares_listener=True)
    if parent.is_gone:
        shutil.rmtree(folder, ignore_errors=True)  # the parent would have done it
    return 0


def _warn_of_private(app: App) -> None:
    """Say which limiters of a new policy the workers no longer count together; the old ones had none."""
    private = private_limiters(app.live.policy)
    if private:
        logger.error(
            "in memory, and so in each worker for itself, now count: %s; give them a shared store",
            ", ".join(private),
        )


class Parent:
    """The parent process: it is notified when this worker serves, and when it ends the worker stops."""

    def __init__(self) -> None:
        self.is_gone = False

    def report_ready(self) -> None:
        """Tell the parent that requests are answered from now on."""
        # Nothing is ever sent to a worker, so what there is to read is the end.
        asyncio.get_running_loop().add_reader(sys.stdin, self._follow)
        with suppress(BrokenPipeError):  # then there is the end to read
            os.write(sys.stdout.fileno(), READY)  # past the buffer, which would be written again at exit

    def _follow(self) -> None:
        logger.error("the parent process has ended, so this worker stops")
        self.is_gone = True
        asyncio.get_running_loop().remove_reader(sys.stdin)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
