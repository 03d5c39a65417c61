"""The four services: what they are called, where they prefer to listen, and how the demo sets them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headgate_services import mail, petitions, telegram, tiers
from headgate_services.demo.environment import environment
from headgate_services.demo.visitors import WRITERS

PORTS: Mapping[str, int] = MappingProxyType(
    {"mail": 8001, "telegram": 8002, "tiers": 8003, "petitions": 8004}
)
"""The services, and the port of each unless it is taken or set otherwise."""

PAGES: Mapping[str, str] = MappingProxyType(
    {"mail": "/v1/rate-limit", "telegram": "/", "tiers": "/", "petitions": "/metrics"}
)
"""What a browser can look at in each of them."""

_FACTORIES: Mapping[str, Callable[[], Any]] = {
    "mail": mail.create_app,
    "telegram": telegram.create_app,
    "tiers": tiers.create_app,
    "petitions": petitions.create_app,
}


def make_service(name: str, variables: Mapping[str, str]) -> Any:
    """Return a service as an ASGI application, made under exactly these environment variables.

    Raises whatever it does not like about them.
    """
    with environment(variables):
        return _FACTORIES[name]()


def demo_settings(
    folder: Path, redis_url: str, postgres_url: str, smtp_port: int, bot_api_url: str
) -> dict[str, dict[str, str]]:
    """Return the environment of each service in the demo. Limits are per minute, so that one sees them come and go.

    Args:
        folder: Where files go.
        redis_url: Where Redis is, without a database.
        postgres_url: Where PostgreSQL is.
        smtp_port: Where e-mails go, on this machine.
        bot_api_url: Where the bot's answers go.
    """
    return {
        "mail": {
            "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "60",
            "GLOBAL_SEND_RATE_LIMIT_PER_HOUR": "3000",
            "EMAIL_PROVIDER": "smtp",
            "EMAIL_DOMAIN": "news.example.com",
            "SMTP_HOST": "127.0.0.1",
            "SMTP_PORT": str(smtp_port),
            "SMTP_USE_TLS": "false",
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
            # No one deals with the petitions of the demo, so they wait for ever; that must not fill the queue.
            "PETITION_QUEUE_THRESHOLD": "1000000000",
        },
    }
