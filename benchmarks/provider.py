"""A local server that simulates a model provider: it enforces limits like those that providers document, with their headers.

Requests and tokens are token buckets that refill continuously, as OpenAI and Anthropic document. A call is charged with its
maximum number of tokens when it is admitted, and with its actual usage when it ends. Calls in progress and requests per day
are counted. The server shares no code with Headgate, so that it does not share its mistakes.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


class Bucket:
    """A number of units that refills continuously. It falls below 0 if a call uses more units than it was charged."""

    def __init__(self, limit: int, period: float, now: float) -> None:
        self.limit, self.period = limit, period
        self._level, self._at = float(limit), now
        self.used = 0

    def left(self, now: float) -> float:
        """Return the remaining units."""
        refill = (now - self._at) * self.limit / self.period
        self._level, self._at = min(float(self.limit), self._level + refill), now
        return self._level

    def take(self, units: int) -> None:
        """Take units, or return them if the number is negative; call `left` before."""
        self._level -= units
        self.used += units


@dataclass
class Limits:
    """The limits of the provider.

    Attributes:
        requests: Requests per period.
        tokens: Tokens per period.
        period: The period in seconds; one minute at real providers.
        per_day: Requests per day.
        in_flight: Calls in progress.
    """

    requests: int = 60
    tokens: int = 20_000
    period: float = 60.0
    per_day: int = 1_000_000
    in_flight: int = 1_000


@dataclass
class Provider:
    """An ASGI application with `/v1/chat/completions`, `/v1/responses` and `/v1/messages`.

    A request chooses its usage with `metadata: {"usage": "312", "seconds": "0.2"}`.

    Attributes:
        limits: The limits.
        now: Returns the time in seconds.
        sleep: Sleeps for the duration of a call.
        statuses: The number of responses by status.
    """

    limits: Limits
    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    statuses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.requests = Bucket(self.limits.requests, self.limits.period, self.now())
        self.tokens = Bucket(self.limits.tokens, self.limits.period, self.now())
        self.in_flight = self.today = 0
        self.refusals: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/figures":
            await self._send(send, 200, [], json.dumps(self.figures()).encode())
            return
        await self._answer(scope["path"], json.loads(body), receive, send)

    def figures(self) -> dict[str, Any]:
        """Return the provider's figures."""
        return {
            "statuses": {str(status): number for status, number in self.statuses.items()},
            "refusals": dict(self.refusals),
            "requests": self.requests.used,
            "tokens": self.tokens.used,
            "requests left": self.requests.left(self.now()),
            "tokens left": self.tokens.left(self.now()),
            "in_flight": self.in_flight,
        }

    def refused_by(self, most: int) -> str | None:
        """Return the limit that refuses a call with a maximum of `most` tokens, or None."""
        now = self.now()
        if self.requests.left(now) < 1:
            return "requests"
        if self.tokens.left(now) < most:
            return "tokens"
        if self.in_flight >= self.limits.in_flight:
            return "in flight"
        return "day" if self.today >= self.limits.per_day else None

    async def _answer(self, path: str, request: dict[str, Any], receive: Any, send: Any) -> None:
        prompt = len(json.dumps(request.get("messages") or request.get("input") or "")) // 4
        output = request.get("max_tokens") or request.get("max_output_tokens") or 256
        chosen = request.get("metadata") or {}
        refused = self.refused_by(prompt + output)
        if refused:
            self.statuses[429] += 1
            self.refusals[refused] += 1
            error = {
                "type": "error",
                "error": {"type": "rate_limit_error", "message": f"too many: {refused}"},
            }
            fields = [*self._fields(path), (b"retry-after", b"1")]
            await self._send(send, 429, fields, json.dumps(error).encode())
            return
        self.requests.take(1)
        self.tokens.take(prompt + output)
        self.in_flight += 1
        self.today += 1
        self.statuses[200] += 1
        fields = self._fields(path)
        used = max(0, int(chosen.get("usage", prompt + output)) - prompt)
        done = 0
        try:
            seconds = float(chosen.get("seconds", 0))
            if request.get("stream"):
                await send({"type": "http.response.start", "status": 200, "headers": [*fields, EVENTS]})
                gone = asyncio.ensure_future(_disconnected(receive))
                async for tokens, event in _events(path, request, prompt, used):
                    done = tokens
                    await self.sleep(seconds / max(1, used))
                    await asyncio.sleep(0)
                    if gone.done():
                        return
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                gone.cancel()
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            else:
                if seconds:
                    await self.sleep(seconds)
                done = used
                await self._send(send, 200, fields, json.dumps(_reply(path, request, prompt, used)).encode())
        finally:
            self.in_flight -= 1
            self.tokens.left(self.now())
            self.tokens.take(done - output)

    def _fields(self, path: str) -> list[tuple[bytes, bytes]]:
        now = self.now()
        fields: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            left = bucket.left(now)
            full = (bucket.limit - left) * bucket.period / bucket.limit
            if path == "/v1/messages":
                prefix, reset = (
                    f"anthropic-ratelimit-{name}",
                    datetime.fromtimestamp(now + full, UTC).isoformat(),
                )
                names = [f"{prefix}-{figure}" for figure in ("limit", "remaining", "reset")]
            else:
                names = [f"x-ratelimit-{figure}-{name}" for figure in ("limit", "remaining", "reset")]
                reset = f"{round(full * 1000)}ms"
            values = (str(bucket.limit), str(max(0, int(left))), reset)
            fields.update(zip(names, values, strict=True))
        return [(name.encode(), value.encode()) for name, value in fields.items()]

    async def _send(self, send: Any, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers = [*fields, (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _reply(path: str, request: dict[str, Any], prompt: int, used: int) -> dict[str, Any]:
    model, text = request["model"], "word " * min(used, 20)
    if path == "/v1/messages":
        usage = {"input_tokens": prompt, "output_tokens": used, "cache_read_input_tokens": 0}
        content = [{"type": "text", "text": text}]
        return {"id": "m", "type": "message", "role": "assistant", "model": model, "content": content} | {
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": usage,
        }
    usage = {"prompt_tokens": prompt, "completion_tokens": used, "total_tokens": prompt + used}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice]} | {
        "usage": usage
    }


async def _events(
    path: str, request: dict[str, Any], prompt: int, used: int
) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the number of output tokens so far, and an event."""

    def event(content: dict[str, Any]) -> bytes:
        name = f"event: {content['type']}\n" if "type" in content else ""
        return f"{name}data: {json.dumps(content)}\n\n".encode()

    if path == "/v1/messages":
        message = _reply(path, request, prompt, 1) | {"content": [], "stop_reason": None}
        yield 0, event({"type": "message_start", "message": message})
        yield (
            0,
            event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        )
        for done in range(1, used + 1):
            delta = {"type": "text_delta", "text": "w"}
            yield done, event({"type": "content_block_delta", "index": 0, "delta": delta})
        yield used, event({"type": "content_block_stop", "index": 0})
        ending = {"stop_reason": "end_turn", "stop_sequence": None}
        yield used, event({"type": "message_delta", "delta": ending, "usage": {"output_tokens": used}})
        yield used, event({"type": "message_stop"})
        return
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": request["model"]}
    for done in range(1, used + 1):
        choice = {"index": 0, "delta": {"role": "assistant", "content": "w"}, "finish_reason": None}
        yield done, event({**chunk, "choices": [choice]})
    yield used, event({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if (request.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": prompt, "completion_tokens": used, "total_tokens": prompt + used}
        yield used, event({**chunk, "choices": [], "usage": usage})
