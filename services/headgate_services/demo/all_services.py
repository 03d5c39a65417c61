"""`headgate run all`: the four services in one process.

Some of their environment variables have the same name. A variable with the name of a service as prefix is for that service
only and takes precedence: `MAIL_DATABASE_URL` over `DATABASE_URL`, `TIERS_PORT` over the default port.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from structlog.dev import ConsoleRenderer, plain_traceback

from headgate import HeadgateError
from headgate.observe import redact
from headgate_server.hosting import listen
from headgate_services.demo.hosting import Hosted, StopSignals
from headgate_services.demo.services import PORTS, make_service
from headgate_services.petitions.logs import configure_logging

__all__ = ["run", "variables_of"]


def run(host: str | None = None) -> int:
    """Run them until a signal stops them; see `headgate_services.demo.run_all`."""
    level = os.environ.get("LOG_LEVEL", "").strip().upper() or "INFO"
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        print("LOG_LEVEL: must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL", file=sys.stderr)
        return 2
    configure_logging(level, ConsoleRenderer(colors=False, exception_formatter=plain_traceback))
    return asyncio.run(_run(host))


async def _run(host: str | None) -> int:
    stop = StopSignals().received
    ended: list[str] = []
    hosted: list[Hosted] = []
    try:
        hosted.extend(_hosted(name, variables_of(name, os.environ), host) for name in PORTS)
        await asyncio.gather(*(each.start() for each in hosted))
        for each in hosted:
            print(f"{each.name:<10} {each.url}", flush=True)
            each.on_end(lambda gone: _tell(gone.name, ended, stop))
        await stop.wait()
    except _Unusable as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    finally:
        await asyncio.gather(*(each.stop() for each in hosted))
    return 1 if ended else 0


class _Unusable(Exception):
    """A setting of a service is invalid; the message has the service and the variable."""


def _hosted(name: str, variables: Mapping[str, str], host: str | None) -> Hosted:
    port = _port(name, variables)
    app = _made(name, variables)
    address = host or variables.get("HOST", "").strip() or "127.0.0.1"
    return Hosted(name, app, listen(address, port))


def _made(name: str, variables: Mapping[str, str]) -> Any:
    try:
        return make_service(name, variables)
    except HeadgateError as error:
        raise _Unusable("\n".join(f"{name}: {line}" for line in str(error).splitlines())) from error


def _port(name: str, variables: Mapping[str, str]) -> int:
    text = variables.get("PORT", "").strip()
    if not text:
        return PORTS[name]
    if not text.isascii() or not text.isdigit() or int(text[:6]) > 65_535:
        raise _Unusable(f"{name}: {name.upper()}_PORT: must be a whole number up to 65535")
    return int(text)


def variables_of(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one service: its own variables replace the shared ones.

    `PORT` is ignored, because several services cannot share it.
    """
    prefix = f"{name.upper()}_"
    shared = {variable: value for variable, value in environment.items() if variable != "PORT"}
    own = {
        variable.removeprefix(prefix): value
        for variable, value in environment.items()
        if variable.startswith(prefix)
    }
    return {**shared, **own}


def _tell(name: str, ended: list[str], stop: asyncio.Event) -> None:
    ended.append(name)
    print(f"headgate: {name} has ended", file=sys.stderr, flush=True)
    if len(ended) == len(PORTS):
        stop.set()
