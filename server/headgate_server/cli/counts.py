"""`inspect` and `reset`: show and delete the counts of a key."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from headgate import HeadgateError
from headgate.keys import Key
from headgate.observe import redact
from headgate.rules import REQUESTS, SHARED
from headgate.usage import RuleUsage
from headgate_server.cli.common import (
    Commands,
    Failure,
    Parser,
    add_config,
    add_scope,
    add_server,
    read_policy,
)
from headgate_server.cli.terminal import Style
from headgate_server.cli.views import (
    KeyArgument,
    LimiterView,
    NotVisible,
    open_server,
    views_of_policy,
    views_of_server,
)
from headgate_server.formatting import printable, span

_KEYS = (
    "For limiters with scopes, KEY is used for every scope; with --scope, each scope has its own key. Counts in the memory "
    "of a server can be reached only with --server."
)


def add(commands: Commands) -> None:
    """Add the commands for the counts of a key."""
    inspect = commands.add(
        "inspect",
        "show the counts of a key in every rule of every limiter",
        _inspect,
        about=f"Nothing is charged. {_KEYS}",
        examples=[
            "headgate inspect alice",
            "headgate inspect alice --limiter login --tier pro --json",
            "headgate inspect --scope user=42 --scope realm=north --config other.toml",
            "HEADGATE_TOKEN=… headgate inspect alice --server https://limits.example.org",
        ],
    )
    _add_key(inspect)
    inspect.add_argument("--tier", metavar="TIER", help="the tier of the caller")
    inspect.add_argument("--json", action="store_true", help="print JSON, in the format of POST /v1/inspect")

    reset = commands.add(
        "reset",
        "delete the counts of a key",
        _reset,
        about="Asks for confirmation unless --yes is given; without a terminal, --yes is required. Rules shared by all "
        f"callers (scope *) are reset for all of them. {_KEYS}",
        examples=[
            "headgate reset alice",
            "headgate reset alice --limiter login --yes",
            "HEADGATE_TOKEN=… headgate reset --scope user=42 --server http://127.0.0.1:8080",
        ],
    )
    _add_key(reset)
    reset.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add_key(parser: Parser) -> None:
    parser.add_argument("key", metavar="KEY", nargs="?", help="the key, as passed to the limiter")
    add_scope(parser, "KEY", "user=42", "the key of one scope, instead of KEY; may be given several times")
    parser.add_argument(
        "--limiter",
        metavar="NAME",
        action="append",
        default=[],
        help="show only this limiter; may be given several times",
    )
    add_config(parser)
    add_server(parser, default=None)


def _key_argument(options: argparse.Namespace) -> KeyArgument:
    if (options.key is None) == (not options.scope):
        raise Failure("give either KEY or --scope, as in --scope user=42", code=2)
    return KeyArgument(options.key, dict(options.scope))


@contextmanager
def _views(options: argparse.Namespace) -> Iterator[Sequence[LimiterView]]:
    """Open the selected limiters."""
    if options.server is not None:
        with open_server(options.server, options.token) as server:
            yield _named(views_of_server(server), options.limiter)
        return
    with views_of_policy(read_policy(options.config)) as views:
        yield _named(views, options.limiter)


def _named(views: Sequence[LimiterView], names: list[str]) -> Sequence[LimiterView]:
    known = [view.name for view in views]
    for name in names:
        if name not in known:
            raise Failure(f"unknown limiter {name!r}; use one of {', '.join(map(repr, known))}")
    return [view for view in views if not names or view.name in names]


# inspect


@dataclass(frozen=True, slots=True)
class _Result:
    """The counts of one limiter, or the reason why they cannot be shown."""

    view: LimiterView
    counts: list[RuleUsage]
    error: str | None = None
    failed: bool = False

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.view.name,
            "results": [asdict(count) for count in self.counts],
            "error": self.error,
        }


def _inspect(options: argparse.Namespace) -> int:
    """Show the counts, and return the exit code."""
    key = _key_argument(options)
    with _views(options) as views:
        results = [_read(view, key, options.tier) for view in views]
    if options.json:
        print(json.dumps({"limiters": [result.as_json() for result in results]}, indent=2))
    else:
        _show(key, results)
    nothing_shown = all(result.error is not None for result in results)
    return 1 if nothing_shown or any(result.failed for result in results) else 0


def _read(view: LimiterView, key: KeyArgument, tier: str | None) -> _Result:
    try:
        return _Result(view, view.counts(view.key(key), tier))
    except NotVisible as reason:
        return _Result(view, [], str(reason))
    except HeadgateError as error:
        return _Result(view, [], redact(str(error)), failed=True)


def _show(key: KeyArgument, results: list[_Result]) -> None:
    style = Style(sys.stdout)
    counts = [count for result in results for count in result.counts]
    name_width = max((len(_title(count)) for count in counts), default=0)
    used_width = max((len(_used(count)) for count in counts), default=0)
    print(style.bold(printable(str(key))))
    for result in results:
        print(f"\n{style.bold(printable(result.view.name))}  {style.dim(printable(result.view.store))}")
        if result.error is not None:
            print(f"  {style.yellow(printable(result.error))}")
        for count in result.counts:
            bar = style.bar(count.used, count.limit)
            print(f"  {_title(count):<{name_width}}  {bar}  {_used(count):>{used_width}}  {_when(count)}")


def _title(count: RuleUsage) -> str:
    notes = (" (shared)" if count.scope == SHARED else "") + (" (shadow)" if count.shadow else "")
    return printable(count.name) + notes


def _used(count: RuleUsage) -> str:
    used = f"{count.used:,}/{count.limit:,}"
    if count.kind == "penalty":
        return f"{used} refusals"
    if count.kind == "concurrent":
        return f"{used} held"
    return used if count.unit == REQUESTS else f"{used} {printable(count.unit)}"


def _when(count: RuleUsage) -> str:
    """Return the time until one more unit is admitted, and until the count is 0."""
    if count.frees_after is None:
        return "never admits anything"
    if count.kind == "penalty":
        return f"refuses everything for {span(count.frees_after)}" if count.frees_after else "no penalty now"
    # A place is freed when its holder releases it, or at the end of its lease.
    latest = " at most" if count.kind == "concurrent" else ""
    room = "room now" if not count.frees_after else f"room in {span(count.frees_after)}{latest}"
    if not count.reset_after:
        return f"{room}, unused"
    if count.kind == "calendar":
        return f"{room}, resets at {_end_of_window(count.reset_after, count.timezone)}"
    return f"{room}, resets in {span(count.reset_after)}{latest}"


def _end_of_window(seconds: float, timezone: str | None) -> str:
    """Return the end of a calendar window, in its time zone."""
    zone = UTC if timezone is None or timezone == "UTC" else ZoneInfo(timezone)
    return f"{datetime.fromtimestamp(round(time.time() + seconds), zone):%Y-%m-%d %H:%M} {timezone}"


# reset


def _reset(options: argparse.Namespace) -> int:
    """Delete the counts, and return the exit code."""
    argument = _key_argument(options)
    with _views(options) as views:
        targets = [(view, key) for view in views for key in _key(view, argument)]
        if not targets:
            return 1
        if not options.yes and not _confirmed(argument, [view for view, _ in targets]):
            print("nothing was reset")
            return 1
        return max(_reset_one(view, key, argument) for view, key in targets)


def _key(view: LimiterView, argument: KeyArgument) -> Iterator[Key | None]:
    """Yield the key to reset; print the reason if that cannot be done from here."""
    try:
        yield view.key(argument)
    except NotVisible as reason:
        print(f"{view.name}: not reset: {reason}")


def _confirmed(argument: KeyArgument, views: list[LimiterView]) -> bool:
    if not sys.stdin.isatty():
        raise Failure("the confirmation needs a terminal; add --yes to reset without it", code=2)
    print(f"Delete the counts of {printable(str(argument))} in: {', '.join(view.name for view in views)}")
    for view in views:
        for rule in view.shared:
            print(f"Delete the counts of all callers in: {view.name}, rule {rule}")
    try:
        return input("Continue? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _reset_one(view: LimiterView, key: Key | None, argument: KeyArgument) -> int:
    """Reset one limiter and print the result; return 1 if it failed."""
    try:
        view.reset(key)
    except HeadgateError as error:
        print(f"{view.name}: not reset: {redact(str(error))}")
        return 1
    shared = f", and for all callers in rule {' and '.join(view.shared)}" if view.shared else ""
    print(f"{view.name}: reset for {printable(str(argument))}{shared}")
    return 0
