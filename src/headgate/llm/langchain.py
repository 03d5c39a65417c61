"""Request limits for LangChain: `init_chat_model(..., rate_limiter=RequestLimiter(Limiter("60/minute")))`.

A LangChain rate limiter sees neither the request nor the response, so it counts requests only. Tokens are limited by the
transport in `headgate.llm.httpx`, as `http_client=` of the chat model.
"""

from __future__ import annotations

import math

from headgate import AsyncLimiter, Limiter
from headgate._checks import check_kind
from headgate._extras import needing
from headgate.errors import ConfigError

with needing("headgate.llm.langchain", "llm-langchain"):
    from langchain_core.rate_limiters import BaseRateLimiter

__all__ = ["RequestLimiter"]


class RequestLimiter(BaseRateLimiter):  # type: ignore[misc]
    """A LangChain rate limiter that counts requests in a Headgate limiter, shared by all processes of its store.

    Args:
        limiter: The limiter for `invoke`, `stream` and `batch`; `None` if they are not used.
        async_limiter: The limiter for `ainvoke`, `astream` and `abatch`, with the same name and store, so that both count
            together; `None` if they are not used.
        key: The key to count by.
        max_wait: The longest wait in seconds; after it `RateLimited` is raised.
    """

    def __init__(
        self,
        limiter: Limiter | None = None,
        async_limiter: AsyncLimiter | None = None,
        *,
        key: str = "langchain",
        max_wait: float = math.inf,
    ) -> None:
        self._limiter = check_kind("limiter", limiter, Limiter | None, "a Limiter")
        self._async_limiter = check_kind(
            "async_limiter=", async_limiter, AsyncLimiter | None, "an AsyncLimiter"
        )
        self._key, self._max_wait = key, max_wait

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take a request; wait for it if `blocking`."""
        if self._limiter is None:
            raise ConfigError("invoke, stream and batch need the first argument of RequestLimiter, a Limiter")
        if not blocking:
            return self._limiter.hit(self._key).allowed
        return self._limiter.wait(self._key, timeout=self._max_wait).allowed

    async def aacquire(self, *, blocking: bool = True) -> bool:
        """Take a request; wait for it if `blocking`."""
        if self._async_limiter is None:
            raise ConfigError("ainvoke, astream and abatch need async_limiter= of RequestLimiter")
        if not blocking:
            return (await self._async_limiter.hit(self._key)).allowed
        return (await self._async_limiter.wait(self._key, timeout=self._max_wait)).allowed
