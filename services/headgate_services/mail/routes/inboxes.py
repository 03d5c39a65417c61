"""Inboxes: create, list, get, delete."""

from __future__ import annotations

from uuid import uuid4

from fastapi import APIRouter, HTTPException
from sqlalchemy.exc import IntegrityError

from headgate_services.mail.domain_filter import domain_of
from headgate_services.mail.routes.parameters import PAGE, Id, Limit, Offset
from headgate_services.mail.schemas import InboxCreate, InboxList, InboxView
from headgate_services.mail.services import ServicesPart
from headgate_services.mail.storage.models import Inbox
from headgate_services.mail.storage.queries import list_inboxes
from headgate_services.mail.storage.times import utc

router = APIRouter(prefix="/inboxes", tags=["inboxes"])


@router.post("", status_code=201)
async def create_inbox(request: InboxCreate, services: ServicesPart) -> InboxView:
    """Create an inbox with the address `email_username@EMAIL_DOMAIN`."""
    domain = services.settings.inbox_domain
    if not domain:
        raise HTTPException(422, "EMAIL_DOMAIN is not set, so an inbox would have no address")
    address = f"{request.email_username}@{domain}"
    if domain_of(address) is None:
        raise HTTPException(422, f"{address!r} is not an e-mail address")
    inbox = Inbox(
        id=str(uuid4()),
        email_address=address,
        name=request.name,
        provider_config={},
        created_at=utc(services.clock),
    )
    try:
        async with services.database.writing() as session:
            session.add(inbox)
    except IntegrityError as error:
        raise HTTPException(409, f"Inbox {address} exists already") from error
    return InboxView.of(inbox)


@router.get("")
async def get_inboxes(services: ServicesPart, limit: Limit = PAGE, offset: Offset = 0) -> InboxList:
    """Return inboxes, oldest first."""
    async with services.database.reading() as session:
        items = [InboxView.of(inbox) for inbox in await list_inboxes(session, limit, offset)]
    return InboxList(items=items, count=len(items))


@router.get("/{inbox_id}")
async def get_inbox(inbox_id: Id, services: ServicesPart) -> InboxView:
    """Return an inbox."""
    async with services.database.reading() as session:
        inbox = await session.get(Inbox, inbox_id)
    if inbox is None:
        raise HTTPException(404, f"Inbox {inbox_id} not found")
    return InboxView.of(inbox)


@router.delete("/{inbox_id}", status_code=204)
async def delete_inbox(inbox_id: Id, services: ServicesPart) -> None:
    """Delete an inbox with its threads, messages and files."""
    async with services.database.writing() as session:
        inbox = await session.get(Inbox, inbox_id)
        if inbox is None:
            raise HTTPException(404, f"Inbox {inbox_id} not found")
        await session.delete(inbox)
