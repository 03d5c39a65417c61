"""A Redis and a PostgreSQL from wheels that do not outlive this process."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headgate.testing.servers import RedisServer, ServerError
from headgate_services.demo import DemoError

# Otherwise Ctrl-C waits until all data is on disk, and then deletes it.
_NOT_KEPT = {"fsync": "off", "full_page_writes": "off"}


@contextmanager
def running_servers(ready: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Run Redis and PostgreSQL; provide the URL of Redis without a database, and that of a PostgreSQL database.

    Redis needs a password, and PostgreSQL listens on a socket in a private folder only.

    Args:
        ready: Called with the name of each server once it answers.

    Raises:
        DemoError: One of them does not start.
    """
    password = secrets.token_hex(16)
    with ExitStack() as stack:
        try:
            redis = stack.enter_context(RedisServer(options=("--requirepass", password)))
            ready("Redis")
            from headgate.testing.postgres_server import PostgresServer  # takes a moment

            # Not in the folder of the demo: for root it runs as the user nobody, who must be able to reach it.
            folder = Path(tempfile.mkdtemp(prefix="headgate-demo-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            postgres = stack.enter_context(PostgresServer(settings=_NOT_KEPT, folder=folder))
            ready("PostgreSQL")
        except (OSError, ServerError) as error:
            raise DemoError(f"a server of the demo does not start: {error}") from error
        yield f"redis://:{password}@127.0.0.1:{redis.port}", postgres.url
