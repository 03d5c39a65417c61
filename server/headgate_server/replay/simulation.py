"""Replay of a log through one limiter, or through two for a comparison.

A replayed limiter is created like one of a live policy, with a memory store and the clock of the log. So tiers, overrides
and shadow rules work as usual, and states expire by the time of the log: memory holds only keys that are live at that time.
Time never goes back, because `requests.in_order` sorts.

The behaviour of callers after a refusal is unknown. `Retries` is a simple model of it, with separate figures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import IO, NamedTuple

from headgate import ConfigError, CostTooHigh, Decision, Rule
from headgate.clock import MICROSECONDS, SteadyClock
from headgate.policy import LimiterPolicy, Version, in_words
from headgate.rules import SHARED
from headgate.stores import MemoryStore, Request
from headgate_server.replay.errors import ReplayError
from headgate_server.replay.requests import LogCounts, LoggedRequest, caller_name
from headgate_server.replay.tally import MOST_KEYS, SHOWN_CALLERS, ReplayTally

MAX_KEYS = 20_000_000
"""Maximum number of live states; more would not fit into the memory of most machines."""
SHOWN_CHANGES = 20
LINES_BETWEEN_PROGRESS = 5_000


class ReplayClock(SteadyClock):
    """A clock that shows the time of the current request."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def now_us(self) -> int:
        return self.at


class Simulation:
    """One limiter of a policy with the clock of a log, its decisions, and the retries of refused callers.

    Args:
        policy: The limiter. Its store and its settings for outages are ignored.
        tries: Retries per refused request.

    Attributes:
        policy: The limiter, without the skipped rules.
        skipped: Names of the skipped rules: `concurrent` rules, because most logs do not have the duration of requests.
        tally: The figures of its decisions.
        retries: The retries of refused callers; `None` if they do not retry.

    Raises:
        ReplayError: It has only `concurrent` rules.
    """

    def __init__(self, policy: LimiterPolicy, tries: int = 0) -> None:
        self.skipped = tuple(rule.name for rule in (*policy.rules, *policy.shadow) if _is_skipped(rule))
        rules, shadow = (
            tuple(rule for rule in rules if not _is_skipped(rule)) for rules in (policy.rules, policy.shadow)
        )
        if not rules:
            raise ReplayError(
                f"{policy.name} has only concurrent rules, which are not replayed: most logs do not have the duration "
                f"of requests"
            )
        self.policy = policy = replace(policy, rules=rules, shadow=shadow)
        self._clock = ReplayClock()
        self._store = MemoryStore(max_keys=MAX_KEYS, clock=self._clock)
        alone = replace(policy, store="memory://", on_store_error="open", deadline=None, lease=None)
        self._version = Version(alone, self._store)
        self._gate = self._version.gate
        self.tally = ReplayTally(rules)
        self.retries = Retries(self._decide, tries) if tries else None

    @property
    def overflowed(self) -> int:
        """Number of requests that were decided too strictly, because memory was full."""
        return self._store.overflowed

    def decide(self, request: LoggedRequest) -> Decision | None:
        """Decide a request of the log at its time, and count it; `None` if its cost is above the capacity of a rule.

        Raises:
            ConfigError: The key does not fit the rules.
        """
        if self.retries is not None:
            self.retries.run_until(request.at)
        decision = self._decide(request)
        self.tally.add(request, decision)
        if self.retries is not None and not _is_admitted(decision):
            self.retries.add(request, decision)
        return decision

    def _decide(self, request: LoggedRequest) -> Decision | None:
        self._clock.at = request.at
        try:
            return self._gate.decide(Request("hit", request.key, request.cost, request.tier))[0]
        except CostTooHigh:
            return None

    def as_json(self) -> dict[str, object]:
        """Return the figures for the report."""
        counts = [(shadow.rule, shadow.tally.so_far()) for shadow in self._version.shadows]
        return {
            **self.tally.as_json(),
            "shadow": [
                {"name": rule.name, "words": in_words(rule), "asked": count.asked, "refused": count.refused}
                for rule, count in counts
            ],
            "retries": None if self.retries is None else self.retries.as_json(),
        }


def _is_skipped(rule: Rule) -> bool:
    return rule.kind == "concurrent"


def scopes_of(policy: LimiterPolicy) -> tuple[str, ...]:
    """Return the scopes of a limiter's live and shadow rules, in their order."""
    scopes = dict.fromkeys(rule.scope for rule in (*policy.rules, *policy.shadow))
    return tuple(scope for scope in scopes if scope is not None and scope != SHARED)


def needs_key(policy: LimiterPolicy) -> bool:
    """Return whether any rule counts by key."""
    return any(rule.scope != SHARED for rule in (*policy.rules, *policy.shadow))


class _Retry(NamedTuple):
    """A retry; requests of the log with the same time come first."""

    at: int
    order: int
    tried: int
    since: int
    request: LoggedRequest


