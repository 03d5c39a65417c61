"""Usage of model calls: tokens by kind, read from the objects of many clients, and their price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headgate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a call. All input fields are disjoint.

    Attributes:
        input_tokens: Input tokens that were neither read from nor written to the provider's cache.
        output_tokens: Output tokens.
        cached_tokens: Input tokens read from the cache.
        written_tokens: Input tokens written to the cache.
        counts_cached: Whether `cached_tokens` count against token limits. OpenAI counts them, Anthropic does not.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    counts_cached: bool = True

    @property
    def counted_input(self) -> int:
        """The input tokens that count against the provider's limits."""
        return self.input_tokens + self.written_tokens + (self.cached_tokens if self.counts_cached else 0)

    @classmethod
    def of(cls, found: Any) -> Usage:
        """Return the usage in an object or mapping of OpenAI, Anthropic, pydantic-ai, LangChain or LiteLLM.

        Raises:
            ConfigError: It has no number of tokens.
        """
        if isinstance(found, cls):
            return found
        if (prompt := _number(found, "prompt_tokens")) is not None:
            return cls._with_cache_included(
                prompt, found, "completion_tokens", "prompt_tokens_details", "cached_tokens"
            )
        given = _number(found, "input_tokens")
        if given is None:
            raise ConfigError(
                f"no usage in {found!r:.80}: pass Usage(input_tokens=…, output_tokens=…) or the usage of a response"
            )
        if _has(found, "cache_read_input_tokens") or _has(found, "cache_creation_input_tokens"):  # Anthropic
            return cls(
                given,
                _number(found, "output_tokens") or 0,
                _number(found, "cache_read_input_tokens") or 0,
                _number(found, "cache_creation_input_tokens") or 0,
                counts_cached=False,
            )
        for details, cached in (
            ("input_tokens_details", "cached_tokens"),
            ("input_token_details", "cache_read"),
        ):
            if _get(found, details) is not None:  # OpenAI Responses; LangChain
                return cls._with_cache_included(given, found, "output_tokens", details, cached)
        cached_tokens = min(given, _number(found, "cache_read_tokens") or 0)  # pydantic-ai
        written = min(given - cached_tokens, _number(found, "cache_write_tokens") or 0)
        return cls(
            given - cached_tokens - written, _number(found, "output_tokens") or 0, cached_tokens, written
        )

    @classmethod
    def _with_cache_included(cls, given: int, found: Any, output: str, details: str, cached: str) -> Usage:
        """Return the usage of a provider whose number of input tokens includes those read from the cache."""
        read = min(given, _number(_get(found, details), cached) or 0)
        return cls(given - read, _number(found, output) or 0, read)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a model, in dollars per million tokens, which is microdollars per token.

    Attributes:
        input: The price of input tokens.
        output: The price of output tokens.
        cached: The price of input tokens read from the cache; by default that of all input.
        written: The price of input tokens written to the cache; by default that of all input.
    """

    input: float
    output: float
    cached: float | None = None
    written: float | None = None

    def microdollars(self, usage: Usage) -> int:
        """Return the price of a usage, rounded up."""
        cached = self.input if self.cached is None else self.cached
        written = self.input if self.written is None else self.written
        cost = (
            usage.input_tokens * self.input
            + usage.output_tokens * self.output
            + usage.cached_tokens * cached
            + usage.written_tokens * written
        )
        return math.ceil(round(cost, 6))  # without the rounding errors of doubles


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


def _has(found: Any, name: str) -> bool:
    return name in found if isinstance(found, Mapping) else hasattr(found, name)


def _number(found: Any, name: str) -> int | None:
    value = _get(found, name)
    return value if type(value) is int and value >= 0 else None
