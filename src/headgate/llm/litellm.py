"""Budgets for LiteLLM: `litellm.callbacks = [BudgetCallback(budget)]`, and `ProxyBudgetCallback` for its proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from headgate._checks import check_kind
from headgate._extras import needing
from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.http.keys import check_function
from headgate.keys import Key
from headgate.llm.calls import AsyncBudget, AsyncBudgetCall

with needing("headgate.llm.litellm", "llm-litellm"):
    from litellm.exceptions import RateLimitError, Timeout
    from litellm.integrations.custom_logger import CustomLogger

__all__ = ["BudgetCallback", "ProxyBudgetCallback"]

MOST_OPEN = 10_000
"""The number of calls without an end that are kept. LiteLLM does not report the end of abandoned streams."""


class OpenCalls:
    """The calls in progress, by LiteLLM's identifier."""

    def __init__(self, budget: AsyncBudget) -> None:
        self._budget = check_kind("budget", budget, AsyncBudget, "an AsyncBudget")
        self._open: dict[str, AsyncBudgetCall] = {}

    async def start(self, request: dict[str, Any], key: Key | None = None) -> None:
        """Hold the estimate of a call."""
        model = str(request.get("model", ""))
        call = self._budget.call(model, request, key=key)
        try:
            await call.__aenter__()
        except (RateLimited, CostTooHigh) as error:
            raise RateLimitError(f"Headgate budget: {error}", "headgate", model) from error
        self._open[str(request.get("litellm_call_id"))] = call
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    async def end(self, request: Any, response: Any, failure: BaseException | None = None) -> None:
        """Settle a call; later reports of its end do nothing."""
        call = self._open.pop(str(request.get("litellm_call_id")), None)
        if call is None:
            return
        if request.get("cache_hit"):
            call.release()
        with contextlib.suppress(ConfigError):  # without usage it keeps the estimate
            call.settle(getattr(response, "usage", None))
        if isinstance(failure, Timeout):
            failure = TimeoutError()  # the provider may have charged the call, so it keeps its estimate
        await call.__aexit__(None if failure is None else type(failure), failure, None)


class BudgetCallback(CustomLogger):  # type: ignore[misc]
    """A callback for the LiteLLM SDK that keeps each attempt of `acompletion` and other async calls within a budget.

    A call that the budget refuses raises `litellm.RateLimitError`. A stream is settled at its end. If it is abandoned,
    LiteLLM reports no end: the call keeps its estimate. LiteLLM calls it for async calls only.

    Args:
        budget: The budget. It counts by LiteLLM's name of the model.
    """

    def __init__(self, budget: AsyncBudget) -> None:
        super().__init__()
        self._calls = OpenCalls(budget)

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> None:
        """Hold the estimate of a call."""
        await self._calls.start(kwargs)

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        """Settle a call at its usage."""
        await self._calls.end(request_data, response)

    async def async_post_call_failure_deployment_hook(
        self, request_data: Any, exception: Exception, call_type: Any, fallback_depth: int | None = None
    ) -> None:
        """Settle a call that failed."""
        await self._calls.end(request_data, None, exception)

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Settle a stream at its usage."""
        await self._calls.end(kwargs, response_obj)

    async def async_log_failure_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Settle a call that failed, in versions of LiteLLM without a hook for failed attempts."""
        await self._calls.end(kwargs, None, kwargs.get("exception"))


class ProxyBudgetCallback(CustomLogger):  # type: ignore[misc]
    """A callback for the LiteLLM proxy that gives each caller a budget: `callbacks: my_module.instance` in its settings.

    A refused request is answered with 429.

    Args:
        budget: The budget.
        key: A function from the proxy's `UserAPIKeyAuth` and the model to the key to count by; by default the API key.
    """

    def __init__(self, budget: AsyncBudget, key: Callable[[Any, str], Key] | None = None) -> None:
        super().__init__()
        if key is not None:
            check_function("key=", key, can_await=False)
        self._calls, self._key = OpenCalls(budget), key

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> None:
        """Hold the estimate of a request."""
        key = self._key(user_api_key_dict, data.get("model", "")) if self._key else user_api_key_dict.api_key
        await self._calls.start(data, key or "anonymous")

    async def async_post_call_success_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any
    ) -> None:
        """Settle a request at its usage."""
        await self._calls.end(data, response)

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> None:
        """Settle a request that failed."""
        await self._calls.end(request_data, None, original_exception)

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Settle a stream at its usage."""
        await self._calls.end(kwargs, response_obj)
