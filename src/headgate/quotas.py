"""Quotas from outside the rules: an argument of a call, or the result of a function of key and tier.

Results of the function are cached, because they usually come from a database.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from headgate._checks import is_number
from headgate._fork import watch
from headgate.clock import MICROSECONDS, Clock
from headgate.errors import ConfigError
from headgate.keys import Key, check_plain
from headgate.quota import Quotas
from headgate.rules import QuotaLike, Rule

__all__ = ["QuotaValue", "quotas_of"]

QuotaValue = QuotaLike | Mapping[str, QuotaLike | None]
"""The quota of a limiter's one rule, or quotas by the names of its rules."""

QuotaFunction = Callable[[Key | None, str | None], Any]
"""A function from key and tier to a `QuotaValue`, or `None` for the quotas of the rules."""

MOST_KEPT = 10_000
"""Size of the cache of a limiter, in callers."""


def quotas_of(rules: tuple[Rule, ...], value: QuotaValue | None) -> Quotas | None:
    """Return the quota of each rule; `None` keeps the quota of the tier.

    Raises:
        ConfigError: The value does not fit the rules.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        known = {rule.name for rule in rules}
        if unknown := value.keys() - known:
            raise ConfigError(
                f"no rule is called {min(unknown)!r}; the rules are {', '.join(map(repr, sorted(known)))}"
            )
        given = [value.get(rule.name) for rule in rules]
    elif len(rules) == 1:
        given = [value]
    else:
        raise ConfigError(
            f"one quota for {len(rules)} rules; write a mapping by their names, as {{{rules[0].name!r}: {value!r}}}"
            if rules
            else "a quota for a limiter without rules"
        )
    return tuple(
        None if own is None else rule.quota_from(own) for rule, own in zip(rules, given, strict=True)
    )


def caller_of(key: Key | None, tier: str | None) -> object:
    """Return the cache key of a call: its whole key, even if the rules are shared by all callers, and its tier."""
    if isinstance(key, Mapping):
        return tuple((scope, check_plain(part)) for scope, part in key.items()), tier
    return key if key is None else check_plain(key), tier


def check_kept_for(name: str, seconds: float) -> None:
    """Refuse an invalid duration for the cache."""
    if not is_number(seconds) or not 0 <= seconds < float("inf"):
        raise ConfigError(f"{name} is seconds, at least 0, not {seconds!r}")


def check_quota_function(function: Callable[..., Any]) -> None:
    """Refuse a function for `quotas=` that does not take a key and a tier."""
    if not callable(function):
        raise ConfigError(f"quotas= is a function of key and tier, not {function!r}")
    try:
        inspect.signature(function).bind("key", "tier")
    except TypeError as error:
        raise ConfigError(
            f"quotas= is called with a key and a tier, like `def quotas(key, tier)`; {function!r} does not fit: {error}"
        ) from None
    except ValueError:
        pass  # a built-in function without a signature


class QuotaCache:
    """Cache of the results of a quota function.

    Args:
        rules: The limiter's rules.
        function: Returns the quotas of a caller.
        seconds: How long results are cached; 0 calls the function every time.
        clock: The clock.
        option: The name of the argument, for messages.
    """

    def __init__(
        self,
        rules: tuple[Rule, ...],
        function: Callable[..., Any],
        seconds: float,
        clock: Clock,
        option: str = "quotas",
    ) -> None:
        check_kept_for(f"{option}_for=", seconds)
        self.function = function
        self.seconds = seconds
        self._rules = rules
        self._lasting_us = round(seconds * MICROSECONDS)
        self._clock = clock
        self._lock = watch(threading.Lock())
        self._kept: dict[object, tuple[int, Quotas | None]] = {}

    def get(self, caller: object) -> tuple[bool, Quotas | None]:
        """Return whether a caller's quotas are cached, and the quotas."""
        until, quotas = self._kept.get(caller, (0, None))
        return until > self._clock.now_us(), quotas

    def keep(self, caller: object, value: QuotaValue | None) -> Quotas | None:
        """Cache a result of the function, and return it as quotas per rule.

        Raises:
            ConfigError: The result does not fit the rules.
        """
        quotas = quotas_of(self._rules, value)
        if self._lasting_us:
            with self._lock:
                self._kept.pop(caller, None)  # so that the oldest entry is always first
                self._kept[caller] = self._clock.now_us() + self._lasting_us, quotas
                if len(self._kept) > MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
        return quotas
