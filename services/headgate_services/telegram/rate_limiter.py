"""The limit: so many messages per user and window.

Fixed windows are kept as the key-value namespace has always had them: under `ratelimit:{userId}:{windowKey}`, where
windowKey is the epoch in milliseconds divided by the window's, rounded down, with the count as decimal text. The sliding
window has entries of its own, `ratelimit:{userId}:sliding_window:{windowMs}`, so that neither reads the other's.
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
    """Return the limiter whose keys are Telegram's user ids, as text.

    With `"open"`, a shared store that is down is not waited for until a probe succeeds.
    """
    quota = Quota(settings.rate_limit_max, settings.rate_limit_window_ms * MICROSECONDS_PER_MS)
    rule = fixed_window(quota) if settings.rate_limit_algorithm == "fixed_window" else sliding_window(quota)
    store = KVStore(kv, stem=entry_stem, clock=clock)
    return AsyncLimiter(rule, name="telegram", store=store, on_store_error=on_store_error, hooks=hooks)


def entry_stem(limiter: str, rule: Rule, key: str | bytes) -> str:
    """Return the name of a user's entry; to that of a fixed window, the store adds `:{windowKey}`."""
    stem = f"ratelimit:{key!s}"
    if rule.kind == "fixed_window":
        return stem
    return f"{stem}:{rule.kind}:{rule.quota.period_us // MICROSECONDS_PER_MS}"
