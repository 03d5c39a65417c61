"""`inspect` and `reset`, as they are declared; `counting` does the work."""

from __future__ import annotations

import argparse

from headgate_server.cli.common import Commands, Parser, add_config, add_server

_WHO = (
    "KEY stands for every scope of limiters that count by scopes; --scope gives each its own. Limiters that count in memory "
    "can only be seen through their server."
)


def add(commands: Commands) -> None:
    """Add the commands for the counts of a key."""
    inspect = commands.add(
        "inspect",
        "show what is counted for a key, in every rule of every limiter",
        _inspect,
        about=f"Nothing is charged. {_WHO}",
        examples=[
            "headgate inspect alice",
            "headgate inspect alice --limiter login --tier pro --json",
            "headgate inspect --scope user=42 --scope realm=north --config other.toml",
            "HEADGATE_TOKEN=… headgate inspect alice --server https://limits.example.org",
        ],
    )
    _add_addressing(inspect)
    inspect.add_argument("--tier", metavar="TIER", help="show the limits of callers of this tier")
    inspect.add_argument("--json", action="store_true", help="print JSON, as POST /v1/inspect answers")

    reset = commands.add(
        "reset",
        "forget what was counted for a key",
        _reset,
        about="It asks before it does, unless --yes is given; without a terminal, --yes is needed. A rule that counts "
        f"everybody together (scope *) forgets everybody's. {_WHO}",
        examples=[
            "headgate reset alice",
            "headgate reset alice --limiter login --yes",
            "HEADGATE_TOKEN=… headgate reset --scope user=42 --server http://127.0.0.1:8080",
        ],
    )
    _add_addressing(reset)
    reset.add_argument("--yes", action="store_true", help="do not ask")


def _add_addressing(parser: Parser) -> None:
    parser.add_argument("key", metavar="KEY", nargs="?", help="whose counts, as the limiter was given it")
    parser.add_argument(
        "--scope",
        metavar="SCOPE=KEY",
        action="append",
        default=[],
        type=_scope,
        help="instead of KEY, for limiters that count by scopes; may be given several times",
    )
    parser.add_argument(
        "--limiter",
        metavar="NAME",
        action="append",
        default=[],
        help="only this limiter; may be given several times",
    )
    add_config(parser)
    add_server(parser, default=None)


def _scope(text: str) -> tuple[str, str]:
    scope, separator, key = text.partition("=")
    if not scope or not separator:
        raise argparse.ArgumentTypeError(f"a scope is written as user=42, not {text!r}")
    return scope, key


def _inspect(options: argparse.Namespace) -> int:
    from headgate_server.cli import counting

    return counting.inspect(options)


def _reset(options: argparse.Namespace) -> int:
    from headgate_server.cli import counting

    return counting.reset(options)
