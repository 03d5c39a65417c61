"""`top`: the decisions of a running server, every second."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headgate import StoreUnavailable
from headgate_server.cli.common import DEFAULT_SERVER, Commands, add_server
from headgate_server.cli.terminal import Style
from headgate_server.formatting import printable

if TYPE_CHECKING:
    from headgate.client import ServerStore
    from headgate_server.wire import Tick

_SECONDS_SHOWN = 60
_LONGEST_NAME = 24
_BAR = 20
_PAUSE = 1.0
"""Seconds until the next attempt to connect to a lost server."""

# Control sequences. The terminal cuts off long lines, because it knows the width of its characters.
_START = "\x1b[?25l\x1b[?7l\x1b[2J"  # no cursor, no line wrap, a clear screen
_END = "\x1b[?7h\x1b[?25h\n"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add(commands: Commands) -> None:
    """Add the command."""
    top = commands.add(
        "top",
        "watch the decisions of a server",
        _top,
        about="On a terminal the screen is redrawn every second until Ctrl-C; otherwise each second is printed as one line. "
        "The most refused keys are shown only if the policy file allows it ([server] top_keys).",
        examples=[
            "headgate top",
            "headgate top --once",
            "HEADGATE_TOKEN=… headgate top --server https://limits.example.org >decisions.log",
        ],
    )
    add_server(top, default=DEFAULT_SERVER)
    top.add_argument("--once", action="store_true", help="print one screen and exit")


def _top(options: argparse.Namespace) -> None:
    from headgate_server.cli.views import open_server, valid_replies

    server = open_server(options.server, options.token)
    screen = TopScreen(server.endpoint.name, Style(sys.stdout))
    with suppress(KeyboardInterrupt), server, valid_replies(server):  # Ctrl-C ends it
        if options.once:
            next(_followed(server, screen))
            print("\n".join(screen.lines()))
        elif sys.stdout.isatty():
            with _full_screen():
                _redraw(server, screen)
        else:
            for tick in _followed(server, screen):
                print(line(tick), flush=True)


def _followed(server: ServerStore, screen: TopScreen) -> Iterator[Tick]:
    """Add every second to the screen, and yield it.

    Raises:
        HeadgateError: The server failed or ended.
    """
    import msgspec

    from headgate_server.wire import Figures, History, Tick

    for name, data in server.events():
        if name == "history":
            for second in msgspec.convert(data, History).ticks:
                limiters = {name: Figures(*row) for name, row in second.limiters.items()}
                known = Tick(second.time, limiters, {}, [], [], seconds=second.seconds)
                screen.remember(known)
        elif name == "tick":
            tick = msgspec.convert(data, Tick)
            screen.remember(tick)
            yield tick
    raise StoreUnavailable(f"{server.endpoint.name} closed the connection")


def _redraw(server: ServerStore, screen: TopScreen) -> None:
    """Draw the screen every second; reconnect if the connection is lost."""
    while True:
        try:
            for _ in _followed(server, screen):
                _draw(screen.lines())
        except StoreUnavailable as error:
            if screen.is_empty:
                raise
            _draw([*screen.lines(), "", f"{error}; reconnecting"])
            time.sleep(_PAUSE)


@contextmanager
def _full_screen() -> Iterator[None]:
    sys.stdout.write(_START)
    try:
        yield
    finally:
        sys.stdout.write(_END)
        sys.stdout.flush()


def _draw(lines: list[str]) -> None:
    fitting = lines[: shutil.get_terminal_size().lines - 1]
    sys.stdout.write(_HOME + "".join(f"{text}{_CLEAR_LINE}\n" for text in fitting) + _CLEAR_BELOW)
    sys.stdout.flush()


def line(tick: Tick) -> str:
    """Return one second as a line."""
    limiters = ", ".join(
        f"{printable(name)} {counts.admitted} admitted {counts.refused} refused"
        + (f" {counts.degraded} degraded" if counts.degraded else "")
        for name, counts in tick.limiters.items()
    )
    span = f" in {tick.seconds} s" if tick.seconds > 1 else ""
    return f"{_clock(tick.time)}  {limiters or 'no decisions'}{span}"


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%H:%M:%S}"


class TopScreen:
    """The last minute of a server as text.

    Args:
        title: The heading.
        style: Colours and bars.
    """

    def __init__(self, title: str, style: Style) -> None:
        self._title = title
        self._style = style
        self._ticks: deque[Tick] = deque(maxlen=_SECONDS_SHOWN)

    @property
    def is_empty(self) -> bool:
        return not self._ticks

    def remember(self, tick: Tick) -> None:
        """Add a second; it replaces the same and later ones."""
        while self._ticks and self._ticks[-1].time >= tick.time:
            self._ticks.pop()
        self._ticks.append(tick)

    def lines(self) -> list[str]:
        """Return the screen of the newest second."""
        tick = self._ticks[-1]
        workers = f"{tick.workers} worker{'s' if tick.workers != 1 else ''}"
        lines = [f"{self._style.bold('headgate top')}  {self._title}  {_clock(tick.time)}  {workers}"]
        if tick.policy_error:
            error = f"the policy file is invalid, the previous policy stays in force: {tick.policy_error}"
            lines.append(self._style.red(printable(error)))
        for part in (self._limiters, self._stores, self._shadow, self._keys):
            shown = part(tick)
            lines += ["", *shown] if shown else []
        return [text.rstrip() for text in lines]

    def _limiters(self, tick: Tick) -> list[str]:
        if not tick.totals:
            return ["no decisions yet"]
        highest = max(sum(_rates(tick, name)) for name in tick.totals)
        heading = f"{'limiter':<{_LONGEST_NAME}}  admitted/s   refused/s  {'':<{_BAR}}  last minute"
        return [self._style.dim(heading), *(self._limiter(tick, name, highest) for name in tick.totals)]

    def _limiter(self, tick: Tick, name: str, highest: float) -> str:
        counts, (admitted, refused) = tick.limiters.get(name), _rates(tick, name)
        bar = self._style.stack(admitted, refused, highest, _BAR)
        history = self._style.history([sum(_rates(past, name)) for past in self._ticks])
        degraded = f"  {self._style.yellow('store is down')}" if counts and counts.degraded else ""
        held = ", ".join(f"{n:,} {printable(unit)}" for unit, n in tick.held.get(name, {}).items() if n)
        held = f"  held: {held}" if held else ""
        return (
            f"{_cut(name)}  {_number(admitted):>10}  {_number(refused):>10}  {bar}  {history}{held}{degraded}"
        )

    def _stores(self, tick: Tick) -> list[str]:
        green, red = self._style.green, self._style.red
        lines = []
        for store in tick.stores:
            lines.append(
                f"{_cut(store.limiter)}  {green('up  ') if store.up else red('down')}  breaker {store.breaker}, "
                f"failures {store.failures:,}  {self._style.dim(printable(store.store))}"
            )
            if store.reason is not None:
                since = "" if store.since is None else f"since {_clock(store.since)}: "
                lines.append(f"{'':<{_LONGEST_NAME}}  {since}{printable(store.reason)}")
        return [self._style.dim("store of"), *lines] if lines else []

    def _shadow(self, tick: Tick) -> list[str]:
        lines = [
            f"{_cut(rule.limiter)}  {rule.refused:>10,} of {rule.asked:,}"
            f"  {printable(rule.words)}  {self._style.dim(printable(rule.rule))}"
            for rule in tick.shadow
        ]
        heading = self._style.dim(f"{'shadow rule of':<{_LONGEST_NAME}}  would have refused")
        return [heading, *lines] if lines else []

    def _keys(self, tick: Tick) -> list[str]:
        lines = [f"{_cut(top.limiter)}  {top.refused:>10,}  {printable(top.key)}" for top in tick.top or ()]
        return [self._style.dim("most refused keys of"), *lines] if lines else []


def _rates(tick: Tick, name: str) -> tuple[float, float]:
    """Return the admitted and refused calls per second of a limiter."""
    counts = tick.limiters.get(name)
    if counts is None:
        return 0.0, 0.0
    return counts.admitted / tick.seconds, counts.refused / tick.seconds


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 or rate.is_integer() else f"{rate:.2g}"


def _cut(name: str) -> str:
    text = printable(name)
    return f"{text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + '…':<{_LONGEST_NAME}}"
