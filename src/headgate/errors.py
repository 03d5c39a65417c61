"""Exceptions.

    HeadgateError
    ├── ConfigError         invalid quota, rule, key, cost or setting
    ├── CostTooHigh         a cost above the capacity of a rule, which is never admitted
    ├── RateLimited         a refusal, where the caller requested an exception; contains the decision
    └── StoreError          the store failed
        ├── StoreUnavailable    down or hanging
        │   └── StoreTimeout        no reply within the deadline of the call
        ├── StoreOverloaded     this process did not send the call in time
        ├── StoreConflict       the stored data are invalid or belong to another program
        └── StoreMisconfigured  the store refuses: credentials, rights, schema; also a ConfigError

A refusal is a value, not an exception, unless the caller requests one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.decision import Decision


class HeadgateError(Exception):
    """Base of all exceptions of Headgate."""


class ConfigError(HeadgateError, ValueError):
    """An invalid argument or setting; the message explains the correction."""


class CostTooHigh(HeadgateError, ValueError):
    """The cost exceeds the capacity of a rule, so it is never admitted.

    Attributes:
        cost: The requested cost.
        capacity: The highest cost that the rule admits.
        rule: Name of the rule.
        unit: Unit of the rule.
    """

    def __init__(self, cost: int, capacity: int, rule: str, unit: str = "requests") -> None:
        counted = "" if unit == "requests" else f" {unit}"
        super().__init__(
            f"a cost of {cost}{counted} can never be admitted: rule {rule!r} holds {capacity} at most; "
            f"split the work or raise the limit"
        )
        self.cost = cost
        self.capacity = capacity
        self.rule = rule
        self.unit = unit

    def __reduce__(self) -> tuple[type[CostTooHigh], tuple[int, int, str, str]]:
        return CostTooHigh, (self.cost, self.capacity, self.rule, self.unit)


class RateLimited(HeadgateError):
    """A refusal as an exception.

    Its traceback has a note that explains how to turn it into a 429 response in each web framework.

    Attributes:
        decision: The refusal, with `retry_after` and the rule that refused.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(str(decision))
        self.decision = decision
        self.add_note(
            "To answer this with status 429, use install(app) in FastAPI, Flask and aiohttp, "
            "'headgate.http.django.rate_limits' in MIDDLEWARE of Django, or "
            "exception_handlers={RateLimited: answer_refusal} in Starlette and Litestar."
        )

    def __reduce__(self) -> tuple[type[RateLimited], tuple[Decision]]:
        return RateLimited, (self.decision,)


class StoreError(HeadgateError):
    """The store failed; it is unknown whether it charged anything."""


class StoreUnavailable(StoreError):
    """The store is down or hanging."""


class StoreTimeout(StoreUnavailable):
    """The store did not answer within the deadline of the call.

    If that deadline is shorter than the store's, this is not evidence that the store is down.
    """


class StoreOverloaded(StoreError):
    """The call was sent late or not at all, because this process is too busy.

    If it was not sent, nothing was charged.
    """


class StoreConflict(StoreError):
    """The stored data are invalid or belong to another program."""


class StoreMisconfigured(ConfigError, StoreError):
    """The store refuses: wrong credentials, missing rights or schema, a read-only server.

    Waiting does not help; the configuration must be changed.
    """


def listed(names: Iterable[object]) -> str:
    """Return names sorted and quoted, for messages."""
    return ", ".join(sorted(map(repr, names)))
