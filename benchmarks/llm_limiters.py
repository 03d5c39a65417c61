"""The limiters that `benchmarks.llm` compares, each as a function that makes one call of the provider.

LangChain's and LiteLLM's limiters are configured as their documentation recommends. Their packages are in the extra
`adapters`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from headgate import AsyncLimiter, Rule, concurrent, sliding_window, token_bucket
from headgate.llm import AsyncBudget
from headgate.llm.httpx import AsyncBudgetTransport

MODEL = "m"
MARGIN = 0.995
"""The rate of the budget, as a share of the provider's rate."""

BURST = 0.8
"""The burst of the budget, as a share of the provider's capacity. The rest is for usage that is not yet settled."""

PATH = "/v1/chat/completions"

Ask = Callable[[dict[str, Any]], AbstractAsyncContextManager[httpx.Response]]


@dataclass(frozen=True)
class Account:
    """The limits of the provider's account.

    Attributes:
        requests: Requests per period.
        tokens: Tokens per period.
        period: The period in seconds. Real providers use 60 seconds; a shorter period shortens the measurement.
        per_day: Requests per day.
        in_flight: Calls in progress.
    """

    requests: int = 700
    tokens: int = 120_000
    period: float = 20
    per_day: int = 1_000_000
    in_flight: int = 300


def budget_rules(account: Account) -> tuple[Rule, ...]:
    """Return the rules of the budget."""
    requests, tokens = int(account.requests * MARGIN), int(account.tokens * MARGIN)
    return (
        token_bucket(f"{requests}/{account.period:g}s", burst=int(account.requests * BURST), name="requests"),
        token_bucket(
            f"{tokens}/{account.period:g}s", burst=int(account.tokens * BURST), unit="tokens", name="tokens"
        ),
        sliding_window(f"{account.per_day}/day", name="per day"),
        concurrent(account.in_flight, lease="2m", name="in flight"),
    )


@asynccontextmanager
async def open_client(
    limiter: str, store: str, url: str, account: Account, processes: int
) -> AsyncIterator[Ask]:
    """Yield a function that makes a call, limited by one of the limiters."""
    if limiter.startswith("litellm"):
        yield _litellm(store, url, account, is_enforced=limiter == "litellm-enforced")
        return
    options: dict[str, Any] = {"timeout": 120, "base_url": url, "limits": httpx.Limits(max_connections=None)}
    if limiter == "headgate":
        rules = budget_rules(account)
        counts = AsyncLimiter(*rules, name="provider", store=store, on_store_error="raise", deadline=30)
        budget = AsyncBudget(counts, max_wait=600)
        async with httpx.AsyncClient(transport=AsyncBudgetTransport(budget), **options) as client:
            yield lambda request: client.stream("POST", PATH, json=request)
        await counts.aclose()
        return
    acquire = _acquire(limiter, account, processes)
    async with httpx.AsyncClient(**options) as client:

        @asynccontextmanager
        async def ask(request: dict[str, Any]) -> AsyncIterator[httpx.Response]:
            await acquire()
            async with client.stream("POST", PATH, json=request) as response:
                yield response

        yield ask


def _acquire(limiter: str, account: Account, processes: int) -> Callable[[], Awaitable[object]]:
    """Return a function that waits until a call may be made."""
    if limiter == "langchain":  # counts requests in one process
        from langchain_core.rate_limiters import InMemoryRateLimiter

        share = account.requests / account.period / processes
        own = InMemoryRateLimiter(
            requests_per_second=share, check_every_n_seconds=0.05, max_bucket_size=share
        )
        return lambda: own.aacquire()
    # Four tasks of the additional client, with calls of one second on average, use about a tenth of the tokens.
    pauses = {"none": 0.0, "outside": max(0.0, 4 * 280 * account.period / (account.tokens / 10) - 1)}
    return lambda: asyncio.sleep(pauses[limiter])


def _litellm(store: str, url: str, account: Account, is_enforced: bool) -> Ask:
    """Return a function that makes a call through LiteLLM's router.

    The router counts requests and tokens of a clock minute in Redis, and raises when the minute is full. It does not wait,
    so this function retries within the first five seconds of the next minute.

    Args:
        is_enforced: Use the check `enforce_model_rate_limits` instead of the usage-based routing.
    """
    import litellm
    from litellm.types.router import RouterRateLimitError

    logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)
    logging.getLogger("LiteLLM Router").setLevel(logging.CRITICAL)

    minutes = account.period / 60
    limits = {"rpm": int(account.requests / minutes), "tpm": int(account.tokens / minutes)}
    model = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "k", "max_retries": 0, **limits}
    enforced: dict[str, Any] = {"optional_pre_call_checks": ["enforce_model_rate_limits"]}
    chosen: dict[str, Any] = enforced if is_enforced else {"routing_strategy": "usage-based-routing-v2"}
    host, _, port = store.removeprefix("redis://").partition("/")[0].partition(":")
    router = litellm.Router(
        model_list=[{"model_name": MODEL, "litellm_params": model, "model_info": {"id": "1"}}],
        redis_host=host,
        redis_port=int(port),
        cache_kwargs={"max_connections": 1000},  # the default of 50 is too low for 50 waiting tasks
        num_retries=0,
        timeout=120,
        **chosen,
    )

    async def send(request: dict[str, Any]) -> Any:
        """Return the reply, or None if the provider answered 429."""
        while True:
            try:
                return await router.acompletion(**request)
            except (litellm.RateLimitError, RouterRateLimitError) as error:
                if "too many: " in str(error):  # the provider's message
                    return None
            except (litellm.APIConnectionError, litellm.InternalServerError) as error:
                raise httpx.TransportError(str(error)) from error
            await asyncio.sleep(60 - time.time() % 60 + random.uniform(0, 5))

    @asynccontextmanager
    async def ask(request: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        reply = await send({**request, "metadata": {}, "extra_body": {"metadata": request["metadata"]}})
        if reply is None or not request.get("stream"):
            yield httpx.Response(429 if reply is None else 200)
            return

        async def lines() -> AsyncIterator[bytes]:
            async for _ in reply:
                yield b"chunk\n"

        try:
            yield httpx.Response(200, content=lines())
        finally:
            await reply.aclose()

    return ask
