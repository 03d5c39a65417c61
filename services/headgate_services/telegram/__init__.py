"""A Telegram bot webhook with a limit per user, counted in a key-value store.

`headgate run telegram` starts it; `create_app` returns the application for another server or a test.
"""

from headgate_services.telegram.app import create_app, main
from headgate_services.telegram.config import TelegramSettings
from headgate_services.telegram.dispatch import ButtonPress, File, Handler, Message

__all__ = [
    "ButtonPress",
    "File",
    "Handler",
    "Message",
    "TelegramSettings",
    "create_app",
    "main",
]
