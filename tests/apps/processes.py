"""Services in processes of their own, started and stopped as an operator would."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ServiceProcess:
    """A running service, and what it has logged so far."""

    process: Process
    url: str
    log: list[str]


async def launch_program(
    *arguments: str, environment: Mapping[str, str], folder: Path | None = None, stdout: int = DEVNULL
) -> Process:
    """Start `headgate` with these arguments; its log can be read from `stderr`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headgate_server.cli", *arguments),
        cwd=folder,
        env=environment,
        stdin=DEVNULL,
        stdout=stdout,
        stderr=PIPE,
    )


@asynccontextmanager
async def serving(process: Process) -> AsyncIterator[ServiceProcess]:
    """Wait until a service says where it listens; when the block ends, end the service."""
    assert process.stderr is not None
    service = ServiceProcess(process, "", [])
    try:
        while not service.url:
            line = (await process.stderr.readline()).decode()
            assert line, "the service did not start:\n" + "".join(service.log)
            service.log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                service.url = found[1]
        drained = asyncio.create_task(_drain(process.stderr, service.log))
        yield service
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    await drained


async def _drain(stream: asyncio.StreamReader, log: list[str]) -> None:
    async for line in stream:
        log.append(line.decode())  # noqa: PERF401  # line by line: others are reading it
