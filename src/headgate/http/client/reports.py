"""Read the limits that model providers report in response headers: OpenAI, Anthropic, and APIs that copy their headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

_OPENAI = {"requests": "requests", "tokens": "tokens"}
_ANTHROPIC = {
    "requests": "requests",
    "tokens": "tokens",
    "input-tokens": "input_tokens",
    "output-tokens": "output_tokens",
}
_SECONDS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 0.000001, "µs": 0.000001}
_PART = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(ms|us|µs|d|h|m|s)")


class ReportedLimit(NamedTuple):
    """A limit that a provider reported.

    Attributes:
        unit: `requests`, `tokens`, `input_tokens` or `output_tokens`.
        remaining: The remaining units.
        limit: The limit; `None` if it was not reported.
        reset: Seconds until all units are available again; `None` if they were not reported.
    """

    unit: str
    remaining: int
    limit: int | None
    reset: float | None


def reported_limits(headers: Mapping[str, str], now: float) -> list[ReportedLimit]:
    """Return the limits in `x-ratelimit-*-requests` and `-tokens` (OpenAI) and `anthropic-ratelimit-*` header fields.

    Args:
        headers: Header fields; names in any case.
        now: The time in seconds since the epoch, for reset times that are dates.
    """
    headers = {name.lower(): value.strip() for name, value in headers.items()}
    return list(_limits(headers, now))


def _limits(headers: Mapping[str, str], now: float) -> Iterator[ReportedLimit]:
    for prefix, names, are_last in (
        ("x-ratelimit", _OPENAI, True),
        ("anthropic-ratelimit", _ANTHROPIC, False),
    ):
        for name, unit in names.items():
            field = f"{prefix}-{{}}-{name}" if are_last else f"{prefix}-{name}-{{}}"
            remaining = _whole(headers.get(field.format("remaining")))
            if remaining is not None:
                limit, reset = _whole(headers.get(field.format("limit"))), headers.get(field.format("reset"))
                yield ReportedLimit(unit, remaining, limit, None if reset is None else _reset(reset, now))


def _reset(text: str, now: float) -> float | None:
    """Return the seconds until a reset time: a duration like `6m0s`, seconds, or an RFC 3339 time."""
    if (seconds := duration(text)) is not None:
        return seconds
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now)


def duration(text: str) -> float | None:
    """Return the seconds of a duration like `12ms`, `1s`, `6m0s` or `1h2m3.5s`, or of a number; `None` if it is neither."""
    if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,15}", text) else None
