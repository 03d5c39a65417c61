"""Everything Headgate raises.

    HeadgateError
    ├── ConfigError         what was written can never work: a bad quota, rule, key, cost or setting
    ├── CostTooHigh         a cost above the capacity: no waiting would ever admit it
    ├── RateLimited         a refusal, for those who asked to have it raised; carries the decision
    └── StoreError          the store could not do its work
        ├── StoreUnavailable    down or hanging
        │   └── StoreTimeout        it did not answer within the deadline of the call
        ├── StoreOverloaded     this process could not even send the call in time
        ├── StoreConflict       it answered, but what it holds is not ours or not what we need
        └── StoreMisconfigured  it answers, but refuses us: credentials, rights, schema; a ConfigError, too

A refusal is a value, never an exception, unless the caller asked for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.decision import Decision


class HeadgateError(Exception):
    """Base of every exception that Headgate raises on purpose."""


class ConfigError(HeadgateError, ValueError):
    """What was asked for can never work as written; the message says what to write instead."""


class CostTooHigh(HeadgateError, ValueError):
    """The cost is above what the rule could ever admit at once.

    Attributes:
        cost: What was asked for.
        capacity: The most that could ever be admitted at once.
        rule: Name of the rule that can never admit it.
        unit: What the rule counts.
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
    """A refusal, raised for callers who asked for it.

    Where it is not handled, its traceback says what a web application needs to answer it with 429.

    Attributes:
        decision: The refusal, with `retry_after` and the rule that said no.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(str(decision))
        self.decision = decision
        self.add_note(
            "A web application answers this with 429 if it has install(app) in FastAPI, Flask and aiohttp, "
            "'headgate.http.django.rate_limits' in MIDDLEWARE of Django, or "
            "exception_handlers={RateLimited: answer_refusal} in Starlette and Litestar."
        )

    def __reduce__(self) -> tuple[type[RateLimited], tuple[Decision]]:
        return RateLimited, (self.decision,)


class StoreError(HeadgateError):
    """The store could not do its work; whether it charged anything is then unknown."""


class StoreUnavailable(StoreError):
    """The store is down or hanging."""


class StoreTimeout(StoreUnavailable):
    """The store did not answer within the deadline of the call.

    If that deadline is shorter than the store's own, this says nothing about the store.
    """


class StoreOverloaded(StoreError):
    """The call was not sent within its deadline, or only late, because this process is too busy.

    If it was not sent, nothing was charged.
    """


class StoreConflict(StoreError):
    """The store answered, but what it holds under our name is not ours."""


class StoreMisconfigured(ConfigError, StoreError):
    """The store answers, but cannot count for us: wrong credentials, missing rights or schema, a read-only server.

    Somebody has to change something; waiting does not help.
    """


def listed(names: Iterable[object]) -> str:
    """Return names as messages list them."""
    return ", ".join(sorted(map(repr, names)))
