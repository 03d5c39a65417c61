"""Tests of the adapters for model clients, with the real packages and a local provider: tools/test_adapters.sh."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download at import

import anthropic
import httpx2
import litellm
import openai
import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from pydantic_ai import Agent
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

from benchmarks.provider import Limits, Provider
from headgate import AsyncLimiter, Limiter, RateLimited, concurrent, sliding_window
from headgate.llm import AsyncBudget, Budget
from headgate.llm.httpx2 import AsyncBudgetTransport, BudgetTransport
from headgate.llm.langchain import RequestLimiter
from headgate.llm.litellm import BudgetCallback, ProxyBudgetCallback
from headgate.llm.pydantic_ai import BudgetModel
from headgate.testing import FakeClock
from tests.unit.llm.provider import serving

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def rules() -> tuple[Any, ...]:
    return (
        sliding_window("60/minute", name="requests"),
        sliding_window("20000/minute", unit="tokens", name="tokens"),
        concurrent(5, lease="10m", name="in flight"),
    )


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Provider, str]]:
    with serving(Limits(requests=1000, tokens=1_000_000)) as found:
        yield found


@pytest.fixture
def limiter() -> AsyncLimiter:
    return AsyncLimiter(*rules(), clock=FakeClock())


async def used(limiter: AsyncLimiter, key: str = "m") -> list[int]:
    return [result.limit - result.remaining for result in (await limiter.check(key, 0)).results]


# --- The official clients --------------------------------------------------------------------------------------------


def test_openai_client_is_limited_without_changes_in_its_calls(served: tuple[Provider, str]) -> None:
    limiter = Limiter(*rules())
    http = httpx2.Client(transport=BudgetTransport(Budget(limiter, max_wait=0)))
    client = openai.OpenAI(base_url=f"{served[1]}/v1", api_key="k", http_client=http)

    def ask(**options: Any) -> Any:
        return client.chat.completions.create(model="m", messages=MESSAGES, **options)

    assert ask(max_tokens=400, metadata={"usage": "123"}).usage.total_tokens == 123
    assert [result.limit - result.remaining for result in limiter.check("m", 0).results] == [1, 123, 0]
    stream = ask(
        max_tokens=400, metadata={"usage": "60"}, stream=True, stream_options={"include_usage": True}
    )
    assert sum(1 for _ in stream) > 40
    assert [result.limit - result.remaining for result in limiter.check("m", 0).results] == [2, 183, 0]
    with pytest.raises(openai.RateLimitError, match="Headgate budget"):
        ask(max_tokens=19_900)
    with pytest.raises(openai.BadRequestError, match="Headgate budget"):
        ask(max_tokens=30_000)
    assert served[0].statuses[429] == 0


async def test_anthropic_client_is_limited_without_changes_in_its_calls(
    served: tuple[Provider, str], limiter: AsyncLimiter
) -> None:
    http = httpx2.AsyncClient(transport=AsyncBudgetTransport(AsyncBudget(limiter, max_wait=0)))
    client = anthropic.AsyncAnthropic(base_url=served[1], api_key="k", http_client=http)
    options: dict[str, Any] = {"model": "m", "messages": MESSAGES}

    answer = await client.messages.create(
        max_tokens=400, extra_body={"metadata": {"usage": "123"}}, **options
    )
    assert answer.usage.input_tokens + answer.usage.output_tokens == 123
    assert await used(limiter) == [1, 123, 0]
    body = {"metadata": {"usage": "60"}}
    async with client.messages.stream(max_tokens=400, extra_body=body, **options) as stream:
        assert len((await stream.get_final_message()).content) == 1
    assert await used(limiter) == [2, 183, 0]
    body = {"metadata": {"usage": "390"}}
    async with client.messages.stream(max_tokens=400, extra_body=body, **options) as stream:
        assert [text async for text in _first(stream.text_stream, 20)] == ["w"] * 20
    requests, tokens, places = await used(limiter)
    assert (requests, places) == (3, 0)
    assert 183 + 20 <= tokens < 183 + 390
    with pytest.raises(anthropic.RateLimitError, match="Headgate budget"):
        await client.messages.create(max_tokens=19_900, **options)


async def _first(items: AsyncIterator[Any], number: int) -> AsyncIterator[Any]:
    async for item in items:
        yield item
        number -= 1
        if not number:
            return


# --- pydantic-ai -----------------------------------------------------------------------------------------------------


async def test_pydantic_ai_requests_hold_their_estimate_and_settle_at_their_usage(
    limiter: AsyncLimiter,
) -> None:
    model = BudgetModel(TestModel(custom_output_text="Hello there"), AsyncBudget(limiter))
    result = await Agent(model).run("How are you?", model_settings={"max_tokens": 300})
    usage = result.usage
    assert usage.output_tokens > 0
    assert await used(limiter, "test") == [1, usage.input_tokens + usage.output_tokens, 0]


async def test_pydantic_ai_streams_settle_at_their_usage(limiter: AsyncLimiter) -> None:
    async def stream(messages: Any, info: AgentInfo) -> AsyncIterator[str]:
        tokens = (await used(limiter, model.model_name))[1]
        assert tokens >= 300  # the estimate is held
        for _ in range(5):
            yield "word "

    model = BudgetModel(FunctionModel(stream_function=stream), AsyncBudget(limiter))
    agent = Agent(model)
    async with agent.run_stream("How are you?", model_settings={"max_tokens": 300}) as run:
        assert await run.get_output() == "word " * 5
        usage = run.usage
    assert await used(limiter, model.model_name) == [1, usage.input_tokens + usage.output_tokens, 0]


async def test_pydantic_ai_request_above_the_budget_is_not_made(limiter: AsyncLimiter) -> None:
    model = BudgetModel(TestModel(), AsyncBudget(limiter, max_wait=0))
    await limiter.hold("test", {"tokens": 19_900})
    with pytest.raises(RateLimited):
        await Agent(model).run("How are you?")


# --- LangChain -------------------------------------------------------------------------------------------------------


async def test_langchain_models_wait_for_requests() -> None:
    clock = FakeClock()
    limits = RequestLimiter(Limiter("2/minute", clock=clock), AsyncLimiter("2/minute", clock=clock))
    model = GenericFakeChatModel(messages=iter([AIMessage("a")] * 9), rate_limiter=limits)
    started = clock.now
    for _ in range(2):
        assert model.invoke("?").content == "a"
    assert clock.now == started
    assert model.invoke("?").content == "a"
    assert clock.now > started
    assert (await model.ainvoke("?")).content == "a"
    assert await limits.aacquire(blocking=False)
    assert not await limits.aacquire(blocking=False)
    assert [limits.acquire(blocking=False) for _ in range(3)] == [True, False, False]


def test_langchain_limiter_without_the_needed_limiter_says_so() -> None:
    with pytest.raises(ValueError, match="ainvoke, astream and abatch need async_limiter="):
        RequestLimiter(Limiter()).aacquire().send(None)
    with pytest.raises(ValueError, match="invoke, stream and batch need the first argument"):
        RequestLimiter(async_limiter=AsyncLimiter()).acquire()


# --- LiteLLM ---------------------------------------------------------------------------------------------------------

MODEL = "openai/m"


@pytest.fixture
def callbacks() -> Iterator[list[Any]]:
    yield litellm.callbacks
    litellm.callbacks = []


async def ask_litellm(url: str, **options: Any) -> Any:
    return await litellm.acompletion(
        model=MODEL, messages=MESSAGES, api_base=f"{url}/v1", api_key="k", num_retries=0, **options
    )


async def settled(limiter: AsyncLimiter, key: str) -> list[int]:
    """Wait for LiteLLM's background logging."""
    for _ in range(200):
        found = await used(limiter, key)
        if not found[2]:
            return found
        await asyncio.sleep(0.01)
    return found


