"""A stub of the server: fixed answers over HTTP, and a record of the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    body: Any
    token: str | None


class Stub:
    """Answers by path, and the requests so far.

    Attributes:
        answers: By path: status and body. Text is sent unchanged, everything else as JSON.
        asked: All requests so far.
    """

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[Asked] = []


@contextmanager
def serving() -> Iterator[Stub]:
    """Run a stub on a free port of the loopback interface."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            stub.asked.append(Asked(self.command, self.path, body, self.headers["Authorization"]))
            status, answer = stub.answers.get(
                self.path, (404, {"title": "Not Found", "detail": "no such path"})
            )
            data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()


def events(*named: tuple[str, Any]) -> str:
    """Return events as the server sends them."""
    return "retry: 1000\n\n" + "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in named)
