"""For operators: whether it runs, and how."""

from __future__ import annotations

from fastapi import APIRouter, Response

from headgate_services.petitions.api.dependencies.petition_submission import PartsPart

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/metrics", response_class=Response)
async def metrics(parts: PartsPart) -> Response:
    """Return the metrics of this process as text for Prometheus."""
    return Response(parts.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
