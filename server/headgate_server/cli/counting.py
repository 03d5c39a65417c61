"""What is counted for one key, and forgetting it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from headgate.errors import HeadgateError
from headgate.keys import Key
from headgate.observe.redaction import redact
from headgate.rules import SHARED
from headgate_server.cli.common import Failure, read_policy
from headgate_server.cli.remote import Server
from headgate_server.cli.terminal import Style, duration, printable
from headgate_server.cli.views import Asked, Count, Unseen, View, views_of_policy, views_of_server


def _asked(options: argparse.Namespace) -> Asked:
    if (options.key is None) == (not options.scope):
        raise Failure("say whose counts are meant: KEY, or --scope user=42", code=2)
    return Asked(options.key, dict(options.scope))


@contextmanager
def _views(options: argparse.Namespace) -> Iterator[list[View]]:
    """Give the limiters that are asked for."""
    if options.server is not None:
        yield _named(views_of_server(Server(options.server, options.token)), options.limiter)
        return
    with views_of_policy(read_policy(options.config)) as views:
        yield _named(views, options.limiter)


def _named(views: list[View], names: list[str]) -> list[View]:
    known = [view.name for view in views]
    for name in names:
        if name not in known:
            raise Failure(f"there is no limiter {name!r}; there is {', '.join(map(repr, known))}")
    return [view for view in views if not names or view.name in names]


# inspect


@dataclass(frozen=True, slots=True)
class _Seen:
    """What could be seen of one limiter."""

    name: str
    store: str
    results: list[Count]
    error: str | None
    failed: bool

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "results": [asdict(count) for count in self.results], "error": self.error}


def inspect(options: argparse.Namespace) -> int:
    """Show what is counted, and return the exit code."""
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


def _title(count: Count) -> str:
    notes = (" (everybody)" if count.scope == SHARED else "") + (" (shadow)" if count.shadow else "")
    return printable(count.name) + notes


def _used(count: Count) -> str:
    return f"{count.used:,}/{count.limit:,}"


def _when(count: Count) -> str:
    """Return when there is room again, and when nothing is counted any more."""
    if count.frees_after is None:
        return "admits nothing, ever"
    room = "room now" if not count.frees_after else f"frees in {duration(count.frees_after)}"
    fresh = f"fresh in {duration(count.reset_after)}" if count.reset_after else "fresh"
    return f"{room}, {fresh}"


# reset


def reset(options: argparse.Namespace) -> int:
    """Forget what was counted, and return the exit code."""
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
    """Yield the key to reset; none if that cannot be done from here, which is said."""
    try:
        yield view.key(asked)
    except Unseen as reason:
        print(f"{view.name}: not reset: {reason}")


def _confirmed(asked: Asked, views: list[View]) -> bool:
    if not sys.stdin.isatty():
        raise Failure("nobody can be asked here: add --yes to reset", code=2)
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
    """Reset one limiter and say so; return 1 if it failed."""
    try:
        view.reset(key)
    except HeadgateError as error:
        print(f"{view.name}: not reset: {redact(str(error))}")
        return 1
    everybody = f", and for everybody in rule {' and '.join(view.shared)}" if view.shared else ""
    print(f"{view.name}: reset for {printable(str(asked))}{everybody}")
    return 0
