"""What the demo provider would have sent; these endpoints exist only with it."""

from __future__ import annotations

from fastapi import APIRouter

from headgate_services.mail.routes.parameters import PAGE, Limit, Offset
from headgate_services.mail.schemas import OutboxEntryView, OutboxList
from headgate_services.mail.services import ServicesPart
from headgate_services.mail.storage.queries import demo_outbox

router = APIRouter(prefix="/v1/demo", tags=["demo"])


@router.get("/outbox")
async def get_outbox(services: ServicesPart, limit: Limit = PAGE, offset: Offset = 0) -> OutboxList:
    """Return what was sent, newest first."""
    async with services.database.reading() as session:
        found, total = await demo_outbox(session, limit, offset)
    items = [OutboxEntryView.of(entry) for entry in found]
    return OutboxList(items=items, count=len(items), total=total)
