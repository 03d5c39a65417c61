"""`replay` and `suggest`: apply a policy to the traffic of a log, and propose limits for it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from headgate.clock import MICROSECONDS
from headgate_server.cli.common import Commands, Failure, Parser, add_config, add_scope, from_to, read_policy

if TYPE_CHECKING:
    from headgate.policy import LimiterPolicy
    from headgate_server.replay import LogCounts, LogSource

_SECONDS_BETWEEN_PROGRESS = 0.2

_EXPRESSIONS = (
    "Expressions (EXPR) are text with fields of a line in braces, such as {client}, {user|or:client} or "
    "{path|match:^/api/(\\w+)}."
)
_LOGS = (
    "Reads logs of nginx and Apache, JSON lines (such as those of Caddy, Traefik and Envoy), CSV and recordings of "
    "Headgate, also compressed with gzip. Invalid lines are counted and shown with the reason."
)


def add(commands: Commands) -> None:
    """Add the commands for logs."""
    replay = commands.add(
        "replay",
        "show what a policy would have done with the traffic of a log",
        _replay,
        about=f"Decides each request at the time in its line, by the same functions as live ones. {_LOGS} {_EXPRESSIONS}",
        examples=[
            "headgate replay access.log",
            "headgate replay access.log.2.gz access.log.1 access.log --html report.html",
            "headgate replay access.log --key '{http_x_api_key|or:client}' --compare stricter.toml",
            "zcat access.log.*.gz | headgate replay - --limiter api --json",
        ],
    )
    _add_log(replay)
    add_config(replay)
    replay.add_argument("--limiter", metavar="NAME", help="the limiter (default: the only one of the file)")
    replay.add_argument("--compare", metavar="FILE", help="another policy file; also show the differences")
    add_scope(replay, "EXPR", "user={user}", "the key of a request in one scope; may be given several times")
    replay.add_argument("--tier", metavar="EXPR", help="the tier of a request (default: none)")
    replay.add_argument(
        "--route",
        metavar="EXPR",
        help="the group of a request in the report (default: '{method} {path|shape}')",
    )
    replay.add_argument(
        "--model-retries",
        metavar="N",
        type=from_to(1, 100),
        nargs="?",
        const=3,
        default=0,
        help="assume that refused callers retry up to N times (default: 3)",
    )
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.add_argument("--html", metavar="FILE", help="also write the report as an HTML page")
    replay.add_argument("--decisions", metavar="FILE", help="also write each decision as a line of JSON")

    suggest = commands.add(
        "suggest",
        "propose limits from the traffic of a log",
        _suggest,
        about="For each window, prints the smallest limit that refuses at most the given share of requests, and a token "
        "bucket with rate and burst from the data, as lines for a policy file. Every proposal is replayed, so its share is "
        f"exact. {_EXPRESSIONS}",
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
        help="share of requests, such as 0.1%% or 0.001 (default: 0.1%%)",
    )
    suggest.add_argument("--name", metavar="NAME", default="api", help="name of the limiter (default: api)")
    suggest.add_argument("--json", action="store_true", help="print JSON")


def _add_log(parser: Parser) -> None:
    parser.add_argument(
        "logs", metavar="LOG", nargs="+", help="log files, merged by time; - for standard input"
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        default="auto",
        help="auto, combined, json, csv, csv:COLUMN,COLUMN, headgate, or the log format of nginx "
        "('$remote_addr …') or Apache ('%%h …') (default: auto)",
    )
    parser.add_argument("--time", metavar="FIELD", help="the field with the time, for JSON and CSV")
    parser.add_argument("--key", metavar="EXPR", help="the key of a request (default: '{client|network}')")
    parser.add_argument("--cost", metavar="EXPR", default="1", help="the cost of a request (default: 1)")
    parser.add_argument(
        "--buffer",
        metavar="N",
        type=from_to(100, 10_000_000),
        default=50_000,
        help="number of lines that are sorted at a time (default: 50000)",
    )


def _share(text: str) -> float:
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number < 1:  # also false for NaN
        raise argparse.ArgumentTypeError(f"write a share as 0.1% or 0.001, not {text}")
    return number


def _replay(options: argparse.Namespace) -> None:
    from headgate_server.replay import (
        LogCounts,
        Selection,
        Simulation,
        make_report,
        needs_key,
        read_requests,
        report_text,
        run,
        scopes_of,
    )

    files = [options.config, *([options.compare] if options.compare else [])]
    simulations = [Simulation(_limiter(file, options.limiter), options.model_retries) for file in files]
    limiters = [simulation.policy for simulation in simulations]
    scopes = tuple(dict.fromkeys(scope for limiter in limiters for scope in scopes_of(limiter)))
    _check_scopes(options, limiters, scopes)
    selection = Selection(
        format=options.format,
        time=options.time,
        key=options.key,
        scopes=dict(options.scope),
        named_scopes=scopes,
        needs_key=any(map(needs_key, limiters)),
        cost=options.cost,
        tier=options.tier,
        route=options.route,
        limiter=limiters[0].name,
        buffer=options.buffer,
    )
    counts = LogCounts()
    with ExitStack() as stack:
        sources = stack.enter_context(_opened(options.logs))
        decisions = stack.enter_context(_written(options.decisions)) if options.decisions else None
        requests = read_requests(sources, selection, counts)
        progress = stack.enter_context(_shown_progress(sources, counts))
        replayed = run(requests, simulations, counts, progress=progress, decisions=decisions)
    if replayed.first is None:
        raise Failure(_nothing_read(counts))
    names = [f"{limiter.name} of {file}" for limiter, file in zip(limiters, files, strict=True)]
    report = make_report(replayed, counts, names, options.buffer)
    if options.html:
        from headgate_server.replay.page import report_page

        with _written(options.html) as page:
            page.write(report_page(report))
    print(json.dumps(report, indent=2) if options.json else report_text(report))


def _suggest(options: argparse.Namespace) -> None:
    from headgate_server.replay import LogCounts, Selection, read_requests
    from headgate_server.replay.report import log_figures
    from headgate_server.replay.suggest import suggestion, suggestion_text

    selection = Selection(
        format=options.format, time=options.time, key=options.key, cost=options.cost, buffer=options.buffer
    )
    counts = LogCounts()
    with ExitStack() as stack:
        sources = stack.enter_context(_opened(options.logs))
        requests = read_requests(sources, selection, counts)
        progress = stack.enter_context(_shown_progress(sources, counts))
        report = suggestion(requests, options.refuse_at_most, options.name, progress)
    if not report["requests"]:
        raise Failure(_nothing_read(counts))
    first, last = (round(report[end] * MICROSECONDS) for end in ("from", "to"))
    report["log"] = log_figures(counts, first, last)
    print(json.dumps(report, indent=2) if options.json else suggestion_text(report))


def _nothing_read(counts: LogCounts) -> str:
    """Return the most frequent reason why lines were not replayed, with an example."""
    if not counts.lines:
        return "the log is empty"
    if not counts.bad:
        return f"none of the {counts.lines:,} lines is a request"
    reason, lines = max(counts.bad.items(), key=lambda item: item[1].count)
    return f"none of the {counts.lines:,} lines could be replayed; {lines.count:,}: {reason}, as in {lines.examples[0]}"


def _limiter(file: str, name: str | None) -> LimiterPolicy:
    limiters = read_policy(file).limiters
    if name is None:
        if len(limiters) == 1:
            return next(iter(limiters.values()))
        raise Failure(f"{file} has several limiters; add --limiter, one of {', '.join(limiters)}", 2)
    if name not in limiters:
        raise Failure(f"{file} has no limiter {name!r}; use one of {', '.join(limiters)}", 2)
    return limiters[name]


def _check_scopes(
    options: argparse.Namespace, limiters: Sequence[LimiterPolicy], scopes: tuple[str, ...]
) -> None:
    known = ", ".join(scopes) or "none"
    for scope, _ in options.scope:
        if scope not in scopes:
            raise Failure(f"--scope {scope}: no rule counts by it; the scopes are: {known}", 2)
    plain = [limiter for limiter in limiters if any(rule.scope is None for rule in limiter.rules)]
    if scopes and plain:
        raise Failure("one policy counts by plain keys and the other by scopes; they cannot be compared", 2)


@contextmanager
def _opened(names: Sequence[str]) -> Iterator[list[LogSource]]:
    from headgate_server.replay import LogSource

    if names.count("-") > 1:
        raise Failure("standard input (-) can be given only once", 2)
    with ExitStack() as stack:
        yield [stack.enter_context(LogSource(name)) for name in names]


def _written(name: str) -> IO[str]:
    return Path(name).open("w", encoding="utf-8", errors="backslashreplace")


@contextmanager
def _shown_progress(sources: Sequence[LogSource], counts: LogCounts) -> Iterator[Callable[[str], None]]:
    """Show the progress of reading on standard error if it is a terminal; the line is cleared at the end."""
    if not sys.stderr.isatty():
        yield lambda doing: None
        return
    sizes = [source.size for source in sources]
    whole = sum(size for size in sizes if size is not None) if None not in sizes else 0
    shown = time.monotonic()

    def show(doing: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < _SECONDS_BETWEEN_PROGRESS:
            return
        shown = now
        part = f"{sum(source.consumed for source in sources) / whole:.0%}, " if whole else ""
        line = f"{doing}: {part}{counts.lines:,} lines"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
