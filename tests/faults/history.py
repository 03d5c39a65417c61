"""The calls of a run as their callers saw them, and the faults during the run.

All times are whole microseconds since the epoch, on the clock of the store. A call was decided at some moment between its
`start` and its `end`, both measured by its caller. The checker uses no other information.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

NEVER = 2**62
"""A time later than any other."""

SHARED = "*"


class VerdictSeen(NamedTuple):
    """The answer of one rule."""

    allowed: bool
    limit: int
    remaining: int
    retry_us: int | None


class HistoryCall(NamedTuple):
    """One call, as its caller saw it.

    Attributes:
        worker: Number of the calling process; a restarted process has a new number.
        number: Number of the call within its worker.
        operation: hit, hits, wait, check, record, hold, settle, confirm, renew or reset. A release is recorded as `settle`
            with cost 0.
        limiter: Name of the limiter.
        key: The limited key.
        cost: Requested units; for a settlement, the final units.
        start: Time before the call.
        end: Time after the reply; `None` without a reply.
        outcome: The outcome seen by the caller: `admitted`; `refused`; `done` (an operation without a decision); `nothing`
            (an error that guarantees that nothing was charged); `unknown` (a time-out, another error, the end of the
            worker, or an answer of the failure policy); `cancelled` (the caller stopped waiting; the library must soon drop
            the call or release its hold).
        verdicts: The answers of the rules, in the order of the rules; empty without an answer.
        hold: For a settlement, confirmation or renewal: number of the call that took the hold.
        times: Number of decisions in this record. A burst is many hits of the same cost on one key. Its first and its last
            admission are records of one decision; its other admissions are one `hits` record with their total cost, as are
            its hits of unknown outcome. Its refusals are one `hit` record with the cost of one hit.
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
    """The parameters of a rule that the checker uses.

    Attributes:
        kind: Kind of the rule, as in `headgate.rules`.
        period_us: The period; for `concurrent`, the lease.
        limits: All limits that may apply to a call: of the rule, its tiers, the quotas of calls, and reloaded policies.
        bursts: For a token bucket, all bursts that may apply to a call.
        buckets: Number of buckets of a sliding window.
        shared: Whether the rule counts all keys together.
    """

    kind: str
    period_us: int
    limits: tuple[int, ...]
    bursts: tuple[int, ...] = ()
    buckets: int = 60
    shared: bool = False


class Loss(NamedTuple):
    """A declared loss: from `at` on, the store may have lost writes that it acknowledged between `since` and `until`."""

    since: int
    at: int
    until: int


class Pause(NamedTuple):
    """A time in which a worker was stopped and received no replies; worker -1 stands for all workers."""

    worker: int
    start: int
    end: int


@dataclass(slots=True)
class History:
    """The calls of one run, and further inputs of the checker.

    Attributes:
        limiters: The rules of each limiter.
        calls: The calls, in any order.
        losses: The declared losses of the store.
        pauses: Times in which workers were stopped.
        killed: Numbers of killed workers, whose last calls may have no end.
        faults: Start and end of each fault of the store, its connections or the machine.
        slack_us: Maximum difference between the clocks of the store and the callers.
        longest_us: Maximum duration of a call: its deadline, and a margin for a busy machine.
        released_within_us: Time within which a cancelled call is dropped or its hold released, if no fault intervenes;
            `None` if there is no such promise.
        notes: Other information for readers, such as the seed and the name of the store.
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
    """Write a history to a file: one line with everything except the calls, then one line per call."""
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