class Retries:
    """Model of callers that retry after the wait of a refusal, in whole seconds as in `Retry-After`.

    Args:
        decide: Decides a retry.
        tries: Retries per request.

    Attributes:
        made: Number of retries.
        admitted: Requests that were admitted by a retry.
        gave_up: Requests that were never admitted.
    """

    def __init__(self, decide: Callable[[LoggedRequest], Decision | None], tries: int) -> None:
        self._decide = decide
        self._pending: list[_Retry] = []
        self._waited_us = 0
        self.tries = tries
        self.made = 0
        self.admitted = 0
        self.gave_up = 0

    def run_until(self, at: int | None) -> None:
        """Make all retries before a time; with `None`, all."""
        while self._pending and (at is None or self._pending[0].at < at):
            retry = heappop(self._pending)
            self.made += 1
            decision = self._decide(retry.request._replace(at=retry.at))
            if decision is not None and decision.allowed:
                self.admitted += 1
                self._waited_us += retry.at - retry.since
            else:
                self._refused(retry, decision)

    def add(self, request: LoggedRequest, decision: Decision | None) -> None:
        """Schedule the first retry of a refused request."""
        self._refused(_Retry(request.at, request.order, 0, request.at, request), decision)

    def _refused(self, retry: _Retry, decision: Decision | None) -> None:
        wait = None if decision is None else decision.retry_after_us
        if wait is None or retry.tried >= self.tries:
            self.gave_up += 1
        else:
            at = retry.at + max(1, -(wait // -MICROSECONDS)) * MICROSECONDS
            heappush(self._pending, retry._replace(at=at, tried=retry.tried + 1))

    def as_json(self) -> dict[str, object]:
        """Return the figures for the report."""
        return {
            "tries": self.tries,
            "made": self.made,
            "admitted": self.admitted,
            "gave_up": self.gave_up,
            "mean_wait": self._waited_us / self.admitted / MICROSECONDS if self.admitted else None,
        }


@dataclass(slots=True)
class Changes:
    """Differences between two policies, request by request."""

    both_admit: int = 0
    both_refuse: int = 0
    newly_refused: int = 0
    newly_admitted: int = 0
    refused_callers: Counter[str] = field(default_factory=Counter)
    admitted_callers: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, object]] = field(default_factory=list)

    def add(self, request: LoggedRequest, before: Decision | None, after: Decision | None) -> None:
        """Count a request by its two decisions."""
        was, will = _is_admitted(before), _is_admitted(after)
        if was and will:
            self.both_admit += 1
            return
        if not was and not will:
            self.both_refuse += 1
            return
        if was:
            self.newly_refused += 1
            _count(self.refused_callers, request.caller)
        else:
            self.newly_admitted += 1
            _count(self.admitted_callers, request.caller)
        if len(self.examples) < SHOWN_CHANGES:
            refusal = after if was else before
            self.examples.append(
                {
                    "time": request.at / MICROSECONDS,
                    "key": request.caller,
                    "route": request.route,
                    "change": "refused" if was else "admitted",
                    "rule": None if refusal is None else refusal.rule,
                }
            )

    def as_json(self) -> dict[str, object]:
        """Return the figures for the report."""
        return {
            "both_admit": self.both_admit,
            "both_refuse": self.both_refuse,
            "newly_refused": self.newly_refused,
            "newly_admitted": self.newly_admitted,
            "newly_refused_callers": _callers(self.refused_callers),
            "newly_admitted_callers": _callers(self.admitted_callers),
            "examples": self.examples,
        }


@dataclass(slots=True)
class Replayed:
    """A finished replay.

    Attributes:
        simulations: One simulation, or two that are compared.
        changes: The differences between the first and the second, or `None`.
        first: The time of the first request, in microseconds; `None` without requests.
        last: The time of the last request.
        whole_seconds: Whether all times were whole seconds.
    """

    simulations: list[Simulation]
    changes: Changes | None = None
    first: int | None = None
    last: int = 0
    whole_seconds: bool = True


def run(
    requests: Iterable[LoggedRequest],
    simulations: list[Simulation],
    counts: LogCounts,
    *,
    progress: Callable[[str], None] = lambda doing: None,
    decisions: IO[str] | None = None,
) -> Replayed:
    """Decide every request in each simulation.

    Args:
        requests: The requests, in the order of time.
        simulations: One simulation, or two that are compared.
        counts: Counts requests with keys that do not fit the rules.
        progress: Called regularly with the name of the current step.
        decisions: File for all decisions, as lines of JSON.
    """
    replayed = Replayed(simulations, Changes() if len(simulations) > 1 else None)
    for number, request in enumerate(requests):
        if not number % LINES_BETWEEN_PROGRESS:
            progress("replaying")
        try:
            answers = [simulation.decide(request) for simulation in simulations]
        except ConfigError as error:
            counts.add_bad("the limiter cannot decide it", caller_name(request.key), str(error))
            continue
        if request.at % MICROSECONDS:
            replayed.whole_seconds = False
        if replayed.first is None:
            replayed.first = request.at
        replayed.last = request.at
        if replayed.changes is not None:
            replayed.changes.add(request, *answers)
        if decisions is not None:
            decisions.write(json.dumps(_line(request, answers), separators=(",", ":")) + "\n")
    for simulation in simulations:
        if simulation.retries is not None:
            simulation.retries.run_until(None)
    return replayed


def _line(request: LoggedRequest, answers: list[Decision | None]) -> dict[str, object]:
    line: dict[str, object] = {
        "time": request.at / MICROSECONDS,
        "key": request.caller,
        "cost": request.cost,
        "tier": request.tier,
        "route": request.route,
        **_answer(answers[0]),
    }
    return line if len(answers) == 1 else {**line, "compare": _answer(answers[1])}


def _answer(decision: Decision | None) -> dict[str, object]:
    if decision is None:
        return {"allowed": False, "rule": None, "remaining": None, "retry_after": None}
    return {
        "allowed": decision.allowed,
        "rule": decision.rule,
        "remaining": decision.remaining,
        "retry_after": decision.retry_after,
    }


def _is_admitted(decision: Decision | None) -> bool:
    return decision is not None and decision.allowed


def _count(callers: Counter[str], caller: str) -> None:
    if caller in callers or len(callers) < MOST_KEYS:
        callers[caller] += 1


def _callers(callers: Counter[str]) -> list[dict[str, object]]:
    return [{"key": caller, "requests": count} for caller, count in callers.most_common(SHOWN_CALLERS)]
