"""The transport of httpx, against a provider on a local port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.provider import Limits, Provider
from headgate import AsyncLimiter, ConfigError, Limiter, concurrent, sliding_window
from headgate.llm import AsyncBudget, Budget
from headgate.llm.httpx import AsyncBudgetTransport, BudgetTransport
from tests.unit.llm.provider import serving

QUESTION = {"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": "Hello"}]}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PROMPT = 9  # in the provider's count


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
def limiter() -> Limiter:
    return Limiter(*rules())


@pytest.fixture
def client(limiter: Limiter, served: tuple[Provider, str]) -> Iterator[httpx.Client]:
    with httpx.Client(transport=BudgetTransport(Budget(limiter)), base_url=served[1]) as client:
        yield client


def used(limiter: Limiter) -> list[int]:
    return [result.limit - result.remaining for result in limiter.check("m", 0).results]


def ask(path: str, usage: int, **options: Any) -> Any:
    return {"url": path, "json": {**QUESTION, "metadata": {"usage": str(usage)}, **options}}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_call_is_settled_at_the_usage_in_the_response(
    client: httpx.Client, limiter: Limiter, path: str
) -> None:
    response = client.post(**ask(path, 123))
    assert response.status_code == 200
    assert used(limiter) == [1, 123, 0]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_stream_is_settled_at_its_end(
    client: httpx.Client, limiter: Limiter, path: str, options: dict[str, Any]
) -> None:
    with client.stream("POST", **ask(path, 60, stream=True, **options)) as response:
        assert used(limiter)[2] == 1
        response.read()
    requests, tokens, places = used(limiter)
    assert (requests, places) == (1, 0)
    # Without usage in the stream, the prompt keeps its estimate and the output is counted.
    assert tokens == 60 or (path == CHAT and not options and tokens == 60 - PROMPT + estimated_prompt())


def estimated_prompt() -> int:
    return Budget(Limiter()).estimate(QUESTION).input_tokens


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_abandoned_stream_is_settled_at_its_progress(
    client: httpx.Client, limiter: Limiter, path: str
) -> None:
    with client.stream("POST", **ask(path, 390, stream=True)) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > 40:
                break
    requests, tokens, places = used(limiter)
    assert (requests, places) == (1, 0)
    assert 8 <= tokens < 380


def test_refusal_of_the_provider_costs_one_request(limiter: Limiter) -> None:
    with (
        serving(Limits(tokens=10)) as (_, url),
        httpx.Client(transport=BudgetTransport(Budget(limiter)), base_url=url) as client,
    ):
        assert client.post(**ask(CHAT, 1)).status_code == 429
    # The provider reported the 10 tokens that are left.
    assert used(limiter) == [1, 20_000 - 10 - 400 - estimated_prompt(), 0]


def test_call_that_was_not_sent_costs_nothing(limiter: Limiter) -> None:
    client = httpx.Client(transport=BudgetTransport(Budget(limiter)), base_url="http://127.0.0.1:9")
    with client, pytest.raises(httpx.ConnectError):
        client.post(**ask(CHAT, 1))
    assert used(limiter) == [0, 0, 0]


def test_call_with_an_unknown_outcome_keeps_its_estimate(
    limiter: Limiter, served: tuple[Provider, str]
) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("no answer")

    transport = BudgetTransport(Budget(limiter), httpx.MockTransport(fail))
    with httpx.Client(transport=transport, base_url=served[1]) as client, pytest.raises(httpx.ReadTimeout):
        client.post(**ask(CHAT, 1))
    assert used(limiter) == [1, 400 + estimated_prompt(), 0]


def test_call_above_the_budget_is_answered_as_by_the_provider(
    limiter: Limiter, served: tuple[Provider, str]
) -> None:
    for _ in range(60):
        limiter.hold("m", {"tokens": 0}).settle({"tokens": 0})
    transport = BudgetTransport(Budget(limiter, max_wait=1))
    with httpx.Client(transport=transport, base_url=served[1]) as client:
        refused = client.post(**ask(CHAT, 1))
        never = client.post(**ask(CHAT, 1, max_tokens=30_000))
    assert refused.status_code == 429
    assert 58 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-should-retry"] == "false"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert never.status_code == 400
    assert "retry-after" not in never.headers


def test_other_requests_pass_unchanged(client: httpx.Client, limiter: Limiter) -> None:
    assert client.get("/figures").status_code == 200
    assert client.post("/figures", json={"other": 1}).status_code == 200
    assert client.post("/figures", content=iter([b'{"model": "m"}'])).status_code == 200
    assert used(limiter) == [0, 0, 0]


async def test_tasks_have_the_same_transport(served: tuple[Provider, str]) -> None:
    limiter = AsyncLimiter(*rules())
    transport = AsyncBudgetTransport(AsyncBudget(limiter))
    async with httpx.AsyncClient(transport=transport, base_url=served[1]) as client:
        assert (await client.post(**ask(CHAT, 123))).status_code == 200
        async with client.stream("POST", **ask(MESSAGES, 60, stream=True)) as response:
            await response.aread()
        assert (await client.get("/figures")).status_code == 200
        assert (await client.post(**ask(CHAT, 1, max_tokens=30_000))).status_code == 400
    found = await limiter.check("m", 0)
    assert [result.limit - result.remaining for result in found.results] == [2, 183, 0]


def test_budget_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^budget is a Budget, not "):
        BudgetTransport(AsyncBudget(AsyncLimiter()))  # type: ignore[arg-type]
