"""Data of the demo: a folder, and a Redis and a PostgreSQL from wheels, which stop with this process."""

from __future__ import annotations

import fcntl
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.testing.servers import RedisServer, ServerError
from headgate_services.demo import DemoError

if TYPE_CHECKING:
    from headgate.testing.postgres_server import PostgresServer

# Otherwise Ctrl-C waits until all data is on disk, and then deletes it.
_NOT_KEPT = {"fsync": "off", "full_page_writes": "off"}


@contextmanager
def data_folder(keep: Path | None) -> Iterator[Path]:
    """Provide a folder for files; only one demo at a time may use a kept one.

    Raises:
        DemoError: Another demo uses it, or it cannot be created.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="headgate-demo-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        lock = (keep / "lock").open("w")
    except OSError as error:
        raise DemoError(f"{keep}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DemoError(f"{keep}: another demo is using this folder") from error
        yield keep


@contextmanager
def running_servers(keep: Path | None, ready: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Run Redis and PostgreSQL; provide the URL of Redis without a database, and that of a PostgreSQL database.

    Redis needs a password, and PostgreSQL listens on a socket in a private folder only.

    Args:
        keep: A folder for the files of PostgreSQL; by default they are removed at the end.
        ready: Called with the name of each server once it answers.

    Raises:
        DemoError: One of them does not start.
    """
    password = secrets.token_hex(16)
    with ExitStack() as stack:
        try:
            redis = stack.enter_context(RedisServer(options=("--requirepass", password)))
            ready("Redis")
            postgres = stack.enter_context(_postgres(keep, stack))
            ready("PostgreSQL")
        except (OSError, ServerError) as error:
            raise DemoError(str(error)) from error
        yield f"redis://:{password}@127.0.0.1:{redis.port}", postgres.url


def _postgres(keep: Path | None, stack: ExitStack) -> PostgresServer:
    from headgate.testing.postgres_server import (
        PostgresServer,
    )  # starts slowly; Redis is already running by this time

    if keep is not None:
        return PostgresServer(folder=keep / "postgres")
    # Not in the folder of the demo: for root it runs as the user nobody, who must be able to reach it.
    folder = Path(tempfile.mkdtemp(prefix="headgate-demo-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return PostgresServer(settings=_NOT_KEPT, folder=folder)
