"""Start-up of a service: settings, logging, checks, server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from headgate import ConfigError, HeadgateError
from headgate.observe import RedactingFilter, redact
from headgate_server.hosting import listen, serve, serve_in_worker, url_of
from headgate_server.supervisor import MAX_WORKERS, WorkersFailed, run_workers
from headgate_server.worker import Worker

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class RunnableSettings(Protocol):
    """Settings that every service has.

    `separate_counts` describes the counts that each process keeps separately, with the setting that moves them. It is
    empty if all counts are shared.
    """

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def log_level(self) -> str: ...
    @property
    def separate_counts(self) -> str: ...


S = TypeVar("S", bound=RunnableSettings)


def log_to_stderr(level: str) -> None:
    """Log to standard error with credentials removed; from other libraries, warnings only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    set_up_log(handler, level)


def set_up_log(handler: logging.Handler, level: str) -> None:
    """Set up a handler without credentials, for our records of `level` and above and warnings of other libraries."""
    handler.addFilter(RedactingFilter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for package in ("headgate", "headgate_services"):
        logging.getLogger(package).setLevel(level)
    logging.getLogger("uvicorn").setLevel(max(logging.INFO, logging.getLevelName(level)))


@dataclass(frozen=True)
class Program(Generic[S]):
    """A service as the command line runs it.

    Attributes:
        place: The import path of this object, as `package.module:NAME`, for worker processes.
        load: Reads the settings.
        create_app: Creates the application.
        checks: Run before the server starts; raise `SettingsError` if the service cannot work.
        set_up_log: Configures logging for a level.
        access_log: Whether every request is logged.
    """

    place: str
    load: Callable[[], S]
    create_app: Callable[[S], Any]
    checks: tuple[Callable[[S], Coroutine[Any, Any, None]], ...] = ()
    set_up_log: Callable[[str], None] = log_to_stderr
    access_log: bool = True

    def main(self, host: str | None = None, port: int | None = None, workers: int = 1) -> int:
        """Run the service until a signal stops it, and return the exit code.

        If it cannot start, the reason is printed on standard error before the port is opened: the name of the variable
        and the problem, without credentials.

        Args:
            host: The address to listen on, instead of `HOST`.
            port: The port, instead of `PORT`; 0 for any free one.
            workers: The number of processes.
        """
        try:
            settings = self._prepare()
            for check in self.checks:
                asyncio.run(check(settings))
            _check_workers(workers, settings.separate_counts)
            app = self.create_app(settings) if workers == 1 else None
        except HeadgateError as error:
            print(redact(str(error)), file=sys.stderr)
            return 2
        host = settings.host if host is None else host
        port = settings.port if port is None else port
        if app is not None:
            return serve(app, host, port, access_log=self.access_log)
        return self._serve_with_workers(host, port, workers)

    def _serve_with_workers(self, host: str, port: int, workers: int) -> int:
        try:
            listener = listen(host, port)
            message = f"running on {url_of(listener)} with {workers} workers"
            function = f"{self.place}.serve_worker"
            run_workers(function, [], listener, workers, lambda: logger.info(message))
        except HeadgateError as error:
            print(redact(str(error)), file=sys.stderr)
            return 3 if isinstance(error, WorkersFailed) else 2
        return 0

    def serve_worker(self, worker: Worker) -> int:
        """Serve in one of several processes, and return the exit code."""
        return serve_in_worker(self.create_app(self._prepare()), worker, access_log=self.access_log)

    def _prepare(self) -> S:
        settings = self.load()
        self.set_up_log(settings.log_level)
        return settings


def blocking(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Turn a coroutine function into a blocking one, for commands."""

    @wraps(work)
    def run_to_end(*args: P.args, **options: P.kwargs) -> T:
        return asyncio.run(work(*args, **options))

    return run_to_end


def _check_workers(workers: int, separate_counts: str) -> None:
    if not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"--workers: must be from 1 to {MAX_WORKERS}")
    if workers > 1 and separate_counts:
        raise ConfigError(
            f"--workers: {workers} processes would each count for themselves: {separate_counts}"
        )
