"""Everything at once on one machine: `headgate demo` and `headgate run all`.

Light to import; what the two need is imported when they run.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["run_all", "run_demo"]


def run_demo(
    host: str = "127.0.0.1", port: int = 8080, open_traffic: bool = True, keep: str | Path | None = None
) -> int:
    """Run Redis, PostgreSQL, the four services, the server with its dashboard, and callers; return the exit code.

    It ends, with code 0, on SIGINT, SIGTERM and SIGHUP; nothing that it started outlives it, however it ends.

    Args:
        host: Where everything listens; an address of the loopback interface.
        port: Where the dashboard should be. If the port is taken it is one of the next; 0 is any free one.
        open_traffic: Whether the callers call from the start; the page switches them.
        keep: A folder for the data, which stays there for the next start; by default it is all forgotten.

    Raises:
        DemoError: It cannot start; the message says why.
    """
    from headgate_services.demo.errors import naming_missing_packages

    with naming_missing_packages():
        from headgate_services.demo.running import run

    return run(host, port, open_traffic, None if keep is None else Path(keep).absolute())


def run_all(host: str | None = None) -> int:
    """Run the four services in one process, each as its own environment variables say; return the exit code.

    The code is 0 if it was stopped by a signal, 1 if a service has ended by itself, 2 if a setting cannot work.

    Args:
        host: Where all of them listen, instead of their own settings.

    Raises:
        DemoError: A package is missing, or a port is taken; the message says which.
    """
    from headgate_services.demo.errors import naming_missing_packages

    with naming_missing_packages():
        from headgate_services.demo.services_only import run

    return run(host)
