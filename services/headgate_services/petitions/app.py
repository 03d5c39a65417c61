"""The application, its start-up and its commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError

import headgate
from headgate.stores.postgres import Cleanup
from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import ServerError
from headgate_server.hosting import exit_on_sigterm
from headgate_services.common.guards import SizeGuard, answer_invalid
from headgate_services.common.health import add_health, add_metrics
from headgate_services.common.settings import SettingsError
from headgate_services.common.starting import Program
from headgate_services.petitions.api.middleware import TraceMiddleware
from headgate_services.petitions.api.problems import answer_refusal
from headgate_services.petitions.api.routes import router
from headgate_services.petitions.config import PetitionsSettings, load_settings
from headgate_services.petitions.container import Container, build_container, build_metrics
from headgate_services.petitions.domain.errors import (
    CommitUnknownError,
    DatabaseUnavailableError,
    PetitionError,
)
from headgate_services.petitions.infrastructure.adapters.persistence import migrate
from headgate_services.petitions.infrastructure.metrics import MetricsCollector
from headgate_services.petitions.logs import configure_logging

T = TypeVar("T")

MAX_BODY_BYTES = 256 * 1024
"""The most bytes of a request body; 10,000 escaped characters need at most 120 kB."""


def create_app(
    settings: PetitionsSettings | None = None, *, now: Callable[[], datetime] | None = None
) -> FastAPI:
    """Create the application.

    Args:
        settings: The settings; by default read from the environment.
        now: A clock for the limit, for tests; by default the database's.

    Raises:
        SettingsError: A setting is invalid; the message names the variable.
    """
    settings = load_settings() if settings is None else settings
    metrics = build_metrics(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _running_container(settings, metrics, now) as container:
            app.state.container = container
            async with _cleaning(container):
                yield

    app = FastAPI(title="Headgate petitions", version=headgate.__version__, lifespan=lifespan)
    app.include_router(router)
    add_health(app, {"database": lambda: app.state.container.readiness.check()})
    add_metrics(app, metrics.render)
    app.add_exception_handler(PetitionError, answer_refusal)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_middleware(SizeGuard, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(TraceMiddleware)
    return app


@asynccontextmanager
async def _running_container(
    settings: PetitionsSettings,
    metrics: MetricsCollector | None = None,
    now: Callable[[], datetime] | None = None,
) -> AsyncIterator[Container]:
    """Provide the container of the service on a migrated database; without a URL, start an embedded PostgreSQL."""
    async with AsyncExitStack() as stack:
        url = settings.database_url
        if not url:
            embedded = await asyncio.to_thread(_embedded_postgres, settings.data_dir)
            stack.push_async_callback(asyncio.to_thread, embedded.stop)
            url = embedded.url
        container = build_container(settings, url, metrics, now)
        stack.push_async_callback(container.database.aclose)
        await container.database.open()
        await migrate(container.database)
        stack.push_async_callback(container.witness.aclose)
        yield container


def _embedded_postgres(folder: Path) -> PostgresServer:
    """Start an embedded PostgreSQL with its files in a folder."""
    try:
        return PostgresServer(folder=folder).start()
    except (OSError, ServerError) as error:
        problem = f"is not set, and the embedded PostgreSQL in PETITION_DATA_DIR failed: {error}"
        raise SettingsError(f"DATABASE_URL: {problem}") from error


@asynccontextmanager
async def _cleaning(container: Container) -> AsyncIterator[None]:
    """Remove expired counters periodically during the block."""
    task = asyncio.create_task(container.cleanup.run_every(container.settings.cleanup_interval_seconds))
    try:
        yield
    finally:
        # In a loop, because the task survives a cancellation that the database turns into an error.
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=1)


def main(host: str | None = None, port: int | None = None, workers: int = 1) -> int:
    """Run the service like `Program.main`, with an embedded PostgreSQL if no other is configured."""
    with ExitStack() as stack:
        program = replace(PROGRAM, load=lambda: _with_database(load_settings(), stack))
        return program.main(host, port, workers)


def _with_database(settings: PetitionsSettings, stack: ExitStack) -> PetitionsSettings:
    if settings.database_url:
        return settings
    exit_on_sigterm()  # so that the database is stopped
    embedded = _embedded_postgres(settings.data_dir)
    stack.callback(embedded.stop)
    os.environ["DATABASE_URL"] = embedded.url  # for the workers, if there are any
    return replace(settings, database_url=embedded.url)


def cleanup() -> Cleanup:
    """Remove expired counters once, with the settings of the environment.

    Raises:
        SettingsError: A setting is invalid, or the database cannot be reached.
    """
    return _with_container(lambda container: container.cleanup.cleanup())


def halt(reason: str) -> None:
    """Refuse all changes on every instance until `resume`; clients get the reason.

    Raises:
        SettingsError: The reason is empty, a setting is invalid, or the database cannot be reached.
    """
    if not reason.strip():
        raise SettingsError("a halt needs a reason, which clients get")
    _with_container(lambda container: container.records.halt(reason.strip()))


def resume() -> None:
    """Accept changes again; raises like `halt`."""
    _with_container(lambda container: container.records.resume())


def inspect_submitter(submitter_id: UUID) -> str:
    """Return the counts of a submitter in two lines, petitions and co-signs; raises like `halt`."""

    async def look(container: Container) -> str:
        limiters = {"petitions": container.rate_limiter, "co-signs": container.co_sign_limiter}
        found = {unit: await each.check_rate_limit(submitter_id) for unit, each in limiters.items()}
        return "\n".join(
            f"{unit}: {result.current_count} of {result.limit}, {result.remaining} left, "
            f"next change {result.reset_at.isoformat(timespec='seconds')}"
            for unit, result in found.items()
        )

    return _with_container(look)


def reset_submitter(submitter_id: UUID) -> int:
    """Clear the counts of a submitter, and return the number of removed units; raises like `halt`."""

    async def forget(container: Container) -> int:
        return sum([await store.reset(submitter_id) for store in container.counters])

    return _with_container(forget)


def _with_container(work: Callable[[Container], Coroutine[Any, Any, T]]) -> T:
    """Run a function on the container of the service, with the settings of the environment."""

    async def run() -> T:
        async with _reached(load_settings()) as container:
            return await work(container)

    return asyncio.run(run())


async def _check_database(settings: PetitionsSettings) -> None:
    """Connect to the database and apply missing migrations.

    The application does this too, but an error inside the server would be a traceback.
    """
    async with _reached(settings):
        pass


@asynccontextmanager
async def _reached(settings: PetitionsSettings) -> AsyncIterator[Container]:
    """Like `_running_container`, but turn errors of the database into a `SettingsError`."""
    try:
        async with _running_container(settings) as container:
            yield container
    except DatabaseUnavailableError as error:
        raise SettingsError("DATABASE_URL: the database cannot be reached") from error
    except CommitUnknownError as error:
        raise SettingsError("DATABASE_URL: the database did not confirm the change; try again") from error
    except psycopg.Error as error:
        raise SettingsError(f"DATABASE_URL: {error}") from error


PROGRAM = Program(
    "headgate_services.petitions.app:PROGRAM",
    load_settings,
    create_app,
    (_check_database,),
    set_up_log=configure_logging,
    access_log=False,
)
