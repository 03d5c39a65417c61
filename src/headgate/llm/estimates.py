"""Estimate the usage of a call from its request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headgate.llm.usage import Usage

Tokenizer = Callable[[str], int]
"""Returns the number of tokens of a text."""

ATTACHMENT_TOKENS = 1500
"""The estimate for an image or another attachment, whose text is not counted."""

MESSAGE_TOKENS = 4
"""The estimate for the role and the separators of a message."""

_PROMPTS = ("messages", "input", "prompt", "system", "instructions", "tools", "response_format")
_MOST_OUTPUT = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def default_tokenizer(text: str) -> int:
    """Estimate the tokens of a text: one for three bytes of UTF-8, which is high for English text and source code."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // 3)


def estimate(request: Mapping[str, Any], tokenizer: Tokenizer, default_output: int) -> Usage:
    """Estimate the usage of a request to an OpenAI or Anthropic API.

    Args:
        request: The JSON body of the request, or the arguments of the client's method.
        tokenizer: Counts the tokens of the prompt.
        default_output: The output tokens of a request without a maximum.
    """
    counted = sum(_tokens(request.get(name), tokenizer) for name in _PROMPTS)
    limits = (request.get(name) for name in _MOST_OUTPUT)
    most = next((limit for limit in limits if type(limit) is int and limit >= 0), default_output)
    answers = request.get("n")
    return Usage(counted, most * (answers if type(answers) is int and answers > 0 else 1))


def _tokens(prompt: Any, tokenizer: Tokenizer) -> int:
    return sum(tokenizer(part) if isinstance(part, str) else part for part in _parts(prompt))


def _parts(prompt: Any) -> Iterator[str | int]:
    """Yield texts, and the tokens of everything that is not text."""
    if isinstance(prompt, str):
        yield ATTACHMENT_TOKENS if prompt.startswith("data:") else prompt
    elif isinstance(prompt, Mapping):
        if prompt.get("type") == "base64" or "file_data" in prompt:
            yield ATTACHMENT_TOKENS
            return
        if "role" in prompt:
            yield MESSAGE_TOKENS
        for name, value in prompt.items():
            if name not in ("role", "type"):
                yield from _parts(value)
    elif isinstance(prompt, list | tuple):
        for value in prompt:
            yield from _parts(value)
