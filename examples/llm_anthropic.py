"""The official Anthropic client within a budget. Run it with `ANTHROPIC_API_KEY=… python examples/llm_anthropic.py`."""

import os

import anthropic
import httpx2

from headgate import Limiter, token_bucket
from headgate.llm import Budget
from headgate.llm.httpx2 import BudgetTransport

limiter = Limiter(
    token_bucket("50/minute", burst=40),
    token_bucket("30000/minute", burst=24000, unit="input_tokens"),
    token_bucket("8000/minute", burst=6400, unit="output_tokens"),
)
client = anthropic.Anthropic(
    http_client=httpx2.Client(transport=BudgetTransport(Budget(limiter)), timeout=600)
)

question = [{"role": "user", "content": "Say hello."}]
with client.messages.stream(
    model=os.environ.get("MODEL", "claude-sonnet-4-5"), max_tokens=200, messages=question
) as stream:
    usage = stream.get_final_message().usage
print(f"{usage.input_tokens} and {usage.output_tokens} tokens")
