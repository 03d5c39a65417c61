"""Requests and responses of the OpenAI and Anthropic APIs, without I/O: model, estimate, and usage in JSON or a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.http.headers import retry_seconds
from headgate.llm.budget import CallBase
from headgate.llm.usage import Usage

LONGEST_BODY = 32_000_000
"""The longest response in bytes whose usage is read."""


def request_of(method: str, body: bytes) -> dict[str, Any] | None:
    """Return the body of a request that calls a model; `None` for all other requests."""
    if method != "POST" or b'"model"' not in body:
        return None
    try:
        request = json.loads(body)
    except ValueError:
        return None
    return request if isinstance(request, dict) and isinstance(request.get("model"), str) else None


class ResponseReader:
    """Reads the usage of a call from its response, while the client receives it.

    Args:
        call: The call.
        status: The status of the response.
        content_type: Its `Content-Type`.
    """

    def __init__(self, call: CallBase, status: int, content_type: str) -> None:
        self._call = call
        self._is_stream = content_type.startswith("text/event-stream")
        self._is_refused = status >= 400
        self._buffer = bytearray()
        self._output = 0
        self._seen: dict[str, Any] = {}
        if self._is_refused:
            call.settle(Usage())
        elif self._is_stream:
            call.progress(0)

    def feed(self, chunk: bytes) -> None:
        """Read a part of the decoded body."""
        if self._is_refused or len(self._buffer) > LONGEST_BODY:
            return
        self._buffer += chunk
        if self._is_stream:
            *lines, rest = self._buffer.split(b"\n")
            self._buffer = rest
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(_json(bytes(line[5:])))

    def end(self) -> None:
        """Read a complete body."""
        if not self._is_refused and not self._is_stream:
            self._usage(_json(bytes(self._buffer)))

    def _event(self, event: dict[str, Any]) -> None:
        choices = event.get("choices")
        deltas = [choice.get("delta") for choice in choices or () if isinstance(choice, Mapping)]
        if text := _text([*deltas, event.get("delta")]):
            self._output += max(1, self._call.tokens(text))
            self._call.progress(self._output)
        for place in (event, event.get("message"), event.get("response")):
            if isinstance(place, Mapping):
                self._usage(place)

    def _usage(self, body: Mapping[str, Any]) -> None:
        found = body.get("usage")
        if not isinstance(found, Mapping):
            return
        # Anthropic sends the input tokens with the first event, and a growing number of output tokens with later ones.
        self._seen.update((name, value) for name, value in found.items() if value is not None)
        try:
            usage = Usage.of(self._seen)
        except ConfigError:
            return
        if body.get("type") == "message" and self._is_stream:  # Anthropic's first event
            most = self._call.estimated.output_tokens
            self._call.estimated = replace(usage, output_tokens=most)  # the output is unknown so far
            return
        self._call.settle(usage)


def refusal(error: RateLimited | CostTooHigh) -> tuple[int, dict[str, str], bytes]:
    """Return status, header fields and body of the response to a call that the budget refuses.

    The official clients turn it into their own exception, and do not repeat the call.
    """
    status, headers = 400, {"content-type": "application/json", "x-should-retry": "false"}
    kind = "invalid_request_error"
    if isinstance(error, RateLimited):
        status, kind = 429, "rate_limit_error"
        if (seconds := retry_seconds(error.decision)) is not None:
            headers["retry-after"] = str(seconds)
    body = {
        "type": "error",
        "error": {"type": kind, "code": "headgate", "message": f"Headgate budget: {error}"},
    }
    return status, headers, json.dumps(body).encode()


def _text(found: Any) -> str:
    """Return all texts inside the `delta` of an event."""
    if isinstance(found, Mapping):
        found = [value for name, value in found.items() if name not in ("type", "role", "id", "signature")]
    if isinstance(found, list):
        return "".join(map(_text, found))
    return found if isinstance(found, str) else ""


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
