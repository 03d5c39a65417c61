"""The server: limiters of a policy file over HTTP, its dashboard, and the `headgate` command.

- `serve` runs it, and blocks.
- `open_app` returns the ASGI application of a policy file, for another web server; `make_app` that of a loaded policy.
- `Statistics` has the figures of the dashboard; `Demo` is the interface of the demo that the dashboard controls.
- `BoundedProtocol` is an HTTP protocol for uvicorn with bounds on connections and requests.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate_server.factory import make_app, open_app
    from headgate_server.http.connection import BoundedProtocol
    from headgate_server.startup import serve
    from headgate_server.statistics import Demo, Statistics

__all__ = ["BoundedProtocol", "Demo", "Statistics", "make_app", "open_app", "serve"]

_HOMES = {
    "BoundedProtocol": "http.connection",
    "Demo": "statistics",
    "Statistics": "statistics",
    "make_app": "factory",
    "open_app": "factory",
    "serve": "startup",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: the `headgate` command starts in a fraction of the server's time."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
