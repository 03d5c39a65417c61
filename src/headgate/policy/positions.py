"""Where each value of a TOML text stands.

`tomllib` says where a syntax error is, but not where a value came from; for "line 7, column 12: no such unit" that is
needed too. This reads a text that `tomllib` has accepted already, so it need only find its way, not judge.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]
Position = tuple[int, int]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SKIP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_STRINGS = (
    re.compile(r'"""(?:\\.|[^\\])*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:\\.|[^"\\])*"'),
    re.compile(r"'[^']*'"),
)


def positions(text: str) -> dict[Path, Position]:
    """Return line and column, both from 1, of every table header and value by its path."""
    return _Walk(text).document()


class _Walk:
    """Walks a valid TOML text from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.found: dict[Path, Position] = {}

    def document(self) -> dict[Path, Position]:
        table: Path = ()
        counts: dict[Path, int] = {}
        self._skip()
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                start = self.at
                self.at += 2
                path = self._resolve(self._keys(), counts)
                counts[path] = counts.get(path, -1) + 1
                table = (*path, counts[path])
                self._note_header(table, start)
                self.at = self.text.index("]]", self.at) + 2
            elif self.text[self.at] == "[":
                start = self.at
                self.at += 1
                table = self._resolve(self._keys(), counts)
                self._note_header(table, start)
                self.at = self.text.index("]", self.at) + 1
            else:
                self._pair(table)
            self._skip()
        return self.found

    def _resolve(self, keys: Path, counts: dict[Path, int]) -> Path:
        """Return the path of a header: inside an array of tables it speaks of the last table so far."""
        path: Path = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            if path in counts and position < len(keys) - 1:
                path = (*path, counts[path])
        return path

    def _pair(self, table: Path) -> None:
        path = (*table, *self._keys())
        self.at = self.text.index("=", self.at) + 1
        self._blank()
        self._value(path)

    def _keys(self) -> Path:
        """Read a key, perhaps dotted."""
        keys: list[str] = []
        while True:
            self._blank()
            if self.text[self.at] in "\"'":
                keys.append(self._string()[1:-1])
            else:
                match = _BARE.match(self.text, self.at)
                assert match is not None, "tomllib accepted this key"
                keys.append(match.group())
                self.at = match.end()
            self._blank()
            if self.text[self.at] != ".":
                return tuple(keys)
            self.at += 1

    def _value(self, path: Path) -> None:
        self._note(path, self.at)
        first = self.text[self.at]
        if first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        elif first in "\"'":
            self._string()
        else:
            match = _SCALAR.match(self.text, self.at)
            assert match is not None, "tomllib accepted this value"
            self.at = match.end()

    def _array(self, path: Path) -> None:
        self.at += 1
        self._skip()
        index = 0
        while self.text[self.at] != "]":
            self._value((*path, index))
            index += 1
            self._skip()
            if self.text[self.at] == ",":
                self.at += 1
                self._skip()
        self.at += 1

    def _inline_table(self, path: Path) -> None:
        self.at += 1
        self._skip()
        while self.text[self.at] != "}":
            self._pair(path)
            self._skip()
            if self.text[self.at] == ",":
                self.at += 1
                self._skip()
        self.at += 1

    def _string(self) -> str:
        match = next(found for pattern in _STRINGS if (found := pattern.match(self.text, self.at)))
        self.at = match.end()
        return match.group()

    def _skip(self) -> None:
        self.at = self._end(_SKIP)

    def _blank(self) -> None:
        self.at = self._end(_BLANK)

    def _end(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, self.at)
        return match.end() if match else self.at

    def _note_header(self, table: Path, at: int) -> None:
        """Note where a table begins, and all that it is the first table in."""
        for end in range(1, len(table) + 1):
            self._note(table[:end], at)

    def _note(self, path: Path, at: int) -> None:
        line_start = self.text.rfind("\n", 0, at) + 1
        self.found.setdefault(path, (self.text.count("\n", 0, at) + 1, at - line_start + 1))
