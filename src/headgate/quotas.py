"""Quotas that are not in the rules: given with a call, or looked up by a function of its key and tier.

What is looked up is kept for a while: it usually lives in a database.
"""

from __future__ import annotations

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
"""From a call's key and tier to its quotas, a `QuotaValue`; `None` for those of the rules."""

MOST_KEPT = 10_000
"""Callers whose quotas a limiter keeps at once."""


def quotas_of(rules: tuple[Rule, ...], value: QuotaValue | None) -> Quotas | None:
    """Return the quota of each rule; `None` where there is no other than that of the tier.

    Raises:
        ConfigError: The value does not fit the rules.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        known = {rule.name for rule in rules}
        if unknown := value.keys() - known:
            raise ConfigError(
                f"no rule is called {min(unknown)!r}; there is {', '.join(map(repr, sorted(known)))}"
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
    """Return what the quotas of a call are kept under: its whole key, also where the rules count all callers together."""
    if isinstance(key, Mapping):
        return tuple((scope, check_plain(part)) for scope, part in key.items()), tier
    return key if key is None else check_plain(key), tier


def check_kept_for(name: str, seconds: float) -> None:
    """Refuse what is not a time in seconds for which quotas can be kept."""
    if not is_number(seconds) or not 0 <= seconds < float("inf"):
        raise ConfigError(f"{name} is seconds, at least 0, not {seconds!r}")


class QuotaCache:
    """What a function has said of callers' quotas, for a while.

    Args:
        rules: The limiter's rules.
        function: Says what a caller's quotas are.
        seconds: For how long that is kept; 0 asks it every time.
        clock: Where time comes from.
        option: What the function is called where it is given, for messages.
    """

    def __init__(
        self,
        rules: tuple[Rule, ...],
        function: Callable[..., Any],
        seconds: float,
        clock: Clock,
        option: str = "quotas",
    ) -> None:
        if not callable(function):
            raise ConfigError(f"{option}= is a function of key and tier, not {function!r}")
        check_kept_for(f"{option}_for=", seconds)
        self.function = function
        self.seconds = seconds
        self._rules = rules
        self._lasting_us = round(seconds * MICROSECONDS)
        self._clock = clock
        self._lock = watch(threading.Lock())
        self._kept: dict[object, tuple[int, Quotas | None]] = {}

    def get(self, caller: object) -> tuple[bool, Quotas | None]:
        """Return whether a caller's quotas are known, and what they are."""
        until, quotas = self._kept.get(caller, (0, None))
        return until > self._clock.now_us(), quotas

    def keep(self, caller: object, value: QuotaValue | None) -> Quotas | None:
        """Return a caller's quotas as the function has said them, and keep them.

        Raises:
            ConfigError: They do not fit the rules.
        """
        quotas = quotas_of(self._rules, value)
        if self._lasting_us:
            with self._lock:
                self._kept.pop(caller, None)  # so that the oldest is always the first
                self._kept[caller] = self._clock.now_us() + self._lasting_us, quotas
                if len(self._kept) > MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
        return quotas
