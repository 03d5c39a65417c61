"""The command `headgate demo` and its output, which is plain ASCII."""

from __future__ import annotations

import asyncio
import gc
import importlib
import ipaddress
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from headgate_services.demo import DemoError
from headgate_services.demo.data import data_folder, running_servers
from headgate_services.demo.hosting import StopSignals

_ABOUT = {
    "mail": "60 e-mails a minute in all",
    "telegram": "30 messages a minute for each user",
    "tiers": "10, 60 or 300 requests a minute, by API key",
    "petitions": "10 petitions a minute for each submitter",
}


def run(host: str, port: int, open_traffic: bool, keep: Path | None) -> int:
    """Run the demo until a signal stops it, and return the exit code; see `headgate_services.demo.run_demo`."""
    check_loopback(host)
    asyncio.run(_run(host, port, open_traffic, keep))
    gc.freeze()  # a final garbage collection would take most of the shutdown time
    return 0


async def _run(host: str, port: int, open_traffic: bool, keep: Path | None) -> None:
    signals = StopSignals()
    progress = Progress()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(data_folder(keep))
        progress.show("Starting Redis, PostgreSQL, four services, the server and its dashboard:")
        # Both take about a second, so they run at the same time.
        loading = asyncio.create_task(asyncio.to_thread(_load, progress))
        servers = running_servers(keep, progress.ready)
        redis_url, postgres_url = await asyncio.to_thread(stack.enter_context, servers)
        demo_app = await loading
        if signals.received.is_set():
            return
        options = demo_app.DemoOptions(host, port, open_traffic, folder, redis_url, postgres_url)
        running = await stack.enter_async_context(demo_app.running_demo(options))
        progress.ready("services and server")
        if not signals.received.is_set():
            signals.listen()  # again, because the server uses SIGHUP to reload its policy
            _show(running, progress)
        await signals.received.wait()
        progress.show("\nStopping.")


def _load(progress: Progress) -> Any:
    demo_app = importlib.import_module("headgate_services.demo.demo_app")
    progress.ready("programs loaded")
    return demo_app


def _show(running: Any, progress: Progress) -> None:
    for hosted in (running.dashboard, *running.services):
        hosted.on_end(lambda ended: progress.problem(f"{ended.name} has ended; the rest goes on"))
    progress.show(_welcome(running))


def check_loopback(host: str) -> None:
    """Check that an address is loopback, because the demo has no authentication.

    Raises:
        DemoError: Other machines could reach the address.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise DemoError(
            f"the demo has no authentication, so it listens on this machine only: 127.0.0.1, not {host!r}"
        )


class Progress:
    """Prints the parts that have started, with the time in seconds, and problems."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def show(self, line: str) -> None:
        """Print a line at once, also into a pipe. A closed pipe is ignored."""
        with suppress(OSError):
            print(line, flush=True)

    def problem(self, line: str) -> None:
        """Print a problem on standard error."""
        with suppress(OSError):
            print(f"headgate demo: {line}", file=sys.stderr, flush=True)

    def ready(self, part: str) -> None:
        """Print that a part has started."""
        self.show(f"  {part:<30} {time.monotonic() - self._begin:5.1f} s")


def _welcome(running: Any) -> str:
    """Return the block with all addresses, commands to try, and how to stop it."""
    json = "-H 'Content-Type: application/json'"
    petition = f'{{"type": "GENERAL", "text": "More benches", "submitter_id": "{running.submitter_id}"}}'
    dashboard = running.dashboard.url
    services = {service.name: service.url for service in running.services}
    return "\n".join(
        [
            "",
            "The demo is running, on this machine only.",
            "",
            f"  {'dashboard':<11}{dashboard + '/':<26}who asks, who is refused, and why",
            *(f"  {name:<11}{url:<26}{_ABOUT[name]}" for name, url in services.items()),
            f"  {'policy':<11}{running.policy}",
            "             edit it, and the change applies at once",
            "",
            "Try, several times each:",
            "",
            f'  curl -s {dashboard}/v1/limiters/login/hit {json} -d \'{{"key": "you"}}\'',
            f"  curl -si {services['tiers']}/v1/whoami -H 'X-API-Key: {running.api_key}'",
            f"  curl -si {services['petitions']}/v1/petition-submissions {json} -d '{petition}'",
            "",
            f"Traffic is {'on' if running.traffic.on else 'off'}; the dashboard has the switch. Ctrl-C stops everything.",
        ]
    )
