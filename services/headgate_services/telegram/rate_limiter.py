"""The limit of messages per user and window.

A fixed window has the key `ratelimit:{userId}:{windowKey}` and the count as decimal text; windowKey is the epoch in
milliseconds divided by the window in milliseconds, rounded down. A sliding window has the key
`ratelimit:{userId}:sliding_window:{windowMs}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from headgate import AsyncLimiter, Hook, Quota, Rule, fixed_window, sliding_window
from headgate.clock import Clock
from headgate.stores.kv import KV, KVStore
from headgate_services.telegram.config import MICROSECONDS_PER_MS, TelegramSettings


def user_limiter(
    settings: TelegramSettings,
    kv: KV,
    clock: Clock | None = None,
    hooks: Iterable[Hook] = (),
    on_store_error: Literal["open", "raise"] = "raise",
) -> AsyncLimiter:
    """Return the limiter; its keys are Telegram's user ids, as text.

    With `"open"`, messages are admitted without waiting while the store is down.
    """
    quota = Quota(settings.rate_limit_max, settings.rate_limit_window_ms * MICROSECONDS_PER_MS)
    rule = fixed_window(quota) if settings.rate_limit_algorithm == "fixed_window" else sliding_window(quota)
    store = KVStore(kv, stem=entry_stem, clock=clock)
    return AsyncLimiter(rule, name="telegram", store=store, on_store_error=on_store_error, hooks=hooks)


def entry_stem(limiter: str, rule: Rule, key: str | bytes) -> str:
    """Return the key of a user's entry; for a fixed window, the store appends `:{windowKey}`."""
    stem = f"ratelimit:{key!s}"
    if rule.kind == "fixed_window":
        return stem
    return f"{stem}:{rule.kind}:{rule.quota.period_us // MICROSECONDS_PER_MS}"
