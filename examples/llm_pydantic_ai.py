"""pydantic-ai within a budget of tokens and dollars. Run it with `OPENAI_API_KEY=… python examples/llm_pydantic_ai.py`."""

import os

from pydantic_ai import Agent

from headgate import AsyncLimiter, calendar, token_bucket
from headgate.llm import AsyncBudget, Price
from headgate.llm.pydantic_ai import BudgetModel

MODEL = os.environ.get("MODEL", "gpt-5-mini")
limiter = AsyncLimiter(
    token_bucket("30000/minute", burst=24000, unit="tokens"),
    calendar("5000000/day", timezone="UTC", unit="microdollars", name="5 dollars per day"),
)
budget = AsyncBudget(limiter, prices={MODEL: Price(input=0.25, output=2)})
agent = Agent(BudgetModel(f"openai-chat:{MODEL}", budget))
result = agent.run_sync("Say hello.", model_settings={"max_tokens": 200})
print(f"{result.usage.output_tokens} tokens")
