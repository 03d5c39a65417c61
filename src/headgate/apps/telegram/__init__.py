"""A Telegram bot webhook with a limit per user, counted in a key-value store.

`main` serves it, `create_app` is the ASGI application, `set_webhook` tells Telegram where it is. See README.md.
"""

from headgate.apps.telegram.app import (
    create_app,
    inspect_user,
    main,
    purge_limits,
    reset_user,
    set_webhook,
)
from headgate.apps.telegram.config import Settings
from headgate.apps.telegram.dispatch import ButtonPress, Handler, Message

__all__ = [
    "ButtonPress",
    "Handler",
    "Message",
    "Settings",
    "create_app",
    "inspect_user",
    "main",
    "purge_limits",
    "reset_user",
    "set_webhook",
]
