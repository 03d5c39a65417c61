"""Sending one e-mail: filter, limit, provider, record, store, in this order.

Nothing is written before the provider has answered, and no transaction is open while it is asked. What goes wrong before
it is asked gives the held unit back and leaves no trace.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from uuid import uuid4

from fastapi import HTTPException
from sqlalchemy.exc import SQLAlchemyError

from headgate_services.mail.attachments import decode_attachments
from headgate_services.mail.conversations import Envelope, add_message, loop_back
from headgate_services.mail.domain_filter import domain_of
from headgate_services.mail.idempotency import free_key, keep_answer, take_key
from headgate_services.mail.markdown import to_html
from headgate_services.mail.providers import EmailProvider, OutgoingAttachment, ProviderError
from headgate_services.mail.rate_limiter import CheckAndRecord, RateLimitResult, SendHold, hold_for
from headgate_services.mail.schemas import SendRequest, SendResponse
from headgate_services.mail.services import Services
from headgate_services.mail.storage.models import Inbox, Status, StoredMessage, Thread
from headgate_services.mail.storage.queries import newest_delivered
from headgate_services.mail.storage.times import utc

logger = logging.getLogger(__name__)

MOST_REFERENCES = 20
"""How many earlier messages a reply names; the header of an endless thread must end."""


@dataclass(frozen=True, slots=True)
class MailDraft:
    """An e-mail that is ready to be handed to a provider."""

    id: str
    request: SendRequest
    inbox: Inbox
    thread: Thread | None
    attachments: list[OutgoingAttachment]
    in_reply_to: str | None
    references: list[str]
    html: str | None

    @property
    def message_id(self) -> str:
        """The Message-ID header."""
        return f"<{self.id}@{domain_of(self.inbox.email_address)}>"


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """What the provider said."""

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
    """Send an e-mail, store the outcome, and return it with the header fields for the response.

    Args:
        request: The e-mail.
        services: The parts of the service.
        limiter: Says whether it may be sent.
        provider: Sends it.
        key: The request's `Idempotency-Key`.

    Raises:
        HTTPException: It was not even tried; nothing was counted or stored.
    """
    if key is not None and (earlier := await take_key(key, request, services)) is not None:
        return earlier, {"Idempotency-Replayed": "true"}
    try:
        draft, hold = await _admit(request, services, limiter)
    except BaseException:  # also a cancelled request has sent nothing yet
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
    return response, hold.result.what_is_left(charged=0 if outcome.status == "failed" else 1)


async def _admit(
    request: SendRequest, services: Services, limiter: CheckAndRecord
) -> tuple[MailDraft, SendHold]:
    """Return an e-mail that may be sent, and the unit that is held for it."""
    inbox = await services.find(Inbox, "Inbox", request.inbox_id)
    if blocked := services.outbound.blocked(request.recipients):
        raise HTTPException(403, f"Recipient domain(s) blocked by outbound policy: {', '.join(blocked)}")
    hold = await hold_for(limiter)
    if not hold.result.allowed:
        raise _too_many(hold.result)
    try:
        return await _prepare(request, inbox, services), hold
    except BaseException:  # also a cancelled request has sent nothing yet
        await hold.release()
        raise


def _not_recorded(outcome: SendOutcome) -> HTTPException:
    """Return the answer when the provider was asked and the database then failed; a 503 would invite to send it twice."""
    if outcome.status == "failed":
        return HTTPException(500, "The message was neither sent nor recorded")
    return HTTPException(500, "The message was sent but could not be recorded; do not send it again")


def _too_many(result: RateLimitResult) -> HTTPException:
    retry_after = max(1, math.ceil(result.retry_after or 1))
    fields = {**result.what_is_left(), "Retry-After": str(retry_after)}
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
        # In a thread: a long text takes its time.
        html=await asyncio.to_thread(to_html, request.body) if request.html is None else request.html,
    )


async def _find_parent(
    thread_id: str | None, inbox: Inbox, services: Services
) -> tuple[Thread | None, StoredMessage | None]:
    """Return the thread to add to, and the message in it to answer."""
    if thread_id is None:
        return None, None
    async with services.database.reading() as session:
        thread = await session.get(Thread, thread_id)
        if thread is None or thread.inbox_id != inbox.id:
            raise HTTPException(404, f"Thread {thread_id} not found")
        return thread, await newest_delivered(session, thread_id)


async def _deliver(draft: MailDraft, provider: EmailProvider, hold: SendHold) -> SendOutcome:
    """Hand an e-mail to the provider, before the deadline of its hold; it counts exactly if the provider took it.

    If the request is cancelled during the call, the outcome is unknown, and the unit stays counted.
    """
    try:
        async with asyncio.timeout_at(hold.deadline) as limit:
            await asyncio.sleep(0)  # a deadline that has passed ends the block here
            provider_message_id = await _call(provider, draft)
    except Exception as error:  # noqa: BLE001  # whatever a provider raises means that it did not take the e-mail
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
    except Exception:  # whatever a limiter raises: the e-mail has gone, and must still be stored and reported
        logger.exception("Message %s was sent but could not be counted", draft.id)


async def _store(draft: MailDraft, outcome: SendOutcome, services: Services, key: str | None) -> SendResponse:
    """Store a message, what belongs to it and, under the request's key, the answer; and return that."""
    now = utc(services.clock)
    envelope = Envelope(
        message_id=draft.message_id,
        in_reply_to=draft.in_reply_to,
        references=draft.references,
        from_address=draft.inbox.email_address,
        to_addresses=draft.request.to,
        cc_addresses=draft.request.cc or [],
        bcc_addresses=draft.request.bcc or [],
        subject=draft.request.subject,
        text=draft.request.body,
        html=draft.html,
        attachments=draft.attachments,
    )
    message = StoredMessage(
        id=draft.id,
        direction="outbound",
        status=outcome.status,
        error=outcome.error,
        provider_message_id=outcome.provider_message_id,
    )
    async with services.database.writing() as session:
        thread_id = draft.thread.id if draft.thread else None
        thread = await add_message(session, message, envelope, draft.inbox.id, thread_id, now)
        if services.settings.email_provider == "demo" and outcome.status != "failed":
            await loop_back(session, envelope, services.inbound, now)
        response = SendResponse.model_validate(
            {
                "id": draft.id,
                "thread_id": thread.id,
                "provider_message_id": outcome.provider_message_id,
                "status": outcome.status,
                "error": outcome.error,
            }
        )
        if key is not None:
            await keep_answer(session, key, response)
    return response
