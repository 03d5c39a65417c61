"""Start the server: one process, or several that share a port."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from headgate import ConfigError, HeadgateError, StoreError, StoreMisconfigured
from headgate.observe import redact
from headgate.policy import AsyncLivePolicy, Policy, PolicyError, load_policy
from headgate_server.access import is_loopback
from headgate_server.app import App
from headgate_server.factory import envoy_service, open_app, recorders
from headgate_server.hosting import authority_of, listen, reserve, url_of
from headgate_server.http.server import run
from headgate_server.logs import log_to_stderr
from headgate_server.snapshots import SharedFolder
from headgate_server.statistics import Demo
from headgate_server.supervisor import check_worker_number, run_workers
from headgate_server.worker import Worker

logger = logging.getLogger("headgate.server")


def serve(
    config: str | Path,
    *,
    host: str | None = None,
    port: int | None = None,
    workers: int = 1,
    grpc_port: int | None = None,
    demo: Demo | None = None,
) -> int:
    """Serve a policy file until SIGINT or SIGTERM, and return the exit code, which is 0.

    Limiters and tokens are read again when the file changes, and on SIGHUP. The address is not.

    Args:
        config: The file. Environment variables that begin with `HEADGATE_` replace single values.
        host: The address to listen on, instead of the one in the file's `[server]`.
        port: The port, likewise; 0 for any free one, which is printed.
        workers: The number of processes; with several, every limiter needs a shared store.
        grpc_port: The port of Envoy's rate-limit service, instead of the one in the file's `[envoy]`.
        demo: The demo that the dashboard shows.

    Raises:
        ConfigError: It cannot run with this configuration; the message says what to change.
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
    with ExitStack() as stack:
        envoy = _reserve_envoy(policy, grpc_port)
        if envoy is not None:
            stack.enter_context(envoy)
        listener = listen(host, port)
        message = _greeting(listener, config, policy, workers)
        arguments = [str(config)]
        if envoy is not None:
            arguments.append(authority_of(envoy))
            message += f"\nheadgate: Envoy's rate-limit service listens on {authority_of(envoy)}"
        if workers > 1:
            function = "headgate_server.startup:serve_worker"
            run_workers(function, arguments, listener, workers, lambda: _print(message), SharedFolder.retire)
        else:
            app = open_app(config, demo=demo, envoy_address=authority_of(envoy) if envoy else None)
            run(app, listener, lambda: _print(message))
    _print("headgate: stopped")
    return 0


def check_address(policy: Policy, host: str) -> None:
    """Refuse an address that other machines can reach if the policy has no tokens.

    Raises:
        ConfigError: The address is not a loopback address and the policy has no tokens, or it is not valid.
    """
    if all(is_loopback(address) for address in _addresses(host)) or policy.server.tokens:
        return
    raise ConfigError(
        f"{host} can be reached from other machines and the policy has no tokens, so anybody could use all of "
        f"the API: add [server.tokens.NAME] to it (`headgate token` creates one), or listen on 127.0.0.1"
    )


def check_workers(policy: Policy, workers: int, demo: Demo | None) -> None:
    """Refuse several workers if they would count separately.

    Raises:
        ConfigError: The number is not valid, a limiter counts in memory, or this is the demo.
    """
    check_worker_number(workers)
    if workers == 1:
        return
    if demo is not None:
        raise ConfigError("the demo runs in one process; leave out --workers")
    private = _private_limiters(policy)
    if private:
        raise ConfigError(
            f"with {workers} workers every limiter needs a shared store, but these count in memory: "
            f"{', '.join(private)}; give them a store such as sqlite:///limits.db or redis://localhost, "
            f"or leave out --workers"
        )


def check_stores(policy: Policy) -> None:
    """Refuse stores that are unknown, lack packages, or refuse us.

    If a store is down, the server starts anyway: it is logged, and the limiters' failure policies answer.

    Raises:
        PolicyError: The message names the store.
    """
    # In the parent, so that the message appears once instead of once per worker.
    for url, error in asyncio.run(_pinged(policy)).items():
        if isinstance(error, StoreMisconfigured):
            raise PolicyError(f"the store {redact(url)} cannot be used: {redact(str(error))}") from error


async def _pinged(policy: Policy) -> dict[str, StoreError | None]:
    async with AsyncLivePolicy(policy) as live:
        return await live.ping()


def check_recording(policy: Policy) -> None:
    """Refuse a recording that cannot be written, once instead of once per worker.

    Raises:
        ConfigError: The message gives the reason.
    """
    for recorder in recorders(policy.server):
        recorder.close()


def _reserve_envoy(policy: Policy, port: int | None) -> socket.socket | None:
    """Return a socket that reserves the address of Envoy's rate-limit service; `None` without it.

    Raises:
        ConfigError: The address cannot be used.
    """
    envoy = policy.envoy
    if envoy is None:
        if port is not None:
            raise ConfigError("--grpc needs [envoy] in the policy, with its domains")
        return None
    envoy_service()  # refuses missing packages once, instead of in every worker
    check_address(policy, envoy.host)
    return reserve(envoy.host, envoy.port if port is None else port)


def serve_worker(worker: Worker, config: str, envoy_address: str | None = None) -> int:
    """Serve a policy file in one of several processes, and return the exit code."""
    log_to_stderr(f"worker {worker.name}")
    try:
        shared = SharedFolder(worker.folder, worker.name)
        app = open_app(config, shared_folder=shared, envoy_address=envoy_address)
    except HeadgateError as error:
        print(f"headgate: {error}", file=sys.stderr)
        return 1
    app.live.on_change(lambda: _warn_of_private_limiters(app))
    run(app, worker.listener, worker.report_ready, shares_listener=True)
    return 0


def _warn_of_private_limiters(app: App) -> None:
    """Log which limiters of a new policy count separately in each worker; the first policy had none."""
    private = _private_limiters(app.live.policy)
    if private:
        logger.error(
            "these limiters now count in memory, separately in each worker: %s; give them a shared store",
            ", ".join(private),
        )


def _private_limiters(policy: Policy) -> list[str]:
    """Return the names of the limiters that count in the memory of a process."""
    return [name for name, limiter in policy.limiters.items() if _is_private(limiter.store)]


def _is_private(url: str) -> bool:
    return url.lower().startswith("memory:") or url.rstrip("/").endswith(":memory:")


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host.

    Raises:
        ConfigError: It has none.
    """
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host!r}: not an IP address or resolvable host name") from error


def _greeting(listener: socket.socket, config: str | Path, policy: Policy, workers: int) -> str:
    limiters = len(policy.limiters)
    what = f"{limiters} limiter{'' if limiters == 1 else 's'} from {config}"
    processes = "1 worker" if workers == 1 else f"{workers} workers"
    return f"headgate: listening on {url_of(listener)} ({what}, {processes}; Ctrl-C stops)"


def _print(line: str) -> None:
    print(line, flush=True)
