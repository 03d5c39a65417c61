"""A client for the Headgate server. It is used like any other store:

    store = ServerStore("http://127.0.0.1:8080")
    limiter = store.limiter("login")           # or await store.async_limiter("login")
    limiter.hit("alice")

It needs httpx: pip install 'headgate[client]'.
"""

from __future__ import annotations

from headgate._extras import needing
from headgate.usage import RuleUsage

with needing("headgate.client", "client"):
    from headgate.client.store import ServerStore
    from headgate.client.values import KeyState, ServerLimiter, WaitHint

__all__ = ["KeyState", "RuleUsage", "ServerLimiter", "ServerStore", "WaitHint"]
