"""A Telegram bot webhook with a limit per user, counted in a key-value store.

`main` runs it, `create_app` returns the ASGI application, `set_webhook` registers the webhook with Telegram.
"""

from headgate_services.telegram.app import (
    create_app,
    delete_webhook,
    inspect_user,
    main,
    poll,
    purge_limits,
    reset_user,
    set_webhook,
    webhook_info,
)
from headgate_services.telegram.config import TelegramSettings
from headgate_services.telegram.dispatch import ButtonPress, File, Handler, Message

__all__ = [
    "ButtonPress",
    "File",
    "Handler",
    "Message",
    "TelegramSettings",
    "create_app",
    "delete_webhook",
    "inspect_user",
    "main",
    "poll",
    "purge_limits",
    "reset_user",
    "set_webhook",
    "webhook_info",
]
