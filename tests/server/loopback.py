"""Servers on a loopback port: one in a thread, and one in a separate process that can be killed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvicorn

from headgate import Rule
from headgate.clock import Clock
from headgate.policy import AsyncLivePolicy, Policy
from headgate.policy.model import LimiterPolicy, ServerPolicy
from headgate.testing.servers import find_free_port
from headgate_server import make_app

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


def until(condition: Callable[[], object]) -> None:
    """Return as soon as something is true; fail if that takes absurdly long."""
    give_up = time.monotonic() + LONGEST_WAIT
    while not condition():
        assert time.monotonic() < give_up, "it never came to be"


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
    """Serves a policy file in a separate process, always on the same port.

    Attributes:
        url: Its address.
    """

    def __init__(
        self, config: Path, environment: Mapping[str, str] | None = None, *, is_logged: bool = True
    ) -> None:
        self._port = find_free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._config = config
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self._log = None if is_logged else subprocess.DEVNULL

    def start(self) -> ServerProcess:
        """Start it, and return once it answers."""
        code = f"from headgate_server import serve; serve({str(self._config)!r}, port={self._port})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        greeting = self._process.stdout.readline()
        assert "listening" in greeting, greeting
        return self

    @property
    def pid(self) -> int:
        """Number of its process."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it."""
        self.signal(signal.SIGKILL)
        self._reap()

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

    def stop(self) -> None:
        """End it properly, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            self._reap()

    def _reap(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.wait(LONGEST_WAIT)
        self._process.stdout.close()

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
