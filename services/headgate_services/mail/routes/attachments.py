"""Attachments: list those of a message, download one."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Query, Response
from sqlalchemy.orm import undefer

from headgate_services.mail.routes.parameters import Id
from headgate_services.mail.schemas import AttachmentList, AttachmentView, Text
from headgate_services.mail.services import ServicesPart
from headgate_services.mail.storage.models import Attachment
from headgate_services.mail.storage.queries import attachments_of

router = APIRouter(prefix="/attachments", tags=["attachments"])


@router.get("")
async def get_attachments(services: ServicesPart, message_id: Annotated[Text, Query()]) -> AttachmentList:
    """Return the files that went with a message."""
    async with services.database.reading() as session:
        items = [AttachmentView.of(found) for found in await attachments_of(session, message_id)]
    return AttachmentList(items=items, count=len(items))


@router.get("/{attachment_id}/content", response_class=Response)
async def get_content(attachment_id: Id, services: ServicesPart) -> Response:
    """Return a file. This needs no API key: the id cannot be guessed, and a browser can follow the link.

    Whatever the sender called its type, a browser saves it and never shows it as a page of ours.
    """
    async with services.database.reading() as session:
        attachment = await session.get(Attachment, attachment_id, options=[undefer(Attachment.content)])
    if attachment is None:
        raise HTTPException(404, f"Attachment {attachment_id} not found")
    return Response(
        attachment.content,
        media_type="application/octet-stream",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(attachment.filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
        },
    )
