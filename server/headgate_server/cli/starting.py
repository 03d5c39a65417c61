"""`tour` and `version`: where people begin."""

from __future__ import annotations

import argparse

import headgate
from headgate import build
from headgate_server.cli.common import Commands


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


def add_last(commands: Commands) -> None:
    """Add what says which Headgate this is."""
    commands.add("version", "print the version, and which build of the core is in use", _version)


def _tour(options: argparse.Namespace) -> None:
    from headgate_server.cli.tour import tour

    tour(fast=options.fast)


def version() -> str:
    """Return which Headgate this is."""
    return f"headgate {headgate.__version__}, core {build.describe()}"


def _version(options: argparse.Namespace) -> None:
    print(version())
