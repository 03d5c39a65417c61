"""The `headgate` command.

Exit codes: 0 success, 1 failure (the reason is one line on standard error; --debug shows the traceback), 2 wrong arguments,
130 interrupted. Results go to standard output, everything else to standard error.

Modules of commands are fast to import; expensive imports happen when a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points

import headgate
from headgate import HeadgateError, build
from headgate_server.cli import completion, counts, policies, replays, stores, top
from headgate_server.cli.common import DEBUG_HELP, Commands, Failure, Parser, redacted

__all__ = ["main", "make_parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process, and return its exit code."""
    _write_anything()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
        return 0  # the reader closed the pipe, as in `headgate check | head`


def make_parser() -> Parser:
    """Return the parser of the command, with all its commands."""
    parser = Parser(
        prog="headgate",
        description="Rate limiting with exact decisions on every store.",
        examples=["headgate tour", "headgate check headgate.toml", "headgate serve --help"],
    )
    parser.add_argument("--debug", action="store_true", help=DEBUG_HELP)
    parser.add_argument("--version", action="version", version=_version(), help="print the version")
    parser.set_defaults(command=None, parser=parser)
    commands = Commands(parser, required=False)
    commands.group("getting started")
    tour = commands.add(
        "tour",
        "demonstrate limiters in the terminal, in less than a minute",
        _tour,
        about="All decisions shown are real.",
        examples=["headgate tour", "headgate tour --fast"],
    )
    tour.add_argument("--fast", action="store_true", help="use a fake clock instead of waiting")
    commands.group("limiters of a policy file")
    policies.add(commands)
    counts.add(commands)
    top.add(commands)
    commands.group("traffic logs")
    replays.add(commands)
    commands.group("stores")
    stores.add(commands)
    _add_others(commands)
    commands.group("this program")
    commands.add(
        "version",
        "print the version and the build of the core",
        lambda options: print(_version()),
    )
    completion.add(commands, parser)
    return parser


def _version() -> str:
    return f"headgate {headgate.__version__}, core {build.describe()}"


def _tour(options: argparse.Namespace) -> None:
    from headgate_server.cli.tour import tour

    tour(fast=options.fast)


def _add_others(commands: Commands) -> None:
    """Add the commands of other distributions, which are entry points of the group `headgate.commands`."""
    others = entry_points(group="headgate.commands")
    for other in others:
        other.load()(commands)
    if not others:
        commands.group("services")
        for name in ("demo", "run"):
            commands.add(name, "part of the services: pip install 'headgate-services[all]'", _not_installed)


def _not_installed(options: argparse.Namespace) -> int:
    raise Failure("the services are not installed: pip install 'headgate-services[all]'")


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = ""
        if not unknown[0].startswith("-"):
            hint = f"; write --config {unknown[0]} for a policy file" if hasattr(options, "config") else ""
        elif near := get_close_matches(unknown[0], options.parser._option_string_actions, n=1):
            hint = f"; did you mean {near[0]}?"
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return options.command(options) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise  # standard output was closed; broken connections are other errors
    except (Failure, HeadgateError, OSError) as error:
        if options.debug:
            raise
        print(f"headgate: {redacted(error)}", file=sys.stderr)
        return error.code if isinstance(error, Failure) else 1


def _write_anything() -> None:
    """Escape characters that the encoding of the terminal lacks, so that every key can be written."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _forget_output() -> None:
    """Discard the buffer of standard output, which the interpreter would flush at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
