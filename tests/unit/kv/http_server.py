"""HTTP on this machine only: serving an application for as long as a block runs, and clients that start quickly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import certifi
import pytest
import uvicorn
from fastapi import FastAPI


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve the application from a thread and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # from here on, connections wait to be accepted
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def few_authorities(folder: Path) -> Iterator[None]:
    """Let httpx know one certificate authority: nothing here speaks TLS, and reading all takes longer than most tests."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    authority = folder / "authority.pem"
    authority.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority))
        yield
