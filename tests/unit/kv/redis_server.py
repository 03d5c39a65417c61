"""A real Redis server: from `HEADGATE_TEST_REDIS_URL`, or started by the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from headgate.testing.servers import RedisServer


@contextmanager
def redis_url() -> Iterator[str]:
    """Yield the URL of a server."""
    if given := os.environ.get("HEADGATE_TEST_REDIS_URL"):
        yield given
        return
    with RedisServer() as server:
        yield server.url


def with_own_prefix(url: str) -> str:
    """Return the URL with a unique prefix: the server may be shared with other applications and test runs."""
    return f"{url}{'&' if '?' in url else '?'}prefix={uuid4().hex}:"
