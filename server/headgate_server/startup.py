"""Running the server: one process, or several that share a port."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from headgate import ConfigError, StoreError, StoreMisconfigured
from headgate.observe import redact
from headgate.policy import AsyncLivePolicy, Policy, PolicyError, load_policy
from headgate_server.access import is_loopback
from headgate_server.factory import open_app, recorders
from headgate_server.http_server import run
from headgate_server.logs import log_to_stderr
from headgate_server.statistics import Demo
from headgate_server.supervisor import private_limiters, run_workers

BACKLOG = 2048
HIGHEST_PORT = 65_535
MOST_WORKERS = 256


def serve(
    config: str | Path,
    *,
    host: str | None = None,
    port: int | None = None,
    workers: int = 1,
    demo: Demo | None = None,
) -> int:
    """Serve a policy file until SIGINT or SIGTERM, and return the exit code, which is 0.

    The file is followed: on SIGHUP and when it changes, its limiters and tokens are read again. The address is not.

    Args:
        config: The file. Environment variables that begin with `HEADGATE_` replace single values.
        host: Where to listen, instead of the file's `[server]`.
        port: Likewise; 0 is any free one, and the one that it became is printed.
        workers: How many processes share the work; then every limiter must count outside of them.
        demo: The demo that the dashboard shows.

    Raises:
        ConfigError: It cannot run like this; the message says what to change.
        WorkersFailed: The workers cannot be kept running.
    """
    policy = load_policy(config, os.environ)
    host = policy.server.host if host is None else host
    port = policy.server.port if port is None else port
    check_address(policy, host)
    check_workers(policy, workers, demo)
    check_recording(policy)
    log_to_stderr()
    check_stores(policy)
    listener = listen(host, port)
    message = _greeting(listener, config, policy, workers)
    if workers > 1:
        run_workers(Path(config), listener, workers, lambda: _say(message))
    else:
        run(open_app(config, demo=demo), listener, lambda: _say(message))
    _say("headgate: stopped")
    return 0


def check_address(policy: Policy, host: str) -> None:
    """Refuse to listen for other machines if everybody could do everything.

    Raises:
        ConfigError: The address is not a loopback one, and there are no tokens; or it is none at all.
    """
    if all(is_loopback(address) for address in _addresses(host)) or policy.server.tokens:
        return
    raise ConfigError(
        f"{host} can be reached from other machines and the policy has no tokens, so anybody could ask and reset: "
        f"add [server.tokens.NAME] to it (`headgate token` makes one), or listen on 127.0.0.1"
    )


def check_workers(policy: Policy, workers: int, demo: Demo | None) -> None:
    """Refuse several workers where they would not count together.

    Raises:
        ConfigError: The number is no number of workers, or a limiter counts in memory, or this is the demo.
    """
    if type(workers) is not int or not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"workers is a whole number from 1 to {MOST_WORKERS}, not {workers!r}")
    if workers == 1:
        return
    if demo is not None:
        raise ConfigError("the demo runs in one process; leave out --workers")
    private = private_limiters(policy)
    if private:
        raise ConfigError(
            f"with {workers} workers every limiter must count outside of them, but in memory count: "
            f"{', '.join(private)}; give them a store such as sqlite:///limits.db or redis://localhost, "
            f"or leave out --workers"
        )


def check_stores(policy: Policy) -> None:
    """Refuse limiters that could not count: on a store that there is not, whose packages are missing, or that refuses us.

    A store that is down is no reason not to start: the log says so, and the limiters' failure policies answer.

    Raises:
        PolicyError: The message says which one.
    """
    # Here, so that it is said once instead of once per worker.
    for url, error in asyncio.run(_pinged(policy)).items():
        if isinstance(error, StoreMisconfigured):
            raise PolicyError(f"the store {redact(url)} cannot be used: {redact(str(error))}") from error


async def _pinged(policy: Policy) -> dict[str, StoreError | None]:
    async with AsyncLivePolicy(policy) as live:
        return await live.ping()


def check_recording(policy: Policy) -> None:
    """Refuse to record to what cannot be written: to say it once, instead of once per worker.

    Raises:
        ConfigError: The message says why.
    """
    for recorder in recorders(policy.server):
        recorder.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: The address cannot be had.
    """
    if not 0 <= port <= HIGHEST_PORT:
        raise ConfigError(f"cannot listen on {_authority(host, port)}: ports go from 0 to {HIGHEST_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0].lower()
        raise ConfigError(
            f"cannot listen on {_authority(host, port)}: {reason}; choose another --port or --host"
        ) from error


def _addresses(host: str) -> list[str]:
    """Return the addresses of a name.

    Raises:
        ConfigError: It has none.
    """
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host!r}: not an IP address or resolvable host name") from error


def _greeting(listener: socket.socket, config: str | Path, policy: Policy, workers: int) -> str:
    host, port = listener.getsockname()[:2]
    how_many = "1 worker" if workers == 1 else f"{workers} workers"
    limiters = len(policy.limiters)
    what = f"{limiters} limiter{'' if limiters == 1 else 's'} from {config}"
    return f"headgate: listening on http://{_authority(host, port)} ({what}, {how_many}; Ctrl-C stops)"


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(line: str) -> None:
    print(line, flush=True)
