"""Uvicorn, as everything of Headgate that speaks HTTP runs under it: the four services, the server and the demo.

A client's address is that of its connection. Uvicorn would take it from `X-Forwarded-For` if the connection comes from this
machine, so that every local client could choose its own; whose word is taken is for the applications to say, by
`headgate.http.Proxies`.
"""

from __future__ import annotations

from typing import Any

import uvicorn

GRACE_SECONDS = 10
"""How long requests under way may take to finish when a program stops."""


def configuration(app: Any, **options: Any) -> uvicorn.Config:
    """Return how an application is served; `options` are uvicorn's, and come before ours."""
    ours: dict[str, Any] = {
        "lifespan": "on",
        "log_config": None,  # the log is set up by whoever starts the program
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": GRACE_SECONDS,
    }
    return uvicorn.Config(app, **{**ours, **options})


def serve(app: Any, host: str, port: int, **options: Any) -> int:
    """Serve an application until SIGINT or SIGTERM, and return the exit code."""
    server = uvicorn.Server(configuration(app, host=host, port=port, **options))
    server.run()
    return 0 if server.started else 3
