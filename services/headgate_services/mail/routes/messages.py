"""Messages: send, list, get."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Query, Response

from headgate_services.mail.routes.parameters import PAGE, Id, Limit, Offset
from headgate_services.mail.schemas import MessageList, MessageView, SendRequest, SendResponse, Text
from headgate_services.mail.sending import send_message
from headgate_services.mail.services import LimiterPart, ProviderPart, ServicesPart
from headgate_services.mail.storage.models import StoredMessage
from headgate_services.mail.storage.queries import search_messages

router = APIRouter(prefix="/messages", tags=["messages"])


@router.post(
    "",
    status_code=201,
    responses={
        403: {"description": "A recipient's domain is blocked"},
        404: {"description": "No such inbox or thread"},
        409: {"description": "A request with this `Idempotency-Key` is under way or was interrupted"},
        413: {"description": "An attachment, or all of them together, are too large"},
        429: {"description": "The send limit is reached; `Retry-After` says for how many seconds"},
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
    """Send an e-mail. If the provider fails, the answer is still 201, with the status `failed`.

    With an `Idempotency-Key`, the same request can be repeated safely: it is answered again, and sent once.
    """
    sent, fields = await send_message(request, services, limiter, provider, idempotency_key)
    response.headers.update(fields)
    return sent


@router.get("")
async def get_messages(
    services: ServicesPart,
    inbox_id: Annotated[Text | None, Query()] = None,
    thread_id: Annotated[Text | None, Query()] = None,
    q: Annotated[Text | None, Query()] = None,
    limit: Limit = PAGE,
    offset: Offset = 0,
) -> MessageList:
    """Return the messages of an inbox or a thread, newest first; `q` is looked for in subject, text and sender."""
    if inbox_id is None and thread_id is None:
        raise HTTPException(422, "inbox_id or thread_id is required")
    async with services.database.reading() as session:
        found, total = await search_messages(
            session, inbox_id=inbox_id, thread_id=thread_id, text=q, limit=limit, offset=offset
        )
    items = [MessageView.of(message) for message in found]
    return MessageList(items=items, count=len(items), total=total)


@router.get("/{message_id}")
async def get_message(message_id: Id, services: ServicesPart) -> MessageView:
    """Return a message."""
    async with services.database.reading() as session:
        message = await session.get(StoredMessage, message_id)
    if message is None:
        raise HTTPException(404, f"Message {message_id} not found")
    return MessageView.of(message)
