"""The endpoints, one module per kind of thing."""

from __future__ import annotations

from fastapi import APIRouter

from headgate_services.mail.routes import attachments, inboxes, messages, rate_limit, threads

__all__ = ["api"]

api = APIRouter(prefix="/v1")
for module in (inboxes, messages, threads, attachments, rate_limit):
    api.include_router(module.router)
