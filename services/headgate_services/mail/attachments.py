"""Decoding and size checks of attachments."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from fastapi import HTTPException

from headgate_services.mail.config import MEGABYTE, Settings
from headgate_services.mail.providers import OutgoingAttachment
from headgate_services.mail.schemas import SendAttachment


def decode_attachments(given: Sequence[SendAttachment], settings: Settings) -> list[OutgoingAttachment]:
    """Return the attachments with their content.

    Raises:
        HTTPException: 422 for too many attachments or an empty one, 413 for too large, 400 for invalid base64.
    """
    if len(given) > settings.attachment_max_count:
        raise HTTPException(
            422, f"{len(given)} attachments are more than the {settings.attachment_max_count} allowed"
        )
    decoded: list[OutgoingAttachment] = []
    total = 0
    for index, attachment in enumerate(given):
        content = _decode(index, attachment.content_base64)
        total += len(content)
        if len(content) > settings.attachment_max_size_mb * MEGABYTE:
            raise HTTPException(413, f"Attachment {index} is above {settings.attachment_max_size_mb} MB")
        if total > settings.attachment_max_total_size_mb * MEGABYTE:
            raise HTTPException(
                413, f"Attachments are above {settings.attachment_max_total_size_mb} MB together"
            )
        decoded.append(
            OutgoingAttachment(
                attachment.filename,
                attachment.content_type,
                content,
                attachment.disposition,
                attachment.content_id,
            )
        )
    return decoded


def _decode(index: int, text: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: characters beyond ASCII
        raise HTTPException(400, f"Invalid base64 content in attachment {index}: {error}") from error
    if not content:
        raise HTTPException(422, f"Attachment {index} has empty content")
    return content
