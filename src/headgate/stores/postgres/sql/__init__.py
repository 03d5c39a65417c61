"""The SQL files beside this module."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from headgate.migrations import Migration, read_migrations

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def query(name: str) -> str:
    """Return the statement of that name in `queries.sql`."""
    return _queries()[name]


def migrations() -> list[Migration]:
    """Return all migrations in order."""
    return read_migrations(resources.files(__name__).joinpath("migrations"))


@cache
def _queries() -> dict[str, str]:
    text = resources.files(__name__).joinpath("queries.sql").read_text("utf-8")
    _, *parts = _NAME.split(text)
    return {name: _without_comment(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _without_comment(body: str) -> str:
    lines = [line for line in body.splitlines() if not line.startswith("--")]
    return "\n".join(lines).strip()
