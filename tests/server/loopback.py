"""Servers on a loopback port: one in a thread, and one in separate processes that can be killed."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGTERM
from types import MappingProxyType
from typing import Any

import uvicorn

from headgate import Rule
from headgate.clock import Clock
from headgate.policy import AsyncLivePolicy, Policy
from headgate.policy.model import LimiterPolicy, ServerPolicy
from headgate.testing.servers import find_free_port
from headgate_server import make_app
from tests.integration.waiting import until

LONGEST_WAIT = 30.0
"""Seconds after which something hangs."""

LARGEST_BODY = 1_000_000

ESTABLISHED = "01"
"""As /proc/net/tcp calls it."""


@contextlib.contextmanager
def no_room_for_files(pid: int) -> Iterator[None]:
    """Prevent a process from writing files within a block."""
    usual = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has given up
            resource.prlimit(pid, resource.RLIMIT_FSIZE, usual)


def limiter_policy(name: str, rules: tuple[Rule, ...], **options: Any) -> LimiterPolicy:
    """Return the policy of a limiter, as a file would have it."""
    usual: dict[str, Any] = {
        "shadow": (),
        "store": "memory://",
        "on_store_error": "open",
        "deadline": None,
        "headers": "both",
        "default_tier": None,
        "overrides": MappingProxyType({}),
    }
    return LimiterPolicy(name=name, rules=rules, **{**usual, **options})


def policy_of(*limiters: LimiterPolicy, **server: Any) -> Policy:
    """Return a policy with these limiters."""
    return Policy(
        limiters=MappingProxyType({limiter.name: limiter for limiter in limiters}),
        server=ServerPolicy(**{"largest_body": LARGEST_BODY, **server}),
    )


class ThreadedServer:
    """Serves a policy from a thread of this process.

    Attributes:
        live: The policy in force.
        url: Its address.
    """

    def __init__(self, policy: Policy, clock: Clock | None = None) -> None:
        self.live = AsyncLivePolicy(policy, clock=clock)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(self.live), log_config=None, access_log=False, lifespan="on", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    def __enter__(self) -> ThreadedServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join(LONGEST_WAIT)
        self._listener.close()
        assert not self._thread.is_alive(), "the server hangs"

    def until_no_connections(self) -> None:
        """Return when all are closed."""
        until(lambda: not self.connections)

    def use(self, policy: Policy) -> None:
        """Put another policy in force, as a reload does."""
        self.live._use(policy)


class ServerProcess:
    """Serves a policy file in separate processes, always on the same port.

    Args:
        config: The file, in whose folder it runs.
        log: The file with its log; `None` for no log.
        port: The port; `None` for any free one.
        arguments: Further arguments of `serve`.

    Attributes:
        config: The file.
        url: Its address.
    """

    def __init__(
        self, config: Path, log: Path | None = None, port: int | None = None, **arguments: object
    ) -> None:
        self._port = find_free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self._port}"
        self.config = config
        self._log = log
        self._arguments = {"port": self._port, **arguments}
        self._process: subprocess.Popen[str] | None = None
        self._environment = {**os.environ, "TMPDIR": str(self.temporary)}

    def start(self) -> ServerProcess:
        """Start it, and return once it answers."""
        self.temporary.mkdir(exist_ok=True)
        code = f"from headgate_server import serve; serve({str(self.config)!r}, **{self._arguments!r})"
        with (self._log or Path(os.devnull)).open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", code],
                cwd=self.config.parent,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._process.stdout is not None
        greeting = self._process.stdout.readline()
        assert "listening" in greeting, f"{greeting}{self.log}"
        return self

    @property
    def temporary(self) -> Path:
        """Its folder for temporary files."""
        return self.config.parent / "tmp"

    @property
    def log(self) -> str:
        """Its log so far."""
        return self._log.read_text() if self._log is not None else ""

    @property
    def pid(self) -> int:
        """Number of its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def workers(self) -> list[int]:
        """Numbers of the processes that it has started."""
        stats = [_stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")]
        return [int(stat[0]) for stat in stats if stat and int(stat[2]) == self.pid and stat[1] != "Z"]

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it."""
        self.signal(SIGKILL)
        self.wait()

    def kill_during_a_call(self) -> None:
        """Wait until a stopped server has a request that it has not read, and kill it then."""
        until(self._has_unread_bytes)
        self.kill()

    def _has_unread_bytes(self) -> bool:
        """Return whether a connection has unread bytes."""
        rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        arrived = (row.split()[1:5] for row in rows)
        return any(
            local.endswith(f":{self._port:04X}") and state == ESTABLISHED and int(queues.split(":")[1], 16)
            for local, _, state, queues in arrived
        )

    def stop(self, number: int = SIGTERM) -> tuple[int, str]:
        """Ask it to stop, also if it is suspended; return its exit code and the rest of its output."""
        self.signal(SIGCONT)
        self.signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and the rest of its output."""
        assert self._process is not None
        output, _ = self._process.communicate(timeout=LONGEST_WAIT)
        return self._process.returncode, output

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()


def serving(folder: Path, policy: str, *, workers: int = 1) -> ServerProcess:
    """Return a server with a policy, to be used as a context manager."""
    config = folder / "headgate.toml"
    config.write_text(policy)
    return ServerProcess(config, folder / "log.txt", workers=workers)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    stat = _stat(pid)
    return bool(stat) and stat[1] != "Z"


def _stat(pid: int) -> list[str]:
    """Return number, state and parent of a process; nothing if it is gone."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [str(pid), *about.rpartition(")")[2].split()[:2]]
