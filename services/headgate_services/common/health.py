"""`/health`, `/livez`, `/readyz` and `/metrics`: what operators ask of every service.

An orchestrator restarts what is not live, and sends nothing to what is not ready. So a store that is down makes a service
not ready, and never not live: a restart would not bring the store back.
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
"""Seconds that a store has for an answer."""

logger = logging.getLogger(__name__)


def add_health(app: FastAPI, stores: Mapping[str, Check], patience: float = PATIENCE) -> None:
    """Add `/health`, `/livez` and `/readyz`.

    Args:
        app: The service.
        stores: By name, a function that asks the store for an answer, and raises if there is none.
        patience: Seconds that each store has.
    """

    async def live() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(_state(name, check, patience) for name, check in stores.items()))

    kept = KeptResult(ask_all)  # anybody may ask for it

    async def ready() -> JSONResponse:
        """Say whether every store answers; 503 if one does not. The stores are asked at most once a second."""
        states = await kept.get()
        is_ready = all(state == "ok" for state in states)
        body = {
            "status": "ok" if is_ready else "unavailable",
            "stores": dict(zip(stores, states, strict=True)),
        }
        return JSONResponse(body, 200 if is_ready else 503)

    unavailable = {"description": "A store does not answer; `stores` says which"}
    for path in ("/health", "/livez"):
        app.add_api_route(path, live, tags=["operations"])
    app.add_api_route("/readyz", ready, tags=["operations"], responses={503: unavailable})


def add_metrics(app: FastAPI, render: Callable[[], bytes]) -> None:
    """Add `/metrics`, whose text for Prometheus `render` returns."""

    async def metrics() -> Response:
        """Return the metrics of the service as text for Prometheus."""
        return Response(render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_api_route("/metrics", metrics, tags=["operations"], response_class=Response)


async def _state(name: str, check: Check, patience: float) -> str:
    try:
        async with asyncio.timeout(patience):
            await check()
    except Exception as error:  # noqa: BLE001  # whatever it is, the store cannot be used; the log says why
        logger.info("not ready: %s: %s", name, str(error) or type(error).__name__)
        return "unavailable"
    return "ok"
