"""The pages about other limiters: each option of the other library is on its page, with or without a counterpart.

The libraries are in the extra `bench`; a page whose library is not installed is not checked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "coming-from"
CALLABLES = {
    "limits": [
        "limits.strategies.MovingWindowRateLimiter.hit",
        "limits.storage.RedisStorage",
    ],
    "slowapi": ["slowapi.Limiter", "slowapi.Limiter.limit", "slowapi.Limiter.shared_limit"],
    "flask-limiter": [
        "flask_limiter.Limiter",
        "flask_limiter.Limiter.limit",
        "flask_limiter.Limiter.shared_limit",
    ],
    "django-ratelimit": [
        "django_ratelimit.decorators.ratelimit",
        "django_ratelimit.core.is_ratelimited",
    ],
    "throttled-py": ["throttled.Throttled", "throttled.store.RedisStore"],
    "pyrate-limiter": [
        "pyrate_limiter.Limiter",
        "pyrate_limiter.Limiter.try_acquire",
        "pyrate_limiter.Rate",
    ],
    "aiolimiter": ["aiolimiter.AsyncLimiter"],
    "fastapi-limiter": ["fastapi_limiter.depends.RateLimiter"],
}
OBVIOUS = {
    *("self", "app", "request", "item", "identifiers", "limit_value", "limit", "interval", "argument"),
    *("uri", "options", "_"),
}
"""Parameters that the examples pass by position, and `**options`; pages need not mention them."""
SHARED = re.compile(r"^(default|application)_limits_(?=per_method|exempt_when|deduct_when|cost)")
"""flask-limiter repeats options of a limit for its default limits."""


def parameters(path: str) -> set[str]:
    """Return the names of the parameters of a function or class, given by its full name."""
    library, *names = path.split(".")
    pytest.importorskip(library)
    found: object = None
    for end in range(len(names), 0, -1):
        try:
            found = import_module(".".join([library, *names[: end - 1]]))
        except ModuleNotFoundError:
            continue
        for name in names[end - 1 :]:
            found = getattr(found, name)
        break
    assert isinstance(found, Callable)
    return set(inspect.signature(found).parameters)


@pytest.mark.parametrize("page", CALLABLES)
def test_every_option_is_on_the_page(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text("utf-8")
    options = {SHARED.sub("", name) for path in CALLABLES[page] for name in parameters(path)} - OBVIOUS
    missing = {option for option in options if not re.search(rf"(?<![\w]){option}(?!\w)", text)}
    assert missing == set()
