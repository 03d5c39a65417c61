"""Log lines for decisions."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import Literal

from headgate import Limiter, Rule, token_bucket
from headgate._checks import check_count, check_kind
from headgate._fork import watch
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, StoreError
from headgate.hooks import Call, Hook
from headgate.keys import Key
from headgate.observe.redaction import redact

DEFAULT_RATE = token_bucket("10/s", burst=50)


class LogHook(Hook):
    """Log one line per refusal and per store failure, and, at DEBUG, one per admission.

        WARNING refused limiter=login key=5f0c9a2e cost=1 tier=- rule=per-minute remaining=0 retry_after=12.5 …

    Every value in the line is also in the record's `extra`, under the same name with the prefix `headgate_`. Lines about
    refusals are rate-limited: lines beyond the rate are dropped, and the next line contains the number of dropped lines.

    Args:
        logger: The logger; by default `headgate.decisions`.
        level: The level of refusals.
        rate: The rate of lines about refusals; `None` logs all.
        keys: How keys are shown, which may be addresses or credentials: as a digest that is stable within this process, in
            plain text, or not at all.
        clock: The clock for the rate.
    """

    def __init__(
        self,
        logger: logging.Logger | None = None,
        *,
        level: int = logging.WARNING,
        rate: str | Rule | None = DEFAULT_RATE,
        keys: Literal["digest", "plain", "none"] = "digest",
        clock: Clock | None = None,
    ) -> None:
        if keys not in ("digest", "plain", "none"):
            raise ConfigError(f"keys is 'digest', 'plain' or 'none', not {keys!r}")
        check_count("level, as logging.WARNING,", level, 0, 1000)
        check_kind("logger", logger, logging.Logger | logging.LoggerAdapter | None, "what getLogger returns")
        self.logger = logger or logging.getLogger("headgate.decisions")
        self.swallowed = 0
        """The number of lines dropped since the last written line."""
        self._level = level
        self._keys: Literal["digest", "plain", "none"] = keys
        self._salt = secrets.token_bytes(16)
        self._lines = None if rate is None else Limiter(rate, clock=clock)
        self._lock = watch(threading.Lock())

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        if decision.allowed:
            if self.logger.isEnabledFor(logging.DEBUG):
                self._write(logging.DEBUG, "admitted", call, _figures(decision))
        elif call.operation != "check":
            self._write_limited(self._level, "refused", call, _figures(decision))

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        if isinstance(error, CostTooHigh):
            self._write_limited(
                self._level, "refused", call, {"rule": error.rule, "capacity": error.capacity}
            )
        elif isinstance(error, StoreError):
            about = {"operation": call.operation, "error": f"{type(error).__name__}: {redact(str(error))}"}
            self._write_limited(logging.ERROR, "failed", call, about)

    def _write_limited(self, level: int, event: str, call: Call, figures: Mapping[str, object]) -> None:
        if not self.logger.isEnabledFor(level):
            return
        with self._lock:
            if self._lines is not None and not self._lines.hit("lines"):
                self.swallowed += 1
                return
            swallowed, self.swallowed = self.swallowed, 0
        self._write(level, event, call, {**figures, "swallowed": swallowed})

    def _write(self, level: int, event: str, call: Call, figures: Mapping[str, object]) -> None:
        facts = {
            "limiter": call.limiter or "-",
            "key": shown_key(call.key, self._keys, self._salt),
            "cost": call.cost,
            "tier": call.tier or "-",
            **figures,
        }
        text = " ".join(f"{name}={_word(fact)}" for name, fact in facts.items())
        extra = {"headgate_event": event, **{f"headgate_{name}": fact for name, fact in facts.items()}}
        self.logger.log(level, "%s %s", event, text, extra=extra)


def shown_key(key: Key | None, how: Literal["digest", "plain", "none"], salt: bytes) -> str:
    """Return the text to show for a key, which may be an address or a credential; `-` if nothing is shown."""
    if key is None or how == "none":
        return "-"
    if isinstance(key, Mapping):
        return ",".join(f"{scope}:{shown_key(part, how, salt)}" for scope, part in key.items())
    if how == "plain":
        return redact(key if isinstance(key, str) else repr(key))
    raw = b"t" + key.encode("utf-8", "surrogatepass") if isinstance(key, str) else b"b" + key
    return blake2b(raw, digest_size=4, key=salt).hexdigest()


def _word(fact: object) -> str:
    """Return a value as one word of a log line: its repr if it has spaces, quotes, `=` or control characters."""
    text = str(fact)
    return text if text.isprintable() and not set(text) & set(" \"'=") else repr(text)


def _figures(decision: Decision) -> dict[str, object]:
    figures: dict[str, object] = {"rule": decision.rule or "-", "remaining": decision.remaining}
    if not decision.allowed:
        figures["retry_after"] = decision.retry_after
    if decision.degraded:
        figures["degraded"] = True
    return figures
