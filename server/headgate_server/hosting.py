"""Uvicorn, as everything of Headgate that speaks HTTP runs under it: the four services, the server and the demo.

A client's address is that of its connection. Uvicorn would take it from `X-Forwarded-For` if the connection comes from this
machine, so that every local client could choose its own; whose word is taken is for the applications to say, by
`headgate.http.Proxies`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

import uvicorn

__all__ = ["METRICS_FOLDER", "configuration", "exit_on_sigterm", "serve", "serve_with_workers"]

GRACE_SECONDS = 10
"""How long requests under way may take to finish when a program stops."""


METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder in which processes keep their metrics; `prometheus_client` reads it."""

_OURS: dict[str, Any] = {
    "lifespan": "on",
    "log_config": None,  # the program that starts it sets up the log
    "server_header": False,
    "proxy_headers": False,
    "timeout_graceful_shutdown": GRACE_SECONDS,
}


def configuration(app: Any, **options: Any) -> uvicorn.Config:
    """Return how an application is served; `options` are uvicorn's, and come before ours."""
    return uvicorn.Config(app, **{**_OURS, "access_log": False, **options})


def exit_on_sigterm() -> None:
    """Have SIGTERM end this process with the exit code 0, after all that is open has been closed.

    Uvicorn stops on this signal, and then raises it again for the handler that it found.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def serve(app: Any, host: str, port: int, *, access_log: bool = False) -> int:
    """Serve an application until SIGINT or SIGTERM, and return the exit code."""
    server = uvicorn.Server(configuration(app, host=host, port=port, access_log=access_log))
    exit_on_sigterm()
    server.run()
    return 0 if server.started else 3


def serve_with_workers(factory: str, host: str, port: int, workers: int, *, access_log: bool = False) -> int:
    """Serve with several processes that share a port, until SIGINT or SIGTERM; one that ends is replaced.

    Args:
        factory: What makes the application in each of them, as `package.module:function`.
        host: Where to listen.
        port: Which port; 0 for any free one.
        workers: How many processes.
        access_log: Whether every request is a line in the log.
    """
    with tempfile.TemporaryDirectory(prefix="headgate-metrics-", ignore_cleanup_errors=True) as folder:
        # Inherited by the workers, which write there what all of them show.
        os.environ[METRICS_FOLDER] = folder
        options = {**_OURS, "host": host, "port": port, "access_log": access_log}
        try:
            uvicorn.run(factory, factory=True, workers=workers, **options)
        finally:
            del os.environ[METRICS_FOLDER]
    return 0
