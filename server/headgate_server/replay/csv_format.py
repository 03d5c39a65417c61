"""Lines of comma-separated values, one request to a line."""

from __future__ import annotations

import csv
from collections.abc import Callable

from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.expressions import Getter, Row, first_of
from headgate_server.replay.formats import of_request, of_target, present, unknown_field
from headgate_server.replay.json_format import ANY

_DELIMITERS = ",;\t|"


class CsvFormat:
    """Values between commas, semicolons, tabs or bars, whichever the header has most of.

    Args:
        columns: The names of the columns; by default the first line has them.
        time: The column with the time, instead of those that are known.
    """

    name = "csv"

    def __init__(self, columns: str, time: str | None = None) -> None:
        self._delimiter = max(_DELIMITERS, key=columns.count)
        try:
            names = next(csv.reader([columns], delimiter=self._delimiter), [])
        except csv.Error:
            names = []
        self.columns = [name.strip().removeprefix("\ufeff") for name in names]
        self._time = (time,) if time else ANY["time"]
        if not self.columns or len(set(self.columns)) != len(self.columns) or not all(self.columns):
            raise ReplayError(
                f"the first line of a CSV log names its columns, each once, which {columns[:200]!r} does not; "
                f"name them as --format csv:time,client,path"
            )

    def read(self, line: str) -> Row:
        try:
            row = next(csv.reader((line,), delimiter=self._delimiter, strict=True), [])
        except csv.Error:
            raise BadLine("not CSV") from None
        if len(row) != len(self.columns):
            raise BadLine(f"not {len(self.columns)} columns")
        return row

    def time(self) -> Callable[[Row], object]:
        lowered = [name.lower() for name in self.columns]
        for name in self._time:
            if name.lower() in lowered:
                index = lowered.index(name.lower())
                return lambda row: row[index].strip()
        raise ReplayError(
            f"no column is known as the time; name it with --time. There is {', '.join(self.columns)}"
        )

    def getter(self, name: str) -> Getter:
        getters = [
            self._at(alias) for alias in dict.fromkeys((name, *ANY.get(name, ()))) if alias in self.columns
        ]
        if name in ("path", "query") and self._has("target"):
            getters.append(of_target(name, self.getter("target")))
        if name in ("method", "target") and "request" in self.columns:
            getters.append(of_request(name, self._at("request")))
        if not getters:
            raise unknown_field(name, self.columns, self.name)
        return first_of(getters)

    def _has(self, name: str) -> bool:
        return any(alias in self.columns for alias in (*ANY[name], "request"))

    def _at(self, name: str) -> Getter:
        index = self.columns.index(name)
        return lambda row: present(row[index].strip())
