"""`/health`, `/livez`, `/readyz` and `/metrics` of every service.

An orchestrator restarts a service that is not live, and sends no requests to a service that is not ready. A store that is
down therefore affects readiness only: restarting the service would not repair the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from headgate_server.kept_result import KeptResult

Check = Callable[[], Awaitable[object]]

PATHS = ("/health", "/livez", "/readyz", "/metrics")
PATIENCE = 5.0
"""Time limit for the reply of a store, in seconds."""

logger = logging.getLogger(__name__)


def add_health(app: FastAPI, stores: Mapping[str, Check], patience: float = PATIENCE) -> None:
    """Add `/health`, `/livez` and `/readyz`.

    Args:
        app: The service.
        stores: Ping functions by name of the store; they raise if the store does not reply.
        patience: Time limit for each store, in seconds.
    """

    async def live() -> dict[str, str]:
        """Report that the process is alive."""
        return {"status": "ok"}

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(_state(name, check, patience) for name, check in stores.items()))

    kept = KeptResult(ask_all)  # the path needs no authentication, so the load on stores is limited

    async def ready() -> JSONResponse:
        """Report the state of each store; 503 if one does not reply. Stores are queried at most once a second."""
        states = await kept.get()
        is_ready = all(state == "ok" for state in states)
        body = {
            "status": "ok" if is_ready else "unavailable",
            "stores": dict(zip(stores, states, strict=True)),
        }
        return JSONResponse(body, 200 if is_ready else 503)

    unavailable = {"description": "A store does not reply; `stores` has the state of each"}
    for path in ("/health", "/livez"):
        app.add_api_route(path, live, tags=["operations"])
    app.add_api_route("/readyz", ready, tags=["operations"], responses={503: unavailable})


def add_metrics(app: FastAPI, render: Callable[[], bytes]) -> None:
    """Add `/metrics`; `render` returns the metrics in the text format of Prometheus."""

    async def metrics() -> Response:
        """Return the metrics of the service in the text format of Prometheus."""
        return Response(render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_api_route("/metrics", metrics, tags=["operations"], response_class=Response)


async def _state(name: str, check: Check, patience: float) -> str:
    try:
        async with asyncio.timeout(patience):
            await check()
    except Exception as error:  # noqa: BLE001  # any error means that the store cannot be used
        logger.info("not ready: %s: %s", name, str(error) or type(error).__name__)
        return "unavailable"
    return "ok"