async def test_litellm_calls_settle_at_their_usage(
    served: tuple[Provider, str], limiter: AsyncLimiter, callbacks: list[Any]
) -> None:
    litellm.callbacks = [BudgetCallback(AsyncBudget(limiter, max_wait=0))]
    await ask_litellm(
        served[1], max_tokens=400, metadata={"usage": "x"}, extra_body={"metadata": {"usage": "123"}}
    )
    key = await _key(limiter)
    assert await settled(limiter, key) == [1, 123, 0]
    stream = await ask_litellm(
        served[1],
        max_tokens=400,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"metadata": {"usage": "60"}},
    )
    assert [chunk async for chunk in stream]
    assert await settled(limiter, key) == [2, 183, 0]
    with pytest.raises(litellm.RateLimitError, match="Headgate budget"):
        await ask_litellm(served[1], max_tokens=19_900)
    with pytest.raises(Exception, match="Connection"):
        await ask_litellm("http://127.0.0.1:9", max_tokens=400)
    assert await settled(limiter, key) == [3, 183, 0]  # a failed call counts as a request


async def _key(limiter: AsyncLimiter) -> str:
    """Return the name of the model as LiteLLM passes it to callbacks."""
    for key in (MODEL, "m"):
        if (await used(limiter, key))[0]:
            return key
    raise AssertionError("nothing was counted")


async def test_litellm_proxy_gives_each_key_a_budget(limiter: AsyncLimiter) -> None:
    hooks = ProxyBudgetCallback(AsyncBudget(limiter, max_wait=0))
    caller, data = SimpleNamespace(api_key="sk-1"), {"model": "m", "max_tokens": 400, "litellm_call_id": "1"}
    await hooks.async_pre_call_hook(caller, None, data, "completion")
    assert await used(limiter, "sk-1") == [1, 400, 1]
    await hooks.async_post_call_success_hook(
        data, caller, SimpleNamespace(usage={"prompt_tokens": 3, "completion_tokens": 4})
    )
    await hooks.async_log_success_event(data, None, None, None)
    assert await used(limiter, "sk-1") == [1, 7, 0]
    failed = {**data, "litellm_call_id": "2"}
    await hooks.async_pre_call_hook(caller, None, failed, "completion")
    await hooks.async_post_call_failure_hook(failed, ValueError(), caller)
    assert await used(limiter, "sk-1") == [2, 7, 0]
    with pytest.raises(litellm.RateLimitError):
        await hooks.async_pre_call_hook(caller, None, {**data, "max_tokens": 19_999}, "completion")
    own = ProxyBudgetCallback(AsyncBudget(limiter), key=lambda auth, model: f"{auth.team_id} {model}")
    await own.async_pre_call_hook(SimpleNamespace(team_id="red"), None, data, "completion")
    assert (await used(limiter, "red m"))[0] == 1
