"""The send limit: how much of it is used."""

from __future__ import annotations

from fastapi import APIRouter

from headgate_services.mail.rate_limiter import usage_of
from headgate_services.mail.schemas import RateLimitView
from headgate_services.mail.services import LimiterPart

router = APIRouter(prefix="/rate-limit", tags=["rate limit"])


@router.get("")
async def get_rate_limit(limiter: LimiterPart) -> RateLimitView:
    """Return limits, counts and waits of all windows, and count nothing."""
    return RateLimitView.of(await usage_of(limiter))
