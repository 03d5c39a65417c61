"""The server: limiters of a policy file over HTTP, its dashboard, and the `headgate` command.

serve      runs it, blocking
open_app   the ASGI application of a policy file, for another server
make_app   the same of a policy that is there already
Board      what the dashboard shows; Demo, what it shows besides in the demo
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate_server.board import Board, Demo
    from headgate_server.running import make_app, open_app
    from headgate_server.serving import serve

__all__ = ["Board", "Demo", "make_app", "open_app", "serve"]

_HOMES = {"Board": "board", "Demo": "board", "make_app": "running", "open_app": "running", "serve": "serving"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: the `headgate` command starts in a fraction of the server's time."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
