"""Fixtures for tests of live policies."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headgate.policy import AsyncLivePolicy, LivePolicy
from headgate.testing import FakeClock
from tests.unit.flavours import done


class Author:
    """Writer of a policy file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str) -> None:
        self.path.write_text(textwrap.dedent(text))

    def limit(self, quota: str, store: str = "memory://") -> None:
        """Write a file with one limiter, `login`, of one rule."""
        self.write(f'[limiters.login]\nrules = ["{quota}"]\nstore = "{store}"\n')


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path / "headgate.toml")


@pytest.fixture(params=[LivePolicy, AsyncLivePolicy], ids=["sync", "async"])
async def follow(
    request: pytest.FixtureRequest, author: Author, clock: FakeClock
) -> AsyncIterator[Callable[..., Any]]:
    """A function that opens the live policy of the author's file, sync and async; call it with `tests.unit.flavours`."""
    opened: list[Any] = []

    def open_live(text: str | None = None, **arguments: Any) -> Any:
        if text is not None:
            author.write(text)
        opened.append(request.param.from_file(author.path, **{"clock": clock, **arguments}))
        return opened[-1]

    yield open_live
    for live in opened:
        await done(live.aclose() if isinstance(live, AsyncLivePolicy) else live.close())
