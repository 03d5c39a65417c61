"""Threads: list, get."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from headgate_services.mail.routes.parameters import PAGE, Id, Limit, Offset
from headgate_services.mail.schemas import Text, ThreadDetail, ThreadList, ThreadMessage, ThreadView
from headgate_services.mail.services import ServicesPart
from headgate_services.mail.storage.models import Thread
from headgate_services.mail.storage.queries import list_threads, messages_of_thread

router = APIRouter(prefix="/threads", tags=["threads"])


@router.get("")
async def get_threads(
    services: ServicesPart, inbox_id: Annotated[Text, Query()], limit: Limit = PAGE, offset: Offset = 0
) -> ThreadList:
    """Return the threads of an inbox, the one with the newest message first."""
    async with services.database.reading() as session:
        found = await list_threads(session, inbox_id, limit, offset)
    items = [ThreadView.of(thread) for thread in found]
    return ThreadList(items=items, count=len(items))


@router.get("/{thread_id}")
async def get_thread(thread_id: Id, services: ServicesPart) -> ThreadDetail:
    """Return a thread with its messages, oldest first."""
    async with services.database.reading() as session:
        thread = await session.get(Thread, thread_id)
        if thread is None:
            raise HTTPException(404, f"Thread {thread_id} not found")
        messages = await messages_of_thread(session, thread_id)
    return ThreadDetail(
        id=thread.id,
        subject=thread.subject,
        summary=thread.summary,
        messages=[ThreadMessage.of(message) for message in messages],
    )
