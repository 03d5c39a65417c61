"""Sending one e-mail: filter, limit, provider, record, store, in this order.

Nothing is written before the provider replies, and no transaction is open during its call. A request that fails before the
call releases the held unit and stores nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import asdict, dataclass
from uuid import uuid4

from fastapi import HTTPException
from sqlalchemy.exc import SQLAlchemyError

from headgate_services.mail.attachments import decode_attachments
from headgate_services.mail.conversations import MailDraft, add_message, loop_back
from headgate_services.mail.idempotency import free_key, keep_answer, take_key
from headgate_services.mail.markdown import to_html
from headgate_services.mail.providers import EmailProvider, ProviderError
from headgate_services.mail.rate_limiter import CheckAndRecord, RateLimitResult, SendHold, hold_for
from headgate_services.mail.schemas import SendRequest, SendResponse
from headgate_services.mail.services import Services
from headgate_services.mail.storage.models import Inbox, Status, StoredMessage, Thread
from headgate_services.mail.storage.queries import newest_delivered
from headgate_services.mail.storage.times import utc

logger = logging.getLogger(__name__)

MOST_REFERENCES = 20
"""The most earlier messages in the References header of a reply."""


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """The result of the provider's call."""

    status: Status
    provider_message_id: str | None = None
    error: str | None = None


async def send_message(
    request: SendRequest,
    services: Services,
    limiter: CheckAndRecord,
    provider: EmailProvider,
    key: str | None = None,
) -> tuple[SendResponse, dict[str, str]]:
    """Send an e-mail, store the outcome, and return the response and its header fields.

    Args:
        request: The e-mail.
        services: The parts of the service.
        limiter: The send limit.
        provider: The provider that sends it.
        key: The request's `Idempotency-Key`.

    Raises:
        HTTPException: The request was refused; nothing was counted or stored.
    """
    if key is not None and (earlier := await take_key(key, request, services)) is not None:
        return earlier, {"Idempotency-Replayed": "true"}
    try:
        draft, hold = await _admit(request, services, limiter)
    except BaseException:  # also if the request is cancelled: nothing was sent yet
        if key is not None:
            await free_key(key, services.database)
        raise
    outcome = await _deliver(draft, provider, hold)
    services.metrics.count(outcome.status)
    try:
        response = await _store(draft, outcome, services, key)
    except SQLAlchemyError as error:
        logger.exception("Message %s (%s) could not be recorded", draft.id, outcome.status)
        raise _not_recorded(outcome) from error
    return response, hold.result.header_fields(charged=0 if outcome.status == "failed" else 1)


async def _admit(
    request: SendRequest, services: Services, limiter: CheckAndRecord
) -> tuple[MailDraft, SendHold]:
    """Check a request, and return the e-mail to send and the hold for it."""
    inbox = await services.find(Inbox, "Inbox", request.inbox_id)
    if blocked := services.outbound.blocked(request.recipients):
        raise HTTPException(403, f"Recipient domain(s) blocked by outbound policy: {', '.join(blocked)}")
    hold = await hold_for(limiter)
    if not hold.result.allowed:
        raise _too_many(hold.result)
    try:
        return await _prepare(request, inbox, services), hold
    except BaseException:  # also if the request is cancelled: nothing was sent yet
        await hold.release()
        raise


def _not_recorded(outcome: SendOutcome) -> HTTPException:
    """Return the response if the database failed after the provider's call; a 503 would invite clients to send again."""
    if outcome.status == "failed":
        return HTTPException(500, "The message was neither sent nor recorded")
    return HTTPException(500, "The message was sent but could not be recorded; do not send it again")


def _too_many(result: RateLimitResult) -> HTTPException:
    retry_after = max(1, math.ceil(result.retry_after or 1))
    fields = {**result.header_fields(), "Retry-After": str(retry_after)}
    return HTTPException(429, result.detail or "Rate limit exceeded", fields)


