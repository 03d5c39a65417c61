"""The official OpenAI client within a budget. Run it with `OPENAI_API_KEY=… python examples/llm_openai.py`."""

import asyncio
import os

import httpx2
import openai

from headgate import AsyncLimiter, concurrent, token_bucket
from headgate.llm import AsyncBudget
from headgate.llm.httpx2 import AsyncBudgetTransport

MODEL = os.environ.get("MODEL", "gpt-5-mini")
limiter = AsyncLimiter(
    token_bucket("500/minute", burst=400),
    token_bucket("30000/minute", burst=24000, unit="tokens"),
    concurrent(20, lease="10m"),
)


async def main():
    http = httpx2.AsyncClient(transport=AsyncBudgetTransport(AsyncBudget(limiter)), timeout=600)
    async with openai.AsyncOpenAI(http_client=http) as client:
        messages = [{"role": "user", "content": "Say hello."}]
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=200)
                for _ in range(5)
            )
        )
    used = sum(answer.usage.total_tokens for answer in answers)
    print(f"{len(answers)} answers, {used} tokens")


asyncio.run(main())
