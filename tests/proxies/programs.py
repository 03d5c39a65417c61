"""Real proxies in front of a small application, configured as the documentation shows, and the server that they ask."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import httpx

from headgate.testing.servers import find_free_port
from tests.server.loopback import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
LONGEST_WAIT = 30.0
"""Seconds after which something hangs."""

LIMIT = 10
TOKEN = "a-token-of-a-proxy"
TOKENS = f"""
[server.tokens.proxy]
sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
may = ["gate"]
"""


def block(page: str, language: str, containing: str = "") -> str:
    """Return the first block of a language on a page of the documentation that contains a text."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return next(each for each in blocks if containing in each)


class Application(BaseHTTPRequestHandler):
    """Answers 200, and 403 at /forbidden."""

    protocol_version = "HTTP/1.1"
    wbufsize = 65_536  # a response in one packet: without this, each takes 40 ms

    def do_GET(self) -> None:
        body = b"the application"
        self.send_response(403 if self.path == "/forbidden" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Tokens", "4")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class Ports(NamedTuple):
    """The ports of all programs, in place of those in the documentation."""

    app: int
    proxy: int
    http: int
    grpc: int

    def put_into(self, text: str) -> str:
        """Return a configuration with these ports."""
        for shown, own in (
            ("9000", self.app),
            ("8000", self.proxy),
            ("10000", self.proxy),
            ("8080", self.http),
        ):
            text = re.sub(rf"(?<=[: ]){shown}\b", str(own), text)
        return re.sub(r"(?<=[: ])8081\b", str(self.grpc), text)


def headgate_server(folder: Path, ports: Ports, policy: str) -> ServerProcess:
    """Return the server, which can be killed and started again on the same ports."""
    config = folder / "headgate.toml"
    store = f'[store]\nurl = "sqlite:///{folder / "limits.db"}"\n'
    # Hours, so that no unit expires during a test.
    config.write_text(store + policy.replace("/minute", "/hour"))
    grpc_port = ports.grpc if "[envoy]" in policy else None
    return ServerProcess(config, folder / "headgate.log", ports.http, grpc_port=grpc_port)


class Setting:
    """A proxy in front of the application, and the server that it asks.

    Attributes:
        headgate: The server.
        app_url: The address of the application.
        client: Asks the proxy.
    """

    def __init__(self, headgate: ServerProcess, app_url: str, url: str) -> None:
        self.headgate = headgate
        self.app_url = app_url
        self.client = httpx.Client(base_url=url, timeout=LONGEST_WAIT)

    def get(self, user: str, path: str = "/", **fields: str) -> httpx.Response:
        """Send a request of a user."""
        return self.client.get(path, headers={"x-user": user, **fields})

    def statuses(self, user: str, number: int, *, at_once: int = 1) -> Counter[int]:
        """Return how often each status answers requests of a user."""
        with ThreadPoolExecutor(at_once) as pool:
            return Counter(pool.map(lambda _: self.get(user).status_code, range(number)))


@contextmanager
def setting(folder: Path, policy: str, write: Callable[[Path, Ports], Sequence[str]]) -> Iterator[Setting]:
    """Start everything.

    Args:
        folder: A folder for files.
        policy: The policy of the server.
        write: Writes the configuration of the proxy into a folder, and returns the command that starts it.
    """
    application = ThreadingHTTPServer(("127.0.0.1", 0), Application)
    threading.Thread(target=application.serve_forever, daemon=True).start()
    ports = Ports(application.server_port, find_free_port(), find_free_port(), find_free_port())
    headgate = headgate_server(folder, ports, policy)
    environment = {
        **os.environ,
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    with (folder / "proxy.log").open("w") as log:
        command = write(folder, ports)
        headgate.start()
        proxy = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
        found = Setting(headgate, f"http://127.0.0.1:{ports.app}", f"http://127.0.0.1:{ports.proxy}")
        try:
            wait_until(lambda: _answers(found, proxy), lambda: (folder / "proxy.log").read_text()[-4_000:])
            yield found
        finally:
            found.client.close()
            _stop(proxy)
            headgate.kill()
            application.shutdown()
            application.server_close()


def _stop(proxy: subprocess.Popen[bytes]) -> None:
    """Ask a proxy to stop, so that it ends its workers; kill it if that takes too long."""
    proxy.terminate()
    try:
        proxy.wait(LONGEST_WAIT / 3)
    except subprocess.TimeoutExpired:
        proxy.kill()
        proxy.wait()


def _answers(found: Setting, proxy: subprocess.Popen[bytes]) -> bool:
    assert proxy.poll() is None, "the proxy ended"
    try:
        return found.get("start").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], log: Callable[[], str] = str) -> None:
    """Return as soon as something is true; fail if that takes absurdly long."""
    give_up = time.monotonic() + LONGEST_WAIT
    try:
        while not condition():
            assert time.monotonic() < give_up, "it never happened"
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log()}") from error
