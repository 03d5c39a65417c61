"""Budgets for pydantic-ai: `Agent(BudgetModel("openai:gpt-5", budget))`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headgate._checks import check_kind
from headgate._extras import needing
from headgate.llm.calls import AsyncBudget
from headgate.llm.usage import Usage

with needing("headgate.llm.pydantic_ai", "llm-pydantic-ai"):
    from pydantic_ai.models.wrapper import WrapperModel

__all__ = ["BudgetModel"]


class BudgetModel(WrapperModel):  # type: ignore[misc]
    """A model whose requests stay within a budget. Each request holds its estimate, and settles at its usage.

    Args:
        wrapped: The model, or its name.
        budget: The budget. It counts by `model_name` of the wrapped model.
    """

    def __init__(self, wrapped: Any, budget: AsyncBudget) -> None:
        super().__init__(wrapped)
        self._budget = check_kind("budget", budget, AsyncBudget, "an AsyncBudget")

    async def request(self, messages: Any, model_settings: Any, model_request_parameters: Any) -> Any:
        """Make a request within the budget."""
        estimated = self._estimate(messages, model_settings, model_request_parameters)
        async with self._budget.call(self.model_name, estimated) as call:
            response = await super().request(messages, model_settings, model_request_parameters)
            call.settle(response.usage)
        return response

    @asynccontextmanager
    async def request_stream(
        self,
        messages: Any,
        model_settings: Any,
        model_request_parameters: Any,
        run_context: Any = None,
    ) -> AsyncIterator[Any]:
        """Make a streaming request within the budget. It settles at the usage so far when the stream is left."""
        estimated = self._estimate(messages, model_settings, model_request_parameters)
        async with self._budget.call(self.model_name, estimated) as call:
            call.progress(0)
            async with super().request_stream(
                messages, model_settings, model_request_parameters, run_context
            ) as stream:
                try:
                    yield stream
                finally:
                    usage = Usage.of(stream.usage)
                    call.progress(usage.output_tokens)
                    if usage.counted_input:
                        call.settle(usage)

    def _estimate(self, messages: Any, model_settings: Any, model_request_parameters: Any) -> Usage:
        """Estimate a request from the texts of its messages and tools, and `max_tokens` of its settings."""
        settings, parameters = self.prepare_request(model_settings, model_request_parameters)
        texts = [_texts(part) for message in messages for part in message.parts]
        texts += [
            [tool.name, tool.description, str(tool.parameters_json_schema)]
            for tool in parameters.function_tools
        ]
        texts += [getattr(message, "instructions", None) for message in messages[-1:]]
        return self._budget.estimate({"messages": texts, "max_tokens": (settings or {}).get("max_tokens")})


def _texts(part: Any) -> Any:
    """Return the texts of a part; other content, such as an image, counts as an attachment."""
    content = getattr(part, "content", None)
    if content is None:
        return str(getattr(part, "args", ""))
    if isinstance(content, list | tuple):
        return [item if isinstance(item, str) else {"type": "base64"} for item in content]
    return content if isinstance(content, str) else str(content)
