"""The SQL files, read as they lie beside this module."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_MIGRATION = re.compile(r"(\d{4})_(\w+)\.sql")


class Migration(NamedTuple):
    """One numbered step towards the schema."""

    number: int
    name: str
    text: str


def query(name: str) -> str:
    """Return the statement of that name in `queries.sql`."""
    return _queries()[name]


def schema() -> str:
    """Return `schema.sql`."""
    return resources.files(__name__).joinpath("schema.sql").read_text("utf-8")


def migrations() -> list[Migration]:
    """Return all migrations in order."""
    folder = resources.files(__name__).joinpath("migrations")
    found = [(match, file) for file in folder.iterdir() if (match := _MIGRATION.fullmatch(file.name))]
    return sorted(
        Migration(int(match[1]), match[2].replace("_", " "), file.read_text("utf-8")) for match, file in found
    )


@cache
def _queries() -> dict[str, str]:
    text = resources.files(__name__).joinpath("queries.sql").read_text("utf-8")
    _, *parts = _NAME.split(text)
    return {name: _without_comment(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _without_comment(body: str) -> str:
    lines = [line for line in body.splitlines() if not line.startswith("--")]
    return "\n".join(lines).strip()
