"""Decide when a client sends a request, how long it waits, and which requests it retries. No I/O."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypedDict

from headgate._checks import check_count, check_list, check_statuses, is_number
from headgate._fork import watch
from headgate._steps import Steps
from headgate.clock import MICROSECONDS, Clock, SteadyClock, check_clock, dating
from headgate.decision import Decision
from headgate.errors import ConfigError, RateLimited
from headgate.http.client.reports import reported_limits
from headgate.http.keys import check_function
from headgate.http.limit import AnyLimiter, rule_of
from headgate.keys import PlainKey

IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
REFUSALS = frozenset({429, 503})

LONGEST_PAUSE = 86_400.0
"""The longest pause in seconds that a peer can request; longer values are treated as mistakes."""

MOST_PAUSES = 10_000
"""The number of pauses kept before expired ones are removed."""

FIRST_BACKOFF = 0.5
"""The pause in seconds after a refusal without a retry time; doubled after each further refusal."""

_YEAR_2001 = 1_000_000_000
# Also matches an unclosed string, to avoid quadratic backtracking.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|$)')
# One value of `Retry-After`: a date with its weekday and comma, or anything without a comma.
_VALUES = re.compile(r"[A-Za-z]+,[^,]+|[^,]+")
_LEGACY = ("ratelimit-", "x-ratelimit-", "x-rate-limit-")


class OutboundArguments(TypedDict, total=False):
    """The arguments of `OutboundOptions` except the limit."""

    key: Callable[[Any], PlainKey] | None
    retries: int
    methods: Collection[str]
    statuses: Collection[int]
    max_wait: float
    jitter: float
    clock: Clock | None


class OutboundOptions(Generic[AnyLimiter]):
    """Rate limit, retry and pause settings of an HTTP client, with the pauses that peers requested.

    Args:
        kind: `Limiter` or `AsyncLimiter`.
        limit: The caller's own limit: a limiter, or a rule. Each request waits for it before it is sent. `None`: no limit.
        key: A function from a request to its key; by default the request's host. Pauses requested by a peer apply per key.
        retries: The maximum number of retries of a refused request.
        methods: The methods that are retried; by default the idempotent ones.
        statuses: The statuses that mean "refused".
        max_wait: The maximum total seconds that one request waits. If a longer wait is needed before the request is sent,
            `RateLimited` is raised; after a refusal, the refusal is returned.
        jitter: The largest fraction by which pauses are randomly extended, so that clients do not return all at once.
        clock: The clock to use; by default that of the limiter.
    """

    def __init__(
        self,
        kind: type[AnyLimiter],
        limit: Any,
        *,
        key: Callable[[Any], PlainKey] | None = None,
        retries: int = 2,
        methods: Collection[str] = IDEMPOTENT,
        statuses: Collection[int] = REFUSALS,
        max_wait: float = 90.0,
        jitter: float = 0.1,
        clock: Clock | None = None,
    ) -> None:
        check_count("retries", retries, 0, 1_000_000)
        for name, value, most in (("max_wait", max_wait, LONGEST_PAUSE), ("jitter", jitter, 1)):
            if not is_number(value) or not 0 <= value <= most:
                raise ConfigError(f"{name} must be a number from 0 to {most}, not {value!r}")
        if key is not None:
            check_function("key=", key, can_await=False)
        self.limiter: AnyLimiter | None = None
        if limit is not None:
            self.limiter = limit if isinstance(limit, kind) else kind(rule_of(limit, kind), clock=clock)
        self.key = key
        self.clock = check_clock(clock) or (SteadyClock() if self.limiter is None else self.limiter.clock)
        self._dates = dating(self.clock)
        self._retries = retries
        self._statuses = frozenset(check_statuses("statuses", statuses, "[429, 503]"))
        self._methods = frozenset(map(str.upper, check_list("methods", methods, str, "['GET', 'HEAD']")))
        self._max_wait, self._jitter = max_wait, jitter
        self._pauses: dict[PlainKey, int] = {}
        self._most_pauses = MOST_PAUSES
        self._lock = watch(threading.RLock())

    def exchange(
        self,
        key: PlainKey,
        method: str,
        can_repeat: bool,
        send: Callable[[], Any],
        sleep: Callable[[float], Any],
        read: Callable[[Any], Any],
    ) -> Steps:
        """Send a request when the limits permit, retry it if it is refused, and return the last response.

        Args:
            key: The key to count by.
            method: The request's method.
            can_repeat: Whether the body can be sent again.
            send: Sends the request; the response has `status_code` and `headers`.
            sleep: Sleeps for the given seconds.
            read: Reads the whole response, so that its connection is released and the response can still be returned.

        Raises:
            RateLimited: The required wait exceeds `max_wait`.
        """
        repeats = self._retries if can_repeat and method.upper() in self._methods else 0
        deadline = self.clock.now_us() + round(self._max_wait * MICROSECONDS)
        answer = None
        for attempt in range(repeats + 1):
            try:
                yield from self._waited(key, deadline, sleep)
            except RateLimited:
                if answer is None:
                    raise
                return answer
            answer = yield send()
            is_refused = answer.status_code in self._statuses
            pause = asked_pause(answer.headers, self._dates.now_us() / MICROSECONDS, is_refused)
            if pause is None and is_refused:
                pause = FIRST_BACKOFF * 2**attempt
            if pause is not None:
                self._note(key, pause)
            if not is_refused or attempt == repeats:
                return answer
            yield read(answer)
        raise AssertionError("the last attempt returns")

    def pause_us(self, key: PlainKey) -> int:
        """Return the remaining microseconds of the pause that the peer requested for a key."""
        return max(0, self._pauses.get(key, 0) - self.clock.now_us())

    def _waited(self, key: PlainKey, deadline: int, sleep: Callable[[float], Any]) -> Steps:
        while True:
            yield from self._paused(key, deadline, sleep)
            if self.limiter is not None:
                yield self.limiter.wait(key, timeout=self._left(deadline) / MICROSECONDS)
            if not self.pause_us(key):
                return
            # Another request was refused while this one waited. Take from the limiter again after the pause; otherwise all
            # waiting requests would be sent at once.

    def _paused(self, key: PlainKey, deadline: int, sleep: Callable[[float], Any]) -> Steps:
        while pause := self.pause_us(key):
            left = self._left(deadline)
            if pause > left:
                raise RateLimited(Decision.make(("peer",), [(False, 0, 0, pause, pause)]))
            yield sleep(min(pause * (1 + random.random() * self._jitter), left) / MICROSECONDS)

    def _left(self, deadline: int) -> int:
        return max(0, deadline - self.clock.now_us())

    def _note(self, key: PlainKey, pause: float) -> None:
        now = self.clock.now_us()
        with self._lock:
            self._pauses[key] = max(self._pauses.get(key, 0), now + round(pause * MICROSECONDS))
            if len(self._pauses) > self._most_pauses:
                self._pauses = dict(filter(lambda pause: pause[1] > now, tuple(self._pauses.items())))
                self._most_pauses = max(MOST_PAUSES, 2 * len(self._pauses))


def asked_pause(headers: Mapping[str, str], now: float, is_refused: bool) -> float | None:
    """Return the seconds for which header fields request a pause; `None` if they do not.

    `Retry-After-Ms` and `Retry-After` of a refusal take precedence; of several values the longest counts, and a date is
    compared with the response's own `Date`. Otherwise a limit is exhausted if `RateLimit` (drafts 7 and 11),
    `RateLimit-Remaining`, `X-RateLimit-Remaining` or a limit of `reported_limits` is 0; the pause is the reset time given
    with it.

    Args:
        headers: Header fields; names in any case.
        now: The time in seconds since the epoch.
        is_refused: Whether the request was refused.
    """
    headers = {name.lower(): value for name, value in headers.items()}
    if is_refused:
        if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
            return _bounded(milliseconds / 1000)
        if pauses := list(
            _retry_after(headers.get("retry-after", ""), _timestamp(headers.get("date", "")) or now)
        ):
            return _bounded(max(pauses))
    pauses = list(_exhausted(headers, now))
    return _bounded(max(pauses)) if pauses else None


def _retry_after(field: str, now: float) -> Iterator[float]:
    """Yield the seconds of each value; clients join several fields with commas, and dates contain commas too."""
    for value in _VALUES.findall(field):
        if (seconds := _number(value)) is not None:
            yield seconds
        elif (date := _timestamp(value)) is not None:
            yield date - now


def _timestamp(value: str) -> float | None:
    """Return an HTTP date in seconds since the epoch."""
    try:
        date = parsedate_to_datetime(value)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):  # OverflowError: numbers outside the range of dates
        return None


def _exhausted(headers: Mapping[str, str], now: float) -> Iterator[float]:
    """Yield the seconds until the reset of each exhausted limit."""
    field = _QUOTED.sub("", headers.get("ratelimit", ""))
    for item in field.split(","):
        if re.search(r";\s*r=0\s*(;|$)", item) and (window := re.search(r";\s*t=(\d+)", item)):
            yield float(window[1])
    if re.search(r"remaining=0\s*(,|;|$)", field) and (reset := re.search(r"reset=(\d+)", field)):
        yield float(reset[1])
    for prefix in _LEGACY:
        remaining, seconds = (
            _number(headers.get(f"{prefix}remaining")),
            _number(headers.get(f"{prefix}reset")),
        )
        if remaining == 0 and seconds is not None:
            if seconds >= _YEAR_2001 * 1000:
                seconds /= 1000  # some servers send milliseconds
            yield seconds - now if seconds >= _YEAR_2001 else seconds
    for limit in reported_limits(headers, now):
        if limit.remaining == 0 and limit.reset is not None:
            yield limit.reset


def _number(value: str | None) -> float | None:
    text = (value or "").strip()
    return float(text) if re.fullmatch(r"\d{1,15}(\.\d+)?", text) else None


def _bounded(pause: float) -> float:
    return min(max(0.0, pause), LONGEST_PAUSE)
