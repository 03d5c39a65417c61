"""The endpoints."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Header, HTTPException, Path, Query, Response
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import undefer

from headgate_services.common.text import Text
from headgate_services.mail.domain_filter import domain_of
from headgate_services.mail.rate_limiter import usage_of
from headgate_services.mail.schemas import (
    AttachmentView,
    InboxCreate,
    InboxView,
    MessageList,
    MessageView,
    OutboxList,
    RateLimitView,
    RowList,
    SendRequest,
    SendResponse,
    ThreadDetail,
    ThreadMessage,
    ThreadView,
)
from headgate_services.mail.sending import send_message
from headgate_services.mail.services import LimiterPart, ProviderPart, ServicesPart
from headgate_services.mail.storage.models import Attachment, Inbox, StoredMessage, Thread
from headgate_services.mail.storage.queries import (
    attachments_of,
    demo_outbox,
    list_inboxes,
    list_threads,
    messages_of_thread,
    search_messages,
)

Id = Annotated[Text, Path()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1_000_000_000)]

PAGE = 50
"""Default length of lists."""

inboxes = APIRouter(prefix="/inboxes", tags=["inboxes"])
messages = APIRouter(prefix="/messages", tags=["messages"])
threads = APIRouter(prefix="/threads", tags=["threads"])
attachments = APIRouter(prefix="/attachments", tags=["attachments"])
limits = APIRouter(prefix="/rate-limit", tags=["rate limit"])
demo = APIRouter(prefix="/demo", tags=["demo"])


@inboxes.post("", status_code=201)
async def create_inbox(request: InboxCreate, services: ServicesPart) -> InboxView:
    """Create an inbox with the address `email_username@EMAIL_DOMAIN`."""
    domain = services.settings.inbox_domain
    if not domain:
        raise HTTPException(422, "EMAIL_DOMAIN is not set, so an inbox would have no address")
    address = f"{request.email_username}@{domain}"
    if domain_of(address) is None:
        raise HTTPException(422, f"{address!r} is not an e-mail address")
    try:
        return InboxView.of(await services.add_inbox(address, request.name))
    except IntegrityError as error:
        raise HTTPException(409, f"Inbox {address} exists already") from error


@inboxes.get("")
async def get_inboxes(services: ServicesPart, limit: Limit = PAGE, offset: Offset = 0) -> RowList[InboxView]:
    """List inboxes, oldest first."""
    async with services.database.reading() as session:
        return RowList[InboxView].of(await list_inboxes(session, limit, offset))


@inboxes.get("/{inbox_id}")
async def get_inbox(inbox_id: Id, services: ServicesPart) -> InboxView:
    """Return an inbox."""
    return InboxView.of(await services.find(Inbox, "Inbox", inbox_id))


@inboxes.delete("/{inbox_id}", status_code=204)
async def delete_inbox(inbox_id: Id, services: ServicesPart) -> None:
    """Delete an inbox with its threads, messages and attachments."""
    async with services.database.writing() as session:
        inbox = await session.get(Inbox, inbox_id)
        if inbox is None:
            raise HTTPException(404, f"Inbox {inbox_id} not found")
        await session.delete(inbox)


@messages.post(
    "",
    status_code=201,
    responses={
        403: {"description": "A recipient's domain is blocked"},
        404: {"description": "No such inbox or thread"},
        409: {"description": "A request with this `Idempotency-Key` is in progress or was interrupted"},
        413: {"description": "An attachment, or all of them together, are too large"},
        429: {"description": "The send limit is reached; `Retry-After` has the seconds to wait"},
    },
)
async def post_message(
    request: SendRequest,
    response: Response,
    services: ServicesPart,
    limiter: LimiterPart,
    provider: ProviderPart,
    idempotency_key: Annotated[str | None, Header(pattern=r"^[\x21-\x7e]{1,255}$")] = None,
) -> SendResponse:
    """Send an e-mail. If the provider fails, the response is still 201, with the status `failed`.

    With an `Idempotency-Key`, the request can be repeated safely: the e-mail is sent once.
    """
    sent, fields = await send_message(request, services, limiter, provider, idempotency_key)
    response.headers.update(fields)
    return sent


@messages.get("")
async def get_messages(
    services: ServicesPart,
    inbox_id: Annotated[Text | None, Query()] = None,
    thread_id: Annotated[Text | None, Query()] = None,
    q: Annotated[Text | None, Query()] = None,
    limit: Limit = PAGE,
    offset: Offset = 0,
) -> MessageList:
    """List the messages of an inbox or a thread, newest first; `q` searches subject, text and sender."""
    if inbox_id is None and thread_id is None:
        raise HTTPException(422, "inbox_id or thread_id is required")
    async with services.database.reading() as session:
        found, total = await search_messages(
            session, inbox_id=inbox_id, thread_id=thread_id, text=q, limit=limit, offset=offset
        )
    return MessageList.of(found, total=total)


@messages.get("/{message_id}")
async def get_message(message_id: Id, services: ServicesPart) -> MessageView:
    """Return a message."""
    return MessageView.of(await services.find(StoredMessage, "Message", message_id))


@threads.get("")
async def get_threads(
    services: ServicesPart, inbox_id: Annotated[Text, Query()], limit: Limit = PAGE, offset: Offset = 0
) -> RowList[ThreadView]:
    """List the threads of an inbox, ordered by their newest message."""
    async with services.database.reading() as session:
        return RowList[ThreadView].of(await list_threads(session, inbox_id, limit, offset))


@threads.get("/{thread_id}")
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


@attachments.get("")
async def get_attachments(
    services: ServicesPart, message_id: Annotated[Text, Query()]
) -> RowList[AttachmentView]:
    """List the attachments of a message."""
    async with services.database.reading() as session:
        return RowList[AttachmentView].of(await attachments_of(session, message_id))


@attachments.get("/{attachment_id}/content", response_class=Response)
async def get_content(attachment_id: Id, services: ServicesPart) -> Response:
    """Return an attachment. No API key is needed, so that browsers can follow a link; the id cannot be guessed.

    Browsers save the file and never display it, whatever content type the sender declared.
    """
    with_content = [undefer(Attachment.content)]
    attachment = await services.find(Attachment, "Attachment", attachment_id, options=with_content)
    return Response(
        attachment.content,
        media_type="application/octet-stream",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(attachment.filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
        },
    )


@limits.get("")
async def get_rate_limit(limiter: LimiterPart) -> RateLimitView:
    """Return the limits, counts and waits of all windows."""
    return RateLimitView.of(await usage_of(limiter))


@demo.get("/outbox")
async def get_outbox(services: ServicesPart, limit: Limit = PAGE, offset: Offset = 0) -> OutboxList:
    """List the sent e-mails, newest first."""
    async with services.database.reading() as session:
        found, total = await demo_outbox(session, limit, offset)
    return OutboxList.of(found, total=total)


api = APIRouter(prefix="/v1")
for router in (inboxes, messages, threads, attachments, limits):
    api.include_router(router)

demo_api = APIRouter(prefix="/v1")
"""Routes of the demo provider."""

demo_api.include_router(demo)
