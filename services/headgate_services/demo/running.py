"""`headgate demo`, from the first line to the last.

What takes time goes on at once: Redis starts, PostgreSQL makes its files and starts, and the programs are imported.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Awaitable
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

from headgate_services.demo.data import data_folder, running_redis
from headgate_services.demo.errors import naming_missing_packages
from headgate_services.demo.ports import check_loopback
from headgate_services.demo.screen import Progress, welcome
from headgate_services.demo.signals import StopSignals


def run(host: str, port: int, open_traffic: bool, keep: Path | None) -> int:
    """Run the demo until it gets a signal to stop, as `headgate_services.demo.run_demo` says; return the exit code."""
    check_loopback(host)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(host, port, open_traffic, keep))
    gc.freeze()  # or the interpreter looks for garbage in everything that was imported, which is most of what Ctrl-C takes
    return 0


async def _run(host: str, port: int, open_traffic: bool, keep: Path | None) -> None:
    signals = StopSignals()
    progress = Progress()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(data_folder(keep))
        servers: list[AbstractContextManager[str]] = []
        stack.push_async_callback(_leave_all, servers)
        progress.say("Starting Redis, PostgreSQL, four services, the server and its dashboard:")
        starter = asyncio.create_task(_load("headgate_services.demo.postgres"))
        redis_url, postgres_url, scene_module = await _all_of(
            _enter(servers, running_redis(), "Redis", progress),
            _start_postgres(servers, starter, keep, progress),
            _load_scene(starter, progress),
        )
        if signals.received.is_set():
            return
        stage = scene_module.Stage(host, port, open_traffic, folder, redis_url, postgres_url)
        scene = await stack.enter_async_context(scene_module.playing(stage))
        progress.ready("services and server")
        if not signals.received.is_set():
            signals.listen()  # the server reads its policy again on SIGHUP; here it means that the terminal is gone
            _show(scene, progress)
        await signals.received.wait()
        progress.say("\nStopping.")


async def _all_of(*parts: Awaitable[Any]) -> list[Any]:
    """Wait for all of them, also if one fails: what a thread has begun cannot be called off, and must be cleaned up."""
    results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _enter(
    servers: list[AbstractContextManager[str]],
    manager: AbstractContextManager[str],
    part: str,
    progress: Progress,
) -> str:
    """Start a server in a thread, add it to those that run, and return its URL."""
    value = await asyncio.to_thread(manager.__enter__)
    servers.append(manager)
    progress.ready(part)
    return value


async def _leave_all(servers: list[AbstractContextManager[str]]) -> None:
    """Stop the servers, each in a thread, so that Ctrl-C takes as long as the slowest and not as all of them."""
    await _all_of(*(asyncio.to_thread(server.__exit__, None, None, None) for server in servers))


async def _start_postgres(
    servers: list[AbstractContextManager[str]],
    starter: asyncio.Task[Any],
    keep: Path | None,
    progress: Progress,
) -> str:
    return await _enter(servers, (await starter).running_postgres(keep), "PostgreSQL", progress)


async def _load_scene(starter: asyncio.Task[Any], progress: Progress) -> Any:
    await starter  # two threads do not import quicker than one, and PostgreSQL takes longer to start
    scene = await _load("headgate_services.demo.scene")
    progress.ready("programs loaded")
    return scene


async def _load(module: str) -> Any:
    def load() -> Any:
        with naming_missing_packages():
            return importlib.import_module(module)

    return await asyncio.to_thread(load)


def _show(scene: Any, progress: Progress) -> None:
    for hosted in (scene.dashboard, *scene.services):
        hosted.on_end(lambda ended: progress.problem(f"{ended.name} has ended; the rest goes on"))
    progress.say(
        welcome(
            scene.dashboard.url,
            {service.name: service.url for service in scene.services},
            scene.policy,
            scene.api_key,
            scene.submitter_id,
            scene.traffic.on,
        )
    )


def _loop_factory() -> Any:
    """Return the quicker event loop if it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
