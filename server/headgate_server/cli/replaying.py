"""`replay` and `suggest`: from options to a report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from headgate.clock import MICROSECONDS
from headgate.policy import LimiterPolicy
from headgate_server.cli.common import Failure, read_policy
from headgate_server.replay import (
    LogCounts,
    LogSource,
    Selection,
    Simulation,
    as_json_text,
    make_report,
    needs_key,
    read_requests,
    report_text,
    run,
    scopes_of,
)
from headgate_server.replay.report import log_figures
from headgate_server.replay.suggest import suggestion, suggestion_text

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_ON_TERMINAL = 0.2


def replay(options: argparse.Namespace) -> None:
    """Replay logs, and print the report."""
    files = [options.config, *([options.compare] if options.compare else [])]
    simulations = [Simulation(_limiter(file, options.limiter), options.model_retries) for file in files]
    limiters = [simulation.limiter.policy for simulation in simulations]
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
        sources = stack.enter_context(opened(options.logs))
        decisions = stack.enter_context(_written(options.decisions)) if options.decisions else None
        requests = read_requests(sources, selection, counts)
        progress = stack.enter_context(shown_progress(sources, counts))
        replayed = run(requests, simulations, counts, progress=progress, decisions=decisions)
    if replayed.first is None:
        raise Failure(nothing_read(counts))
    names = [f"{limiter.name} of {file}" for limiter, file in zip(limiters, files, strict=True)]
    report = make_report(replayed, counts, names, options.buffer)
    if options.html:
        from headgate_server.replay.page import report_page

        with _written(options.html) as page:
            page.write(report_page(report))
    print(as_json_text(report) if options.json else report_text(report))


def suggest(options: argparse.Namespace) -> None:
    """Propose limits from logs, and print them."""
    selection = Selection(
        format=options.format, time=options.time, key=options.key, cost=options.cost, buffer=options.buffer
    )
    counts = LogCounts()
    with ExitStack() as stack:
        sources = stack.enter_context(opened(options.logs))
        requests = read_requests(sources, selection, counts)
        progress = stack.enter_context(shown_progress(sources, counts))
        report = suggestion(requests, options.refuse_at_most, options.name, progress)
    if not report["requests"]:
        raise Failure(nothing_read(counts))
    first, last = (round(report[end] * MICROSECONDS) for end in ("from", "to"))
    report["log"] = log_figures(counts, first, last)
    print(json.dumps(report, indent=2) if options.json else suggestion_text(report))


def nothing_read(counts: LogCounts) -> str:
    """Return why there is nothing to report: the most frequent reason, with an example."""
    if not counts.lines:
        return "the log is empty"
    bad = [*counts.bad.items(), ("no key: name who a request counts for with --key", counts.without_key)]
    reason, lines = max(bad, key=lambda item: item[1].count)
    if not lines.count:
        return f"none of the {counts.lines:,} lines has a request for this limiter"
    return f"none of the {counts.lines:,} lines could be replayed; {lines.count:,}: {reason}, as in {lines.examples[0]}"


def _limiter(file: str, name: str | None) -> LimiterPolicy:
    limiters = read_policy(file).limiters
    if name is None:
        if len(limiters) == 1:
            return next(iter(limiters.values()))
        raise Failure(f"{file} has several limiters; add --limiter, one of {', '.join(limiters)}", 2)
    if name not in limiters:
        raise Failure(f"{file} has no limiter {name!r}; there is {', '.join(limiters)}", 2)
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
def opened(names: Sequence[str]) -> Iterator[list[LogSource]]:
    """Give the logs of these names."""
    if names.count("-") > 1:
        raise Failure("standard input can be read once; name - once", 2)
    with ExitStack() as stack:
        yield [stack.enter_context(LogSource(name)) for name in names]


def _written(name: str) -> IO[str]:
    return Path(name).open("w", encoding="utf-8", errors="backslashreplace")


@contextmanager
def shown_progress(sources: Sequence[LogSource], counts: LogCounts) -> Iterator[Callable[[str], None]]:
    """Say on standard error how far reading is: on a terminal in one line that goes away, elsewhere now and then."""
    terminal = sys.stderr.isatty()
    pause = _SECONDS_ON_TERMINAL if terminal else _SECONDS_BETWEEN_LINES
    sizes = [source.size for source in sources]
    whole = sum(size for size in sizes if size is not None) if None not in sizes else 0
    started = shown = time.monotonic()
    lines = 0

    def show(doing: str) -> None:
        nonlocal shown, lines
        now = time.monotonic()
        if now - shown < pause:
            return
        part = f"{sum(source.consumed for source in sources) / whole:.0%}, " if whole else ""
        line = f"{doing}: {part}{counts.lines:,} lines, {counts.lines / (now - started):,.0f} a second"
        if counts.lines == lines:  # the logs were read; what follows is work on what was kept of them
            line = doing
        shown, lines = now, counts.lines
        print(
            f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True
        )

    try:
        yield show
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
