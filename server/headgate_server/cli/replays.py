"""`replay` and `suggest`, as they are declared; `replaying` does the work."""

from __future__ import annotations

import argparse

from headgate_server.cli.common import Commands, Parser, add_config, from_to

_EXPRESSIONS = (
    "Expressions (EXPR) are text with fields of the line in braces, such as {client}, {user|or:client} or "
    "{path|match:^/api/(\\w+)}."
)
_LOGS = (
    "Logs are those of nginx and Apache, JSON lines (Caddy, Traefik, Envoy, your own), CSV, and what Headgate has recorded; "
    "also compressed with gzip or zstd. Lines that cannot be read are counted and shown, with their reason."
)


def add(commands: Commands) -> None:
    """Add the commands that look at logs."""
    replay = commands.add(
        "replay",
        "say what a policy would have done with the traffic of a log",
        _replay,
        about=f"Every request is decided at its own time, by what decides live. {_LOGS} {_EXPRESSIONS}",
        examples=[
            "headgate replay access.log",
            "headgate replay access.log.2.gz access.log.1 access.log --html report.html",
            "headgate replay access.log --key '{http_x_api_key|or:client}' --compare stricter.toml",
            "zcat access.log.*.gz | headgate replay - --limiter api --json",
        ],
    )
    _add_log(replay)
    add_config(replay)
    replay.add_argument("--limiter", metavar="NAME", help="which limiter (default: the only one of the file)")
    replay.add_argument(
        "--compare", metavar="FILE", help="another policy file: also say what changes, request by request"
    )
    replay.add_argument(
        "--scope",
        metavar="SCOPE=EXPR",
        action="append",
        default=[],
        type=_scope,
        help="whom a request counts for in this scope; may be given several times",
    )
    replay.add_argument("--tier", metavar="EXPR", help="the caller's tier (default: none)")
    replay.add_argument(
        "--route", metavar="EXPR", help="what requests are grouped by (default: '{method} {path|shape}')"
    )
    replay.add_argument(
        "--model-retries",
        metavar="N",
        type=from_to(1, 100, "retries"),
        nargs="?",
        const=3,
        default=0,
        help="have refused callers try again, up to N times (default: 3)",
    )
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.add_argument(
        "--html", metavar="FILE", help="also write the report as a page that needs nothing else"
    )
    replay.add_argument("--decisions", metavar="FILE", help="also write every decision, as a line of JSON")

    suggest = commands.add(
        "suggest",
        "propose limits from the traffic of a log",
        _suggest,
        about="Of every window, the smallest limit that would refuse at most the given share of the requests, and a token "
        "bucket with rate and burst from the data, as lines for a policy file. Each was replayed, so the shares are "
        f"exact. What matters of the log is kept in a temporary file meanwhile. {_EXPRESSIONS}",
        examples=[
            "headgate suggest access.log",
            "headgate suggest access.log --refuse-at-most 1% --key '{user|or:client}'",
            "headgate suggest access.log >>headgate.toml",
        ],
    )
    _add_log(suggest)
    suggest.add_argument(
        "--refuse-at-most",
        metavar="SHARE",
        type=_share,
        default=0.001,
        help="of all requests, as 0.1%% or 0.001 (default: 0.1%%)",
    )
    suggest.add_argument(
        "--name", metavar="NAME", default="api", help="what to call the limiter (default: api)"
    )
    suggest.add_argument("--json", action="store_true", help="print JSON")


def _add_log(parser: Parser) -> None:
    parser.add_argument(
        "logs", metavar="LOG", nargs="+", help="the logs, merged by time; - for standard input"
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        default="auto",
        help="auto, combined, caddy, traefik, envoy, json, csv, csv:COLUMN,COLUMN, headgate, or as nginx ('$remote_addr …') "
        "or Apache ('%%h …') is configured with (default: auto)",
    )
    parser.add_argument("--time", metavar="FIELD", help="the field with the time, for JSON and CSV")
    parser.add_argument(
        "--key", metavar="EXPR", help="whom a request counts for (default: '{client|network}')"
    )
    parser.add_argument("--cost", metavar="EXPR", default="1", help="how many units (default: 1)")
    parser.add_argument(
        "--buffer",
        metavar="N",
        type=from_to(100, 10_000_000, "lines"),
        default=50_000,
        help="how many lines are held to be put in order (default: 50000)",
    )


def _scope(text: str) -> tuple[str, str]:
    scope, separator, expression = text.partition("=")
    if not scope or not separator or not expression:
        raise argparse.ArgumentTypeError(f"a scope is written as user={{user}}, not {text!r}")
    return scope, expression


def _share(text: str) -> float:
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number < 1:  # also false for NaN
        raise argparse.ArgumentTypeError(f"a share is written as 0.1% or 0.001, not {text}")
    return number


def _replay(options: argparse.Namespace) -> None:
    from headgate_server.cli import replaying

    replaying.replay(options)


def _suggest(options: argparse.Namespace) -> None:
    from headgate_server.cli import replaying

    replaying.suggest(options)