async def _prepare(request: SendRequest, inbox: Inbox, services: Services) -> MailDraft:
    thread, parent = await _find_parent(request.reply_to_thread_id, inbox, services)
    return MailDraft(
        id=str(uuid4()),
        request=request,
        inbox=inbox,
        thread=thread,
        attachments=decode_attachments(request.attachments or (), services.settings),
        in_reply_to=parent.message_id if parent else None,
        references=[*parent.reference_ids, parent.message_id][-MOST_REFERENCES:] if parent else [],
        # In a thread, because a long text takes up to a second.
        html=await asyncio.to_thread(to_html, request.body) if request.html is None else request.html,
    )


async def _find_parent(
    thread_id: str | None, inbox: Inbox, services: Services
) -> tuple[Thread | None, StoredMessage | None]:
    """Return the thread to reply to, and its newest delivered message."""
    if thread_id is None:
        return None, None
    async with services.database.reading() as session:
        thread = await session.get(Thread, thread_id)
        if thread is None or thread.inbox_id != inbox.id:
            raise HTTPException(404, f"Thread {thread_id} not found")
        return thread, await newest_delivered(session, thread_id)


async def _deliver(draft: MailDraft, provider: EmailProvider, hold: SendHold) -> SendOutcome:
    """Call the provider, within the deadline of the hold; the e-mail counts if the provider accepted it.

    If the request is cancelled during the call, the outcome is unknown, and the unit stays counted.
    """
    try:
        async with asyncio.timeout_at(hold.deadline) as limit:
            await asyncio.sleep(0)  # end the block here if the deadline has already passed
            provider_message_id = await _call(provider, draft)
    except Exception as error:  # noqa: BLE001  # any error means that the provider did not accept the e-mail
        await hold.release()
        return _failed(provider, draft, ProviderError("no answer in time") if limit.expired() else error)
    await _confirm(hold, draft)
    return SendOutcome("sent" if provider_message_id else "pending", provider_message_id or None)


async def _call(provider: EmailProvider, draft: MailDraft) -> str | None:
    return await provider.send_email(
        draft.request.to,
        draft.request.subject,
        draft.request.body,
        from_address=draft.inbox.email_address,
        message_id=draft.message_id,
        in_reply_to=draft.in_reply_to,
        references=draft.references,
        cc=draft.request.cc,
        bcc=draft.request.bcc,
        attachments=draft.attachments,
        html_body=draft.html,
    )


def _failed(provider: EmailProvider, draft: MailDraft, error: Exception) -> SendOutcome:
    expected = isinstance(error, ProviderError)
    logger.error(
        "Provider %s failed to send message %s: %r",
        provider.name,
        draft.id,
        error,
        exc_info=None if expected else error,
    )
    reason = str(error) if expected else f"unexpected {type(error).__name__}"
    return SendOutcome(
        "failed",
        error=f"Provider {provider.name} failed ({reason}); the message was recorded but not delivered",
    )


async def _confirm(hold: SendHold, draft: MailDraft) -> None:
    try:
        await hold.confirm()
    except Exception:  # any error: the e-mail was sent, and must still be stored and reported
        logger.exception("Message %s was sent but could not be counted", draft.id)


async def _store(draft: MailDraft, outcome: SendOutcome, services: Services, key: str | None) -> SendResponse:
    """Store the message, copies for recipients here, and the response under the request's key; return the response."""
    now = utc(services.clock)
    async with services.database.writing() as session:
        thread = await add_message(
            session,
            draft,
            draft.inbox.id,
            draft.thread.id if draft.thread else None,
            now,
            id=draft.id,
            direction="outbound",
            bcc_addresses=draft.request.bcc or [],
            **asdict(outcome),
        )
        if services.settings.email_provider == "demo" and outcome.status != "failed":
            await loop_back(session, draft, services.inbound, now)
        response = SendResponse.model_validate({"id": draft.id, "thread_id": thread.id, **asdict(outcome)})
        if key is not None:
            await keep_answer(session, key, response)
    return response
