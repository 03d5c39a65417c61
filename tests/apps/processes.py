"""Services in child processes and in this process, with settings from the test only."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from headgate_services.mail import Settings

PATIENCE = 60.0
"""Seconds after which a test gives up; on an idle machine everything takes far less."""

T = TypeVar("T")

_PREFIXES = ("AGENT_", "CLOUDFLARE_", "PETITION_", "RATE_LIMIT_", "SAJU_", "TELEGRAM_")
_OTHERS = {"ALLOWED_USER_IDS", "SEEN_UPDATES_KV", "SERVICE_NAME", "TRUSTED_PROXIES"}
_SETTINGS = _OTHERS | {field.upper() for field in Settings.model_fields}


def is_setting(name: str) -> bool:
    """Return whether a service reads this environment variable."""
    return name.startswith(_PREFIXES) or name in _SETTINGS


def environment(**variables: object) -> dict[str, str]:
    """Return this process's environment with these settings only."""
    kept = {name: value for name, value in os.environ.items() if not is_setting(name)}
    return {**kept, **{name: str(value) for name, value in variables.items()}}


async def in_time(awaitable: Awaitable[T]) -> T:
    """Return the result, or fail if it takes too long."""
    return await asyncio.wait_for(awaitable, PATIENCE)


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition, which may be a coroutine function, is true; fail if it takes too long."""
    async with asyncio.timeout(PATIENCE):
        while not (await found if inspect.isawaitable(found := condition()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0)


@asynccontextmanager
async def client_of(app: Any, address: str = "127.0.0.1", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application in this process, and provide a client with this address."""
    transport = httpx.ASGITransport(app, client=(address, 1234))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://service.test", **options) as client,
    ):
        yield client


@dataclass
class ServiceProcess:
    """A running service, and its log so far."""

    process: Process
    url: str
    log: list[str]


async def launch_program(
    *arguments: str,
    environment: Mapping[str, str],
    folder: Path | None = None,
    module: str = "headgate_server.cli",
) -> Process:
    """Start `headgate`, or another module, with these arguments; its log is in `stderr`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=folder,
        env=environment,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
    )


@asynccontextmanager
async def serving(process: Process, workers: int = 1) -> AsyncIterator[ServiceProcess]:
    """Wait until all workers of a service have started; stop the service at the end of the block."""
    assert process.stderr is not None
    service = ServiceProcess(process, "", [])
    started = 0
    try:
        async with asyncio.timeout(PATIENCE):
            while not service.url or started < workers:
                line = (await process.stderr.readline()).decode()
                assert line, "the service did not start:\n" + "".join(service.log)
                service.log.append(line)
                started += "startup complete" in line
                if found := re.search(r"running on (http://[^\s\"]+)", line):
                    service.url = found[1]
        drained = asyncio.create_task(_drain(process.stderr, service.log))
        yield service
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    await drained


@asynccontextmanager
async def service_process(
    service: str, folder: Path | None = None, *, workers: int = 1, **variables: object
) -> AsyncIterator[ServiceProcess]:
    """Run a service with `headgate run` on a free port until the block ends."""
    arguments = ["run", service, "--port", "0", *(["--workers", str(workers)] if workers > 1 else [])]
    process = await launch_program(*arguments, folder=folder, environment=environment(**variables))
    async with serving(process, workers) as running:
        yield running


async def _drain(stream: asyncio.StreamReader, log: list[str]) -> None:
    async for line in stream:
        log.append(line.decode())  # noqa: PERF401  # line by line: others are reading it
