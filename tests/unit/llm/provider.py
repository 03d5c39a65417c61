"""A provider on a local port, for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from benchmarks.provider import Limits, Provider


@contextmanager
def serving(limits: Limits | None = None) -> Iterator[tuple[Provider, str]]:
    """Run a provider in a thread; yield it and its URL."""
    provider = Provider(limits or Limits(), time.monotonic)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(provider, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield provider, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
