"""Budgets for calls to language models: requests, tokens, calls in progress and money, in one limiter.

    budget = AsyncBudget(limiter)
    async with budget.call("gpt-5", estimated=request) as call:
        response = await client.responses.create(**request)
        call.settle(response.usage)

A call holds its estimated usage, and settles it at the true usage. Adapters do this inside other libraries' clients:
`headgate.llm.httpx` and `headgate.llm.httpx2` (the official `openai` and `anthropic` clients), `headgate.llm.pydantic_ai`,
`headgate.llm.langchain` and `headgate.llm.litellm`.
"""

from __future__ import annotations

from headgate.llm.budget import BudgetOptions
from headgate.llm.calls import AsyncBudget, AsyncBudgetCall, Budget, BudgetCall
from headgate.llm.usage import Price, Usage

__all__ = [
    "AsyncBudget",
    "AsyncBudgetCall",
    "Budget",
    "BudgetCall",
    "BudgetOptions",
    "Price",
    "Usage",
]
