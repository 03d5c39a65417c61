"""The four services: names, preferred ports, and settings in the demo."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headgate_services import mail, petitions, telegram, tiers
from headgate_services.demo.callers import WRITERS

PORTS: Mapping[str, int] = MappingProxyType(
    {"mail": 8001, "telegram": 8002, "tiers": 8003, "petitions": 8004}
)
"""The services, and the port of each unless it is taken or set otherwise."""

PAGES: Mapping[str, str] = MappingProxyType(
    {"mail": "/v1/rate-limit", "telegram": "/", "tiers": "/", "petitions": "/metrics"}
)
"""A page of each service for a browser."""

_FACTORIES: Mapping[str, Callable[[], Any]] = {
    "mail": mail.create_app,
    "telegram": telegram.create_app,
    "tiers": tiers.create_app,
    "petitions": petitions.create_app,
}


def make_service(name: str, variables: Mapping[str, str]) -> Any:
    """Return a service as an ASGI application, created with exactly these environment variables.

    Raises the error of the service if one of them is wrong.
    """
    with environment(variables):
        return _FACTORIES[name]()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replace the environment variables of the process during the block.

    Services read the environment only when they are created, so each can have different settings. Not thread-safe.
    """
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def demo_settings(
    folder: Path, redis_url: str, postgres_url: str, bot_api_url: str
) -> dict[str, dict[str, str]]:
    """Return the environment of each service in the demo. Limits are per minute, so that their effect is visible.

    Args:
        folder: The folder for files.
        redis_url: The URL of Redis, without a database.
        postgres_url: The URL of PostgreSQL.
        bot_api_url: The URL of the Bot API.
    """
    return {
        "mail": {
            "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "60",
            "GLOBAL_SEND_RATE_LIMIT_PER_HOUR": "3000",
            "EMAIL_PROVIDER": "demo",
            "DATABASE_URL": f"sqlite:///{folder / 'mail.db'}",
        },
        "telegram": {
            "TELEGRAM_BOT_TOKEN": "1:demo",
            "TELEGRAM_WEBHOOK_SECRET": secrets.token_hex(16),
            "TELEGRAM_API_BASE": bot_api_url,
            "ALLOWED_USER_IDS": ",".join(map(str, WRITERS)),
            "RATE_LIMIT_MAX": "30",
            "RATE_LIMIT_WINDOW_MS": "60000",
            "RATE_LIMIT_KV": f"{redis_url}/2",
        },
        "tiers": {
            "SAJU_ENABLE_RATE_LIMITING": "true",
            "SAJU_ENABLE_ATOMIC_RATE_LIMITER": "true",
            "SAJU_REDIS_URL": f"{redis_url}/1",
            "SAJU_TRUSTED_PROXIES": "127.0.0.0/8, ::1",
            "DATABASE_URL": f"sqlite:///{folder / 'tiers.db'}",
        },
        "petitions": {
            "DATABASE_URL": postgres_url,
            "PETITION_RATE_LIMIT_PER_HOUR": "10",
            "PETITION_RATE_LIMIT_WINDOW_MINUTES": "1",
            # Nobody processes the petitions of the demo, and waiting petitions must not fill the queue.
            "PETITION_QUEUE_THRESHOLD": "1000000000",
        },
    }
