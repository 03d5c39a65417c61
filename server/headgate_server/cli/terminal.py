"""Colours, bars and small charts for a terminal."""

from __future__ import annotations

import os
from functools import partialmethod
from math import ceil
from typing import TextIO

_LEVELS = "▁▂▃▄▅▆▇█"


class Style:
    """Styles of text on a stream: coloured on a terminal that supports it, plain elsewhere.

    Args:
        stream: The output stream.
    """

    def __init__(self, stream: TextIO) -> None:
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.coloured = stream.isatty() and wanted
        self._has_blocks = _can_write(stream, _LEVELS + "░")

    def _styled(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.coloured and text else text

    bold = partialmethod(_styled, 1)
    dim = partialmethod(_styled, 2)
    red = partialmethod(_styled, 31)
    green = partialmethod(_styled, 32)
    yellow = partialmethod(_styled, 33)

    def bar(self, part: float, whole: float, width: int = 20) -> str:
        """Return a bar that is filled in proportion; a part above 0 is always visible."""
        share = min(1.0, part / whole) if whole else float(part > 0)
        filled = max(int(share * width), 1 if share else 0)
        full, empty = ("█", "░") if self._has_blocks else ("#", ".")
        colour = self.red if share == 1 else self.yellow if share >= 0.8 else self.green
        return colour(full * filled) + self.dim(empty * (width - filled))

    def stack(self, admitted: float, refused: float, highest: float, width: int = 20) -> str:
        """Return a bar of admitted and then refused decisions, in proportion to the highest bar."""
        full, empty = ("█", "░") if self._has_blocks else ("#", "x")
        total = admitted + refused
        length = max(int(total * width // highest), 1) if total else 0
        first = ceil(admitted * length / total) if total else 0
        rest = length - first
        return self.green(full * first) + self.red(empty * rest) + " " * (width - length)

    def history(self, values: list[float]) -> str:
        """Return a small chart, one character for each value; values above 0 are always visible."""
        highest = max(values, default=0)
        if not self._has_blocks:
            return "".join("#" if value else "." for value in values)
        return "".join(
            _LEVELS[ceil(value / highest * len(_LEVELS)) - 1] if value else " " for value in values
        )


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
