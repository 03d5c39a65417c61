"""Fixtures of the mail service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.apps.mail.support import Service, running

Start = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """A function that starts a service in this process with a fake clock."""
    async with AsyncExitStack() as stack:

        async def start_service(**options: Any) -> Service:
            options.setdefault("database_url", f"sqlite:///{tmp_path / 'mail.db'}")
            return await stack.enter_async_context(running(**options))

        yield start_service
