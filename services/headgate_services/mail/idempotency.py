"""`Idempotency-Key`: a repeated request gets the same response, and sends nothing.

A key is reserved first, and stored with the response in the transaction that stores the message. It is freed if the request
was refused or the send failed, because nothing was sent. If the process dies in between, the outcome is unknown and the key
stays reserved: the e-mail may be missing, but is never sent twice.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from hashlib import sha256

from fastapi import HTTPException
from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from headgate_services.mail.schemas import SendRequest, SendResponse
from headgate_services.mail.services import Services
from headgate_services.mail.storage.database import MailDatabase
from headgate_services.mail.storage.models import IdempotencyKey
from headgate_services.mail.storage.times import utc

KEPT = timedelta(hours=24)
"""How long a key is stored."""

logger = logging.getLogger(__name__)

_IN_PROGRESS = "A request with this Idempotency-Key is in progress, or was interrupted and may have been sent"
_OTHER_REQUEST = "This Idempotency-Key was used for another request"


async def take_key(key: str, request: SendRequest, services: Services) -> SendResponse | None:
    """Reserve a key for a request; return the response of an earlier request with the same key, if any.

    Raises:
        HTTPException: 409 if the earlier request has no response yet, 422 if it was different.
    """
    fingerprint = sha256(request.model_dump_json().encode()).hexdigest()
    now = utc(services.clock)
    try:
        async with services.database.writing() as session:
            await session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at <= now - KEPT))
            known = await session.get(IdempotencyKey, key)
            if known is None:
                session.add(IdempotencyKey(key=key, fingerprint=fingerprint, response=None, created_at=now))
                return None
    except IntegrityError as error:  # another process reserved it at the same moment
        raise HTTPException(409, _IN_PROGRESS) from error
    if known.fingerprint != fingerprint:
        raise HTTPException(422, _OTHER_REQUEST)
    if known.response is None:
        raise HTTPException(409, _IN_PROGRESS)
    return SendResponse.model_validate(known.response)


async def keep_answer(session: AsyncSession, key: str, response: SendResponse) -> None:
    """Store the response for the next request with this key; after a failed send, free the key instead."""
    known = await session.get(IdempotencyKey, key)
    if known is not None and response.status == "failed":
        await session.delete(known)
    elif known is not None:
        known.response = response.model_dump()


async def free_key(key: str, database: MailDatabase) -> None:
    """Free a key whose request was refused before anything was sent."""
    try:
        async with database.writing() as session:
            await session.execute(delete(IdempotencyKey).where(IdempotencyKey.key == key))
    except SQLAlchemyError as error:  # the response to the request does not depend on it
        logger.warning("Idempotency-Key %s stays reserved for %s: %s", key, KEPT, error)
