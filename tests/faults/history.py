"""The calls of a run as their callers saw them, and the faults during the run.

All times are whole microseconds since the epoch, by the clock that the store counts by. A call was decided at some moment
from its `start` to its `end`, both as its caller saw them. A checker uses nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

NEVER = 2**62
"""A time that does not come."""

SHARED = "*"


class VerdictSeen(NamedTuple):
    """What one rule answered."""

    allowed: bool
    limit: int
    remaining: int
    retry_us: int | None


class HistoryCall(NamedTuple):
    """One call, as its caller saw it.

    Attributes:
        worker: The process that made it; a restarted process is another worker.
        number: Its number among the calls of the worker.
        operation: hit, hits, wait, check, record, hold, settle, confirm, renew or reset. To release is to settle at 0.
        limiter: Name of the limiter.
        key: Whose units.
        cost: Units asked for; of a settlement, those that are to stand.
        start: When it began.
        end: When its caller had the answer; `None` if it never did.
        outcome: What its caller knows. `admitted`, `refused`, `done` (nothing to decide), `nothing` (an error that says that
            nothing was charged), `unknown` (a time-out, an error, the end of the worker, an answer of the failure policy),
            or `cancelled`: no one waits for it any more. The library has to see to it soon, and to give a hold back.
        verdicts: What each rule answered, in their order; empty if there was no answer.
        hold: Of a settlement, confirmation or renewal: the number of the call that took the hold.
        times: How many decisions it stands for. Of a burst, hits of one cost on one key, the first and the last admission
            and one refusal are calls of their own; the others that ended alike are one call, `hits`, with their cost in all.
    """

    worker: int
    number: int
    operation: str
    limiter: str
    key: str
    cost: int
    start: int
    end: int | None
    outcome: str
    verdicts: tuple[VerdictSeen, ...] = ()
    hold: int | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """A rule as the checker needs to know it.

    Attributes:
        kind: As in `headgate.rules`.
        period_us: Its period; of `concurrent`, the lease.
        limits: All limits that calls may be decided by: the rule's own, those of tiers, of calls and of other policies.
        bursts: The same for bursts of a token bucket.
        buckets: Of a sliding window.
        shared: Whether it counts all keys together.
    """

    kind: str
    period_us: int
    limits: tuple[int, ...]
    bursts: tuple[int, ...] = ()
    buckets: int = 60
    shared: bool = False


class Loss(NamedTuple):
    """A declared loss: from `at` on, the store may have lost writes that it acknowledged from `since` to `until`."""

    since: int
    at: int
    until: int


class Pause(NamedTuple):
    """A time in which a worker was stopped, so that it could see nothing end."""

    worker: int
    start: int
    end: int


@dataclass(slots=True)
class History:
    """The calls of one run, and the facts that the checker needs.

    Attributes:
        limiters: The rules of each limiter.
        calls: In any order.
        losses: What the store may have forgotten, as it declares.
        pauses: When workers were stopped.
        killed: Workers that were killed, so that their last calls have no end.
        faults: When anything was done to the store, its connections or the machine: start and end of each.
        slack_us: How far the store's clock may be from the callers'.
        longest_us: How long a call may take: its deadline, and what a busy machine may add.
        released_within_us: How long it may take until a cancelled call is over, and a hold given back, if no fault comes in
            between. `None` if that is not promised.
        notes: Anything else, as the seed and the name of the store.
    """

    limiters: dict[str, tuple[RuleSpec, ...]]
    calls: list[HistoryCall]
    losses: list[Loss] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    faults: list[tuple[int, int]] = field(default_factory=list)
    slack_us: int = 0
    longest_us: int = NEVER
    released_within_us: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def with_calls(self, calls: Iterable[HistoryCall]) -> History:
        """Return the same history with other calls."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return History(**{**values, "calls": list(calls)})


def save(history: History, path: Path) -> None:
    """Write a history to a file: one line of facts, then one line for each call."""
    about = {name: getattr(history, name) for name in History.__slots__ if name != "calls"}
    about["killed"] = sorted(history.killed)
    about["limiters"] = {name: [asdict(rule) for rule in rules] for name, rules in history.limiters.items()}
    with path.open("w", encoding="utf-8") as lines:
        lines.write(json.dumps(about) + "\n")
        for call in sorted(history.calls, key=lambda call: call.start):
            seen = {name: value for name, value in call._asdict().items() if value not in (None, ())}
            lines.write(json.dumps(seen) + "\n")


def load(path: Path) -> History:
    """Read a history from a file."""
    with path.open(encoding="utf-8") as lines:
        about = json.loads(next(lines))
        calls = [_call_from(json.loads(line)) for line in lines]
    limiters = {name: tuple(map(_rule_from, rules)) for name, rules in about.pop("limiters").items()}
    about["losses"] = [Loss(*entry) for entry in about["losses"]]
    about["pauses"] = [Pause(*entry) for entry in about["pauses"]]
    about["faults"] = [(start, end) for start, end in about["faults"]]
    about["killed"] = set(about["killed"])
    return History(limiters, calls, **about)


def _rule_from(data: Mapping[str, Any]) -> RuleSpec:
    return RuleSpec(**{**data, "limits": tuple(data["limits"]), "bursts": tuple(data["bursts"])})


def _call_from(data: dict[str, Any]) -> HistoryCall:
    verdicts = tuple(VerdictSeen(*entry) for entry in data.pop("verdicts", ()))
    return HistoryCall(**{"end": None, **data, "verdicts": verdicts})
