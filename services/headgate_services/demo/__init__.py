"""Everything at once on one machine: `headgate demo`.

Fast to import; the programs themselves are imported when they run.
"""

from __future__ import annotations

from pathlib import Path

from headgate import HeadgateError

__all__ = ["DemoError", "run_demo"]


class DemoError(HeadgateError):
    """The demo cannot start; the message is one line with the reason."""


def run_demo(
    host: str = "127.0.0.1", port: int = 8080, open_traffic: bool = True, keep: str | Path | None = None
) -> int:
    """Run Redis, PostgreSQL, the four services, the server with its dashboard, and callers; return the exit code.

    SIGINT, SIGTERM and SIGHUP stop it with exit code 0. Its child processes never outlive it.

    Args:
        host: The address to listen on; it must belong to the loopback interface.
        port: The port of the dashboard. If it is taken, one of the next is used; 0 is any free one.
        open_traffic: Whether the callers are on at the start; the dashboard can switch them.
        keep: A folder for the data, which stays there for the next start; by default all data is removed.

    Raises:
        DemoError: It cannot start.
    """
    from headgate_services.demo.running import run

    return run(host, port, open_traffic, None if keep is None else Path(keep).absolute())
