"""How a client behaves: when it sends, how long it waits, what it sends again. No I/O: that is for httpx and requests."""

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
from headgate.clock import MICROSECONDS, Clock, SteadyClock, check_clock, dating
from headgate.decision import Decision
from headgate.errors import ConfigError, RateLimited
from headgate.http.keys import check_function
from headgate.http.limit import AnyLimiter, rule_of
from headgate.http.steps import Steps
from headgate.keys import PlainKey

IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
REFUSALS = frozenset({429, 503})

LONGEST_PAUSE = 86_400.0
"""Seconds that a peer can ask for at most: what is more is a mistake."""

MOST_PAUSES = 10_000
"""How many pauses are kept before those that are over are forgotten."""

FIRST_BACKOFF = 0.5
"""Seconds after a refusal that does not say how long; twice as many after the next one."""

_YEAR_2001 = 1_000_000_000
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|$)')  # also an open one: else each quote in it is tried anew
_LEGACY = ("ratelimit-", "x-ratelimit-", "x-rate-limit-")


class MannersOptions(TypedDict, total=False):
    """What `Manners` takes besides the limit."""

    key: Callable[[Any], PlainKey] | None
    retries: int
    methods: Collection[str]
    statuses: Collection[int]
    max_wait: float
    jitter: float
    clock: Clock | None


class Manners(Generic[AnyLimiter]):
    """What a client keeps to.

    Args:
        kind: `Limiter` or `AsyncLimiter`.
        limit: The caller's own limit, which a request waits for before it is sent: a limiter, or a rule. `None` for none.
        key: Whose limit, from a request; by default its host. What a peer asks for goes for the same key.
        retries: How often a refused request is sent again at most.
        methods: Which methods are sent again; by default the idempotent ones.
        statuses: Which answers are refusals.
        max_wait: Seconds that one request waits at most, all in all. If that is not enough, `RateLimited` is raised before
            it is sent, and a refusal is returned after.
        jitter: By which part, chosen at random, pauses are longer than was asked for, so that not all come back at once.
        clock: Where time comes from; by default that of the limiter.
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
        """Send a request when it may be sent, again if it is refused, and return the last answer.

        Args:
            key: Whose limit.
            method: The request's method.
            can_repeat: Whether its body can be sent again.
            send: Sends it; the answer has `status_code` and `headers`.
            sleep: Lets seconds pass.
            read: Reads an answer whole, so that its connection is free, and it can still be returned.

        Raises:
            RateLimited: It would have to wait for too long.
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
        """Return for how many microseconds nothing is sent for a key, because the peer has asked for it."""
        return max(0, self._pauses.get(key, 0) - self.clock.now_us())

    def _waited(self, key: PlainKey, deadline: int, sleep: Callable[[float], Any]) -> Steps:
        while True:
            yield from self._paused(key, deadline, sleep)
            if self.limiter is not None:
                yield self.limiter.wait(key, timeout=self._left(deadline) / MICROSECONDS)
            if not self.pause_us(key):
                return
            # Another request was refused meanwhile. What was taken before the pause does not count for after it: else all
            # that have waited would be sent at once.

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
    """Return for how many seconds the sender of these header fields wants no more requests; `None` if it does not say.

    `Retry-After` of a refusal counts before all others. Otherwise nothing is left of a limit if `RateLimit` (drafts 7 and
    11), `RateLimit-Remaining` or `X-RateLimit-Remaining` says 0, until the time that stands beside it.

    Args:
        headers: Header fields; names in any case.
        now: The time in seconds since the epoch.
        is_refused: Whether the request was refused.
    """
    headers = {name.lower(): value for name, value in headers.items()}
    if is_refused and (value := headers.get("retry-after")) is not None:
        pause = _retry_after(value, now)
        if pause is not None:
            return _bounded(pause)
    pauses = list(_exhausted(headers, now))
    return _bounded(max(pauses)) if pauses else None


def _retry_after(value: str, now: float) -> float | None:
    if (seconds := _number(value)) is not None:
        return seconds
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # the second for numbers that no date has
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now


def _exhausted(headers: Mapping[str, str], now: float) -> Iterator[float]:
    """Yield the seconds until each limit of which nothing is left begins anew."""
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
                seconds /= 1000  # some write milliseconds
            yield seconds - now if seconds >= _YEAR_2001 else seconds


def _number(value: str | None) -> float | None:
    text = (value or "").strip()
    return float(text) if re.fullmatch(r"\d{1,15}(\.\d+)?", text) else None


def _bounded(pause: float) -> float:
    return min(max(0.0, pause), LONGEST_PAUSE)
