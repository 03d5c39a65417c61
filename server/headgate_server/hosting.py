"""Listening sockets, and uvicorn as the four services and the demo run it.

A client's address is that of its connection. By default uvicorn reads it from `X-Forwarded-For` if the connection comes from
this machine, so that every local client could choose its address. Applications decide which proxies to trust, with
`headgate.http.Proxies`.
"""

from __future__ import annotations

import errno
import signal
import socket
import sys
from typing import Any

import uvicorn

from headgate import ConfigError
from headgate_server.worker import Worker

__all__ = [
    "MAX_PORT",
    "METRICS_FOLDER",
    "PortTaken",
    "authority_of",
    "configuration",
    "exit_on_sigterm",
    "listen",
    "reserve",
    "serve",
    "serve_in_worker",
    "url_of",
]

GRACE_SECONDS = 10
"""Seconds for requests in progress when a program stops."""

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder of the metrics of several processes; `prometheus_client` reads it."""

BACKLOG = 2048

MAX_PORT = 65_535
"""The highest port."""


class PortTaken(ConfigError):
    """Another program listens on the port, or only root may."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: The address.
        port: The port; 0 for any free one.

    Raises:
        PortTaken: The port is not available.
        ConfigError: The address or port is not valid.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"cannot listen on {_authority(host, port)}: ports go from 0 to {MAX_PORT}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        code = error.errno if isinstance(error, OSError) else None
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (")[0].lower()
        kind = PortTaken if code in (errno.EADDRINUSE, errno.EACCES) else ConfigError
        raise kind(
            f"cannot listen on {_authority(host, port)}: {reason}; choose another port or host"
        ) from error


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that keeps an address for sockets of this user with `SO_REUSEPORT`; it does not listen.

    Raises:
        ConfigError: The address is not available.
    """
    with listen(host, port) as probe:  # refuses an address on which another program listens
        address, family = probe.getsockname(), probe.family
    keeper = socket.socket(family)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeper.bind(address)
    return keeper


def url_of(listener: socket.socket) -> str:
    """Return the HTTP address of a listening socket."""
    return f"http://{authority_of(listener)}"


def authority_of(listener: socket.socket) -> str:
    """Return host and port of a socket as one text."""
    return _authority(*listener.getsockname()[:2])


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def configuration(app: Any, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for an application; `options` are uvicorn's and override ours."""
    ours: dict[str, Any] = {
        "lifespan": "on",
        "log_config": None,  # each program configures logging itself
        "server_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": GRACE_SECONDS,
        "access_log": False,
    }
    return uvicorn.Config(app, **{**ours, **options})


def exit_on_sigterm() -> None:
    """End this process with exit code 0 on SIGTERM, after everything that is open has been closed.

    Uvicorn stops on this signal, and then raises it again for the previous handler.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def serve(app: Any, host: str, port: int, *, access_log: bool = False) -> int:
    """Serve an application until SIGINT or SIGTERM, and return the exit code."""
    server = uvicorn.Server(configuration(app, host=host, port=port, access_log=access_log))
    exit_on_sigterm()
    server.run()
    return 0 if server.started else 3


def serve_in_worker(app: Any, worker: Worker, *, access_log: bool = False) -> int:
    """Serve an application in one of several processes (`headgate_server.supervisor`), and return the exit code."""
    server = _WorkerServer(configuration(app, access_log=access_log), worker)
    exit_on_sigterm()
    server.run(sockets=[worker.listener])
    return 0 if server.started else 3


class _WorkerServer(uvicorn.Server):
    """A server that reports to the parent process when it answers requests."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._worker.report_ready()
