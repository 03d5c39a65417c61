"""Starting a service: settings, log, server, and the message if it cannot start."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from headgate import ConfigError, HeadgateError
from headgate.observe import RedactingFilter, redact
from headgate_server.hosting import serve, serve_with_workers

MOST_WORKERS = 256

P = ParamSpec("P")
T = TypeVar("T")


class Launch(NamedTuple):
    """A service that is ready to be served.

    Attributes:
        make: Makes the application, in this process.
        factory: What makes it, log included, in a process of its own, as `package.module:function`.
        host: Where to listen.
        port: Which port; 0 for any free one.
        in_memory: What each process would count for itself, and the setting that changes that; empty if there is nothing.
        access_log: Whether every request is a line in the log.
    """

    make: Callable[[], Any]
    factory: str
    host: str
    port: int
    in_memory: str = ""
    access_log: bool = True


def run(prepare: Callable[[], Launch], workers: int = 1) -> int:
    """Serve what `prepare` returns until a signal stops it, and return the exit code.

    A reason not to start is printed on standard error before the port is opened, without credentials.
    """
    try:
        launch = prepare()
        _check_workers(workers, launch.in_memory)
        app = launch.make() if workers == 1 else None
    except HeadgateError as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    if app is not None:
        return serve(app, launch.host, launch.port, access_log=launch.access_log)
    return serve_with_workers(launch.factory, launch.host, launch.port, workers, access_log=launch.access_log)


class RunnableSettings(Protocol):
    """What a program reads of the settings of its service."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def log_level(self) -> str: ...


S = TypeVar("S", bound=RunnableSettings)


@dataclass(frozen=True)
class Program(Generic[S]):
    """A service as the command line runs it.

    Attributes:
        place: Where this object is, as `package.module:NAME`, for worker processes.
        load: Reads the settings.
        create_app: Makes the application.
        checks: Raise `SettingsError` if the service cannot work; within the server that would end in a traceback.
        in_memory: What each process would count for itself, and the setting that changes that; empty if there is nothing.
    """

    place: str
    load: Callable[[], S]
    create_app: Callable[[S], Any]
    checks: tuple[Callable[[S], Coroutine[Any, Any, None]], ...] = ()
    in_memory: Callable[[S], str] = lambda settings: ""

    def main(self, host: str | None = None, port: int | None = None, workers: int = 1) -> int:
        """Run the service until it gets a signal to stop, and return the exit code.

        A reason not to start is printed on standard error, with the variable's name, before the port is opened.

        Args:
            host: Where to listen, instead of `HOST`.
            port: Which port, instead of `PORT`; 0 for any free one.
            workers: How many processes share the work.
        """

        def prepare() -> Launch:
            settings = self.load()
            log_to_stderr(settings.log_level)
            for check in self.checks:
                asyncio.run(check(settings))
            return Launch(
                lambda: self.create_app(settings),
                f"{self.place}.make_worker",
                settings.host if host is None else host,
                settings.port if port is None else port,
                in_memory=self.in_memory(settings),
            )

        return run(prepare, workers)

    def make_worker(self) -> Any:
        """Return the service for one of several processes, with its log set up."""
        settings = self.load()
        log_to_stderr(settings.log_level)
        return self.create_app(settings)


def blocking(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a coroutine function one that a command can call: it runs in an event loop of its own, to its end."""

    @wraps(work)
    def run_to_end(*args: P.args, **options: P.kwargs) -> T:
        return asyncio.run(work(*args, **options))

    return run_to_end


def _check_workers(workers: int, in_memory: str) -> None:
    if not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"--workers: must be from 1 to {MOST_WORKERS}")
    if workers > 1 and in_memory:
        raise ConfigError(f"--workers: {workers} processes would each count for themselves: {in_memory}")


def log_to_stderr(level: str) -> None:
    """Log to standard error with credentials removed; libraries log warnings only, whatever the level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    set_up_log(handler, level)


def set_up_log(handler: logging.Handler, level: str) -> None:
    """Send our lines of this level and above, and the warnings of others, to a handler, credentials removed."""
    handler.addFilter(RedactingFilter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for package in ("headgate", "headgate_services"):
        logging.getLogger(package).setLevel(level)
    logging.getLogger("uvicorn").setLevel(max(logging.INFO, logging.getLevelName(level)))
