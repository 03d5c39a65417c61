"""Usage, prices and estimates of model calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate import ConfigError, Limiter, sliding_window
from headgate.llm import Budget, Price, Usage


@pytest.mark.parametrize(
    ("found", "usage"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}, Usage(10, 5)),
        (
            {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
            Usage(6, 5, 4),
        ),
        (
            SimpleNamespace(
                input_tokens=10, output_tokens=5, input_tokens_details=SimpleNamespace(cached_tokens=4)
            ),
            Usage(6, 5, 4),
        ),
        ({"input_tokens": 10, "output_tokens": 5, "input_token_details": {"cache_read": 4}}, Usage(6, 5, 4)),
        (
            {
                "input_tokens": 10,
                "output_tokens": 5,
                "cache_read_input_tokens": 4,
                "cache_creation_input_tokens": None,
            },
            Usage(10, 5, 4, 0, counts_cached=False),
        ),
        (
            SimpleNamespace(input_tokens=10, output_tokens=5, cache_read_tokens=3, cache_write_tokens=2),
            Usage(5, 5, 3, 2),
        ),
        ({"prompt_tokens": 10, "total_tokens": 10}, Usage(10, 0)),
        (Usage(1, 2), Usage(1, 2)),
    ],
)
def test_usage_is_read_from_the_objects_of_many_clients(found: Any, usage: Usage) -> None:
    assert Usage.of(found) == usage


def test_usage_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^no usage in None: pass Usage\(input_tokens="):
        Usage.of(None)


def test_cached_tokens_count_where_the_provider_counts_them() -> None:
    assert Usage(10, 5, 4).counted_input == 14
    assert Usage(10, 5, 4, 3, counts_cached=False).counted_input == 13


def test_price_is_rounded_up() -> None:
    assert Price(2.5, 10).microdollars(Usage(3, 1)) == 18
    assert Price(2.5, 10, cached=0.25, written=3.125).microdollars(Usage(0, 0, 4, 8)) == 26
    assert (
        Price(0.1, 0.2).microdollars(Usage(10, 10)) == 3
    )  # not 4, as the rounding error of doubles would make it


def budget(**options: Any) -> Budget:
    return Budget(Limiter(sliding_window("100000/minute", unit="tokens")), **options)


@pytest.mark.parametrize(
    ("request_body", "usage"),
    [
        ({"messages": [{"role": "user", "content": "x" * 30}], "max_tokens": 50}, Usage(14, 50)),
        ({"messages": [{"role": "user", "content": "x" * 30}], "max_tokens": 50, "n": 3}, Usage(14, 150)),
        ({"input": "x" * 30, "max_output_tokens": 7}, Usage(10, 7)),
        ({"prompt": "x" * 31}, Usage(11, 1024)),
        (
            {"system": "abc", "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]},
            Usage(6, 1024),
        ),
        ({"input": ["data:image/png;base64," + "x" * 9000], "max_output_tokens": 1}, Usage(1500, 1)),
        (
            {"messages": [{"content": [{"source": {"type": "base64", "data": "x" * 9000}}]}]},
            Usage(1500, 1024),
        ),
        ({}, Usage(0, 1024)),
    ],
)
def test_request_is_estimated(request_body: dict[str, Any], usage: Usage) -> None:
    assert budget().estimate(request_body) == usage


def test_tokenizer_and_default_output_can_be_chosen() -> None:
    chosen = budget(tokenizer=lambda text: len(text.split()), default_output=10)
    assert chosen.estimate({"input": "two words"}) == Usage(2, 10)
