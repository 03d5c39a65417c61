"""`inspect` and `reset`: show the counts of a key, and forget them."""

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
from headgate_server.cli.common import Commands, Failure, Parser, add_config, add_server, read_policy
from headgate_server.cli.terminal import Style
from headgate_server.cli.views import Asked, Unseen, View, open_server, views_of_policy, views_of_server
from headgate_server.formatting import printable, span

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


def _asked(options: argparse.Namespace) -> Asked:
    if (options.key is None) == (not options.scope):
        raise Failure("name the caller: KEY, or --scope user=42", code=2)
    return Asked(options.key, dict(options.scope))


@contextmanager
def _views(options: argparse.Namespace) -> Iterator[Sequence[View]]:
    """Give the limiters that are asked for."""
    if options.server is not None:
        with open_server(options.server, options.token) as server:
            yield _named(views_of_server(server), options.limiter)
        return
    with views_of_policy(read_policy(options.config)) as views:
        yield _named(views, options.limiter)


def _named(views: Sequence[View], names: list[str]) -> Sequence[View]:
    known = [view.name for view in views]
    for name in names:
        if name not in known:
            raise Failure(f"there is no limiter {name!r}; there is {', '.join(map(repr, known))}")
    return [view for view in views if not names or view.name in names]


# inspect


@dataclass(frozen=True, slots=True)
class _Seen:
    """The counts of one limiter, or the reason why they cannot be seen."""

    name: str
    store: str
    results: list[RuleUsage]
    error: str | None
    failed: bool

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "results": [asdict(count) for count in self.results], "error": self.error}


def _inspect(options: argparse.Namespace) -> int:
    """Show the counts, and return the exit code."""
    asked = _asked(options)
    with _views(options) as views:
        seen = [_see(view, asked, options.tier) for view in views]
    if options.json:
        print(json.dumps({"limiters": [limiter.as_json() for limiter in seen]}, indent=2))
    else:
        _show(asked, seen)
    nothing_seen = all(limiter.error is not None for limiter in seen)
    return 1 if nothing_seen or any(limiter.failed for limiter in seen) else 0


def _see(view: View, asked: Asked, tier: str | None) -> _Seen:
    try:
        return _Seen(view.name, view.store, view.counts(view.key(asked), tier), None, failed=False)
    except Unseen as reason:
        return _Seen(view.name, view.store, [], str(reason), failed=False)
    except HeadgateError as error:
        return _Seen(view.name, view.store, [], redact(str(error)), failed=True)


def _show(asked: Asked, seen: list[_Seen]) -> None:
    style = Style(sys.stdout)
    counts = [count for limiter in seen for count in limiter.results]
    name_width = max((len(_title(count)) for count in counts), default=0)
    used_width = max((len(_used(count)) for count in counts), default=0)
    print(style.bold(printable(str(asked))))
    for limiter in seen:
        print(f"\n{style.bold(printable(limiter.name))}  {style.dim(printable(limiter.store))}")
        if limiter.error is not None:
            print(f"  {style.yellow(printable(limiter.error))}")
        for count in limiter.results:
            bar = style.bar(count.used, count.limit)
            print(f"  {_title(count):<{name_width}}  {bar}  {_used(count):>{used_width}}  {_when(count)}")


def _title(count: RuleUsage) -> str:
    notes = (" (everybody)" if count.scope == SHARED else "") + (" (shadow)" if count.shadow else "")
    return printable(count.name) + notes


def _used(count: RuleUsage) -> str:
    used = f"{count.used:,}/{count.limit:,}"
    if count.kind == "concurrent":
        return f"{used} held"
    return used if count.unit == REQUESTS else f"{used} {printable(count.unit)}"


def _when(count: RuleUsage) -> str:
    """Return when there is room again, and when the count is 0 again."""
    if count.frees_after is None:
        return "admits nothing, ever"
    # A place is free when its holder releases it; its lease says only when that will be at the latest.
    latest = " at most" if count.kind == "concurrent" else ""
    room = "room now" if not count.frees_after else f"frees in {span(count.frees_after)}{latest}"
    if not count.reset_after:
        return f"{room}, fresh"
    if count.kind == "calendar":
        return f"{room}, fresh at {_end_of_window(count.reset_after, count.timezone)}"
    return f"{room}, fresh in {span(count.reset_after)}{latest}"


def _end_of_window(seconds: float, timezone: str | None) -> str:
    """Return when a calendar window ends, by the clocks of its time zone."""
    zone = UTC if timezone is None or timezone == "UTC" else ZoneInfo(timezone)
    return f"{datetime.fromtimestamp(round(time.time() + seconds), zone):%Y-%m-%d %H:%M} {timezone}"


# reset


def _reset(options: argparse.Namespace) -> int:
    """Forget the counts, and return the exit code."""
    asked = _asked(options)
    with _views(options) as views:
        targets = [(view, key) for view in views for key in _key(view, asked)]
        if not targets:
            return 1
        if not options.yes and not _confirmed(asked, [view for view, _ in targets]):
            print("nothing was reset")
            return 1
        return max(_reset_one(view, key, asked) for view, key in targets)


def _key(view: View, asked: Asked) -> Iterator[Key | None]:
    """Yield the key to reset; print the reason if that cannot be done from here."""
    try:
        yield view.key(asked)
    except Unseen as reason:
        print(f"{view.name}: not reset: {reason}")


def _confirmed(asked: Asked, views: list[View]) -> bool:
    if not sys.stdin.isatty():
        raise Failure("there is no terminal to confirm on: add --yes to reset", code=2)
    names = ", ".join(view.name for view in views)
    print(f"What was counted for {printable(str(asked))} will be forgotten in: {names}")
    for view in views:
        for rule in view.shared:
            print(f"What was counted for everybody will be forgotten in: {view.name}, rule {rule}")
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _reset_one(view: View, key: Key | None, asked: Asked) -> int:
    """Reset one limiter and print the result; return 1 if it failed."""
    try:
        view.reset(key)
    except HeadgateError as error:
        print(f"{view.name}: not reset: {redact(str(error))}")
        return 1
    everybody = f", and for everybody in rule {' and '.join(view.shared)}" if view.shared else ""
    print(f"{view.name}: reset for {printable(str(asked))}{everybody}")
    return 0
