"""LiteLLM within a budget. Run it with `OPENAI_API_KEY=… python examples/llm_litellm.py`."""

import asyncio
import os

import litellm

from headgate import AsyncLimiter, token_bucket
from headgate.llm import AsyncBudget
from headgate.llm.litellm import BudgetCallback

MODEL = os.environ.get("MODEL", "gpt-5-mini")
limiter = AsyncLimiter(
    token_bucket("500/minute", burst=400), token_bucket("30000/minute", burst=24000, unit="tokens")
)
litellm.callbacks = [BudgetCallback(AsyncBudget(limiter))]


async def main():
    messages = [{"role": "user", "content": "Say hello."}]
    answer = await litellm.acompletion(model=f"openai/{MODEL}", messages=messages, max_tokens=200)
    print(f"{answer.usage.total_tokens} tokens")


asyncio.run(main())
