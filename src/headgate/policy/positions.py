"""Positions of the values of a TOML text.

`tomllib` reports positions of syntax errors, but not of values, which messages like "line 7, column 12: unknown unit" need.
The text was accepted by `tomllib` before, so this code does not check the syntax.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from itertools import count

Path = tuple[str | int, ...]
Position = tuple[int, int]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SKIP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5} | '{3}.*?'{3,5} | "(?:\\.|[^"\\])*" | '[^']*' ''', re.DOTALL | re.VERBOSE
)


def positions(text: str) -> dict[Path, Position]:
    """Return line and column, both from 1, of every table header and value by its path."""
    return _Walk(text).document()


class _Walk:
    """Scanner of a valid TOML text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.found: dict[Path, Position] = {}

    def document(self) -> dict[Path, Position]:
        table: Path = ()
        counts: dict[Path, int] = {}
        self._take(_SKIP)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                start, size = self.at, 2 if self.text.startswith("[[", self.at) else 1
                self.at += size
                table = self._resolve(self._keys(), counts)
                if size == 2:
                    counts[table] = counts.get(table, -1) + 1
                    table = (*table, counts[table])
                self._note_header(table, start)
                self.at = self.text.index("]", self.at) + size
            else:
                self._pair(table)
            self._take(_SKIP)
        return self.found

    def _resolve(self, keys: Path, counts: dict[Path, int]) -> Path:
        """Return the path of a header; inside an array of tables it refers to the last table so far."""
        path: Path = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            if path in counts and position < len(keys) - 1:
                path = (*path, counts[path])
        return path

    def _pair(self, table: Path) -> None:
        path = (*table, *self._keys())
        self.at = self.text.index("=", self.at) + 1
        self._take(_BLANK)
        self._value(path)

    def _keys(self) -> Path:
        """Read a key, which may be dotted."""
        keys: list[str] = []
        while True:
            self._take(_BLANK)
            keys.append(_unquoted(self._take(_STRING)) if self.text[self.at] in "\"'" else self._take(_BARE))
            self._take(_BLANK)
            if self.text[self.at] != ".":
                return tuple(keys)
            self.at += 1

    def _value(self, path: Path) -> None:
        self._note(path, self.at)
        first = self.text[self.at]
        if first == "[":
            self._items("]", lambda index: self._value((*path, index)))
        elif first == "{":
            self._items("}", lambda _: self._pair(path))
        else:
            self._take(_STRING if first in "\"'" else _SCALAR)

    def _items(self, closing: str, read: Callable[[int], None]) -> None:
        """Read comma-separated items between brackets; `read` reads one item, by its index."""
        self.at += 1
        self._take(_SKIP)
        for index in count():
            if self.text[self.at] == closing:
                break
            read(index)
            self._take(_SKIP)
            if self.text[self.at] == ",":
                self.at += 1
                self._take(_SKIP)
        self.at += 1

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Match a pattern at the current position, skip the match and return it."""
        match = pattern.match(self.text, self.at)
        assert match is not None, "tomllib accepted this text"
        self.at = match.end()
        return match.group()

    def _note_header(self, table: Path, at: int) -> None:
        """Store the position of a table, and of its parents if they have none yet."""
        for end in range(1, len(table) + 1):
            self._note(table[:end], at)

    def _note(self, path: Path, at: int) -> None:
        line_start = self.text.rfind("\n", 0, at) + 1
        self.found.setdefault(path, (self.text.count("\n", 0, at) + 1, at - line_start + 1))


def _unquoted(string: str) -> str:
    """Return the text of a quoted key, with its escapes resolved."""
    text: str = tomllib.loads(f"key = {string}")["key"]
    return text
