"""Replaying: every request of a log through one limiter, or through two to compare them.

What a refusal would have changed is not in the log. `Retries` is one honest guess at it, and counted apart from the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import IO

from headgate import ConfigError, Decision
from headgate.clock import MICROSECONDS
from headgate.observe import TopKeys
from headgate.policy import LimiterPolicy
from headgate_server.replay.engine import ReplayedLimiter
from headgate_server.replay.requests import LogCounts, LoggedRequest, caller_name
from headgate_server.replay.tally import MOST_CALLERS, SHOWN_CALLERS, ReplayTally

MOST_PENDING = 1_000_000
SHOWN_CHANGES = 20
LINES_BETWEEN_PROGRESS = 5_000
_AFTER_THE_LOG = 2**62
"""Added to the order of a retry: at the same time, the log comes first."""


@dataclass(slots=True)
class RetryCounts:
    """What callers would have done who try again as often as they are allowed to.

    Attributes:
        tries: How often one tries again.
        made: Retries that were made.
        admitted: Requests that a retry got through.
        gave_up: Requests that never got through.
        waited_us: How long those that got through waited, together.
        not_modelled: Refusals that no retry was made for: too many were waiting.
    """

    tries: int
    made: int = 0
    admitted: int = 0
    gave_up: int = 0
    waited_us: int = 0
    not_modelled: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the figures for the report."""
        mean = self.waited_us / self.admitted / MICROSECONDS if self.admitted else None
        return {
            "tries": self.tries,
            "made": self.made,
            "admitted": self.admitted,
            "gave_up": self.gave_up,
            "mean_wait": mean,
            "not_modelled": self.not_modelled,
        }


class Retries:
    """Callers who come again when they may: after the refusal's wait in whole seconds, as `Retry-After` says it.

    Args:
        limiter: Who is asked.
        tries: How often one tries again.
    """

    def __init__(self, limiter: ReplayedLimiter, tries: int) -> None:
        self._limiter = limiter
        self.counts = RetryCounts(tries)
        self._waiting: list[tuple[int, int, int, LoggedRequest]] = []  # when, order, first try, what
        self._tried: dict[int, int] = {}

    def before(self, request: LoggedRequest) -> None:
        """Let all come whose time is before a request's."""
        while self._waiting and self._waiting[0][:2] < request[:2]:
            self._come()

    def finish(self) -> None:
        """Let all come who are still waiting."""
        while self._waiting:
            self._come()

    def refused(self, request: LoggedRequest, decision: Decision | None, since: int, tried: int) -> None:
        """Have a refused caller come again, if there is any use in it."""
        wait = None if decision is None else decision.retry_after_us
        if wait is None or tried >= self.counts.tries:
            self.counts.gave_up += 1
        elif len(self._waiting) >= MOST_PENDING:
            self.counts.not_modelled += 1
        else:
            at = request.at + max(1, -(wait // -MICROSECONDS)) * MICROSECONDS
            order = request.order if tried else request.order + _AFTER_THE_LOG
            self._tried[order] = tried + 1
            heappush(self._waiting, (at, order, since, request._replace(at=at, order=order)))

    def _come(self) -> None:
        _, order, since, request = heappop(self._waiting)
        tried = self._tried.pop(order)
        self.counts.made += 1
        decision = self._limiter.decide(request)
        if decision is not None and decision.allowed:
            self.counts.admitted += 1
            self.counts.waited_us += request.at - since
        else:
            self.refused(request, decision, since, tried)


class Simulation:
    """One limiter, what it decided, and who tries again.

    Args:
        policy: The limiter.
        tries: How often a refused caller tries again.
    """

    def __init__(self, policy: LimiterPolicy, tries: int = 0) -> None:
        self.limiter = ReplayedLimiter(policy)
        self.tally = ReplayTally(self.limiter)
        self.retries = Retries(self.limiter, tries) if tries else None

    def decide(self, request: LoggedRequest) -> Decision | None:
        """Decide a request of the log, and count it.

        Raises:
            ConfigError: The key does not fit the rules.
        """
        if self.retries is not None:
            self.retries.before(request)
        decision = self.limiter.decide(request)
        self.tally.add(request, decision)
        if self.retries is not None and (decision is None or not decision.allowed):
            self.retries.refused(request, decision, request.at, 0)
        return decision

    def as_json(self) -> dict[str, object]:
        """Return the figures for the report."""
        retries = None if self.retries is None else self.retries.counts.as_json()
        return {**self.tally.as_json(), "retries": retries}


@dataclass(slots=True)
class Changes:
    """What changes from one policy to another, request by request."""

    both_admit: int = 0
    both_refuse: int = 0
    newly_refused: int = 0
    newly_admitted: int = 0
    refused_callers: TopKeys[str] = field(default_factory=lambda: TopKeys(MOST_CALLERS))
    admitted_callers: TopKeys[str] = field(default_factory=lambda: TopKeys(MOST_CALLERS))
    examples: list[dict[str, object]] = field(default_factory=list)

    def add(self, request: LoggedRequest, before: Decision | None, after: Decision | None) -> None:
        """Count a request that both have decided."""
        was, will = _is_admitted(before), _is_admitted(after)
        if was == will:
            if was:
                self.both_admit += 1
            else:
                self.both_refuse += 1
            return
        if was:
            self.newly_refused += 1
            self.refused_callers.add(request.caller)
        else:
            self.newly_admitted += 1
            self.admitted_callers.add(request.caller)
        if len(self.examples) < SHOWN_CHANGES:
            self.examples.append(
                {
                    "time": request.at / MICROSECONDS,
                    "key": request.caller,
                    "route": request.route,
                    "change": "refused" if was else "admitted",
                    "rule": _rule(after if was else before),
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
        simulations: One, or two to be compared.
        changes: What changes from the first to the second.
        first: The time of the first request, in microseconds.
        last: That of the last one.
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
    """Decide every request by one limiter, or by two.

    Args:
        requests: In the order of time.
        simulations: Who decides.
        counts: Where requests are counted that do not fit the rules.
        progress: Called now and then, with what is being done.
        decisions: Where every decision is written to, as a line of JSON.
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
            simulation.retries.finish()
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


def _rule(decision: Decision | None) -> str | None:
    return None if decision is None else decision.rule


def _callers(top: TopKeys[str]) -> list[dict[str, object]]:
    return [{"key": caller, "requests": count} for caller, count in top.top(SHOWN_CALLERS)]
