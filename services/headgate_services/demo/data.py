"""Where the demo keeps its data: a folder, and a Redis from a wheel, which does not outlive this process."""

from __future__ import annotations

import fcntl
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.testing.servers import RedisServer, ServerError
from headgate_services.demo.errors import DemoError


@contextmanager
def running_redis() -> Iterator[str]:
    """Run a Redis that is empty at the start and knows a password; provide its URL, without a database.

    Raises:
        DemoError: It does not start.
    """
    password = secrets.token_hex(16)
    server = RedisServer(options=("--requirepass", password))
    try:
        try:
            server.start()
        except ServerError as error:
            raise DemoError(str(error)) from error
        yield f"redis://:{password}@127.0.0.1:{server.port}"
    finally:
        server.stop()


@contextmanager
def data_folder(keep: Path | None) -> Iterator[Path]:
    """Provide a folder for everything else; only one demo at a time may use a kept one.

    Raises:
        DemoError: Another demo has it, or it cannot be made.
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
