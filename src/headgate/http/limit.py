"""A limiter with what it takes to ask it about requests. The edge of every framework is a thin layer over this."""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headgate import AsyncLimiter, Limiter
from headgate.clock import SteadyClock
from headgate.errors import ConfigError
from headgate.http.headers import Fields, Writer
from headgate.http.keys import KeyFunction, by_address
from headgate.http.usual import AtOnce, asking_at_once
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.base import check_whole

AnyLimiter = TypeVar("AnyLimiter", Limiter, AsyncLimiter)

Keys = KeyFunction | Callable[[Any], Awaitable[Key | None]] | Mapping[str, KeyFunction]
"""A key function, or one for each scope of the rules."""

Cost = int | Callable[[Any], int | Awaitable[int]]
Tier = str | Callable[[Any], str | Awaitable[str | None] | None] | None
Outcomes = Container[int] | Callable[[int], bool]
"""Statuses that count: `{401, 403}`, `range(200, 300)`, or a function of the status."""


STYLES = {
    "both": Fields(),
    "ietf": Fields(x_ratelimit=None),
    "x-ratelimit": Fields(ratelimit=None),
    "none": Fields(x_ratelimit=None, ratelimit=None),
}
"""Which fields a policy asks for, by what it calls them."""


@dataclass(frozen=True, slots=True)
class Way(Generic[AnyLimiter]):
    """From a request to its answer, as of now: what belongs together, so that a request takes all of it or none.

    Attributes:
        limiter: Who decides. Its rules never change.
        writer: Who writes the fields of its decisions.
        tier_for: Under which tier a call is decided, from its key and tier; `None` if under the one it names.
        at_once: The whole way from a request to a decision and its fields, if the limit is a usual one.
    """

    limiter: AnyLimiter
    writer: Writer
    tier_for: Callable[[Key | None, str | None], str | None] | None
    at_once: AtOnce | None


class RequestLimit(Generic[AnyLimiter]):
    """A limiter, and whose units a request asks it for, how many, and in which tier.

    Args:
        limiter: Who decides.
        key: Whose units; by default those of the client's address.
        cost: How many, as a number or a function of the request.
        tier: Which tier, as a name or a function of the request.
        count: Which outcomes count. The units are held while the request is answered, and given back if its status is
            not among these. A request that ends without a status counts.
        exempt: Says which requests are not asked about at all.
        address: Finds the address of a request for which `key` returns `None`.
        fields: Which fields the response carries; by default what the limiter's policy asks for, or else all.

    A limiter of a policy file may change with the file; the next request is then asked about as the file says.
    """

    def __init__(
        self,
        limiter: AnyLimiter,
        *,
        key: Keys | None = None,
        cost: Cost = 1,
        tier: Tier = None,
        count: Outcomes | None = None,
        exempt: Callable[[Any], bool] | None = None,
        address: Callable[[Any], str] | None = None,
        fields: Fields | None = None,
    ) -> None:
        _check_cost(cost, tier, limiter)
        self.own: AnyLimiter = limiter
        self._fields = fields
        self.exempt = exempt
        self.counts = _predicate(count)
        self.address = address or by_address()
        self.key = _one_function(key or self.address, self.address)
        self.cost: Any = cost
        self.tier: Any = tier
        self.awaits = any(map(is_async, (self.key, cost, tier)))
        """Whether the question has to be awaited."""
        self.is_plain = type(cost) is int and tier is None and count is None and not self.awaits
        """Whether nothing but the key depends on the request, and nothing on the response."""
        limiter._on_change(self.renew)  # before it is looked at, so that no change is missed
        self.renew()
        all_limits.add(self)

    def renew(self) -> None:
        """Ask by what the limiter has become."""
        self.use(stand_ins[-1](self.own) if stand_ins else self.own)

    def use(self, limiter: AnyLimiter) -> None:
        """Ask this limiter from now on: its own, or one that stands in for it in a test."""
        self.limiter: AnyLimiter = limiter
        clock = limiter._clock
        # The steady clock is not moved when the machine's time is set; but that time is the one that clients have.
        self.clock_ns: Callable[[], int] = (
            time.time_ns if type(clock) is SteadyClock else lambda: clock.now_us() * 1000
        )
        own = self.own._as_of_now()
        deciding: Any = own if limiter is self.own else limiter
        writer = Writer(own.rules, self._fields or STYLES[own._headers or "both"])
        at_once = None
        if isinstance(deciding, AsyncLimiter):
            at_once = asking_at_once(self, deciding, writer)
        self.way: Way[AnyLimiter] = Way(deciding, writer, deciding._decided_as(), at_once)
        """How requests are asked about."""
        if self.own._as_of_now() is not own:
            self.renew()  # another thread has reloaded its policy meanwhile

    @property
    def writer(self) -> Writer:
        """Who writes the fields."""
        return self.way.writer

    @property
    def at_once(self) -> AtOnce | None:
        """The whole way from a request to a decision and its fields, if the limit is a usual one."""
        return self.way.at_once

    def now_us(self) -> int:
        """Return the time to go by in fields, in microseconds since the epoch."""
        return self.clock_ns() // 1000

    def question(self, request: Any) -> tuple[Key, int, str | None]:
        """Return key, cost and tier of a request."""
        key = self.key(request)
        if key is None:
            key = self.address(request).encode()
        cost = self.cost(request) if callable(self.cost) else self.cost
        return key, cost, self.tier(request) if callable(self.tier) else self.tier

    async def awaited_question(self, request: Any) -> tuple[Key, int, str | None]:
        """As `question`, where some part of it is a coroutine function."""
        key = await _value(self.key, request)
        if key is None:
            key = self.address(request).encode()
        return key, await _value(self.cost, request), await _value(self.tier, request)


all_limits: weakref.WeakSet[RequestLimit[Any]] = weakref.WeakSet()
"""Every limit there is, so that a test can have them all ask somebody else."""

stand_ins: list[Callable[[Any], Any]] = []
"""What a test has put in the place of limiters, innermost last."""


def rule_of(limit: object, kind: type) -> str | Rule:
    """Return a rule, or what stands for one; anything else should have been a limiter of this kind."""
    if isinstance(limit, str | Rule):
        return limit
    raise ConfigError(
        f"a limit is a rule like '5/minute' or a limiter of type {kind.__name__}, not {limit!r}"
    )


def by_path(paths: Collection[str]) -> Callable[[Any], bool] | None:
    """Return what says whether a scope has one of these paths; `None` without any."""
    if isinstance(paths, str):
        raise ConfigError(f"exempt is a list of paths, like [{paths!r}], or a function")
    exempt = frozenset(paths)
    return (lambda scope: scope["path"] in exempt) if exempt else None


def _one_function(key: Keys, address: Callable[[Any], str]) -> Callable[[Any], Any]:
    """Return a key function; of one for each scope, the one that returns the mapping of their keys."""
    if not isinstance(key, Mapping):
        return key
    functions = dict(key)
    if any(map(is_async, functions.values())):
        raise ConfigError("a coroutine function is the whole key; let it return the mapping of all scopes")

    def mapping(request: Any) -> dict[str, Any]:
        keys = {scope: function(request) for scope, function in functions.items()}
        return {scope: address(request).encode() if found is None else found for scope, found in keys.items()}

    return mapping


def _check_cost(cost: object, tier: object, limiter: Limiter | AsyncLimiter) -> None:
    """Refuse a fixed cost with which no request would ever be admitted."""
    if callable(cost):
        return
    check_whole(cost)  # type: ignore[arg-type]  # says what is wrong with it
    limiter = limiter._as_of_now()
    has_one_tier = tier is None and limiter._decided_as() is None
    for rule in limiter.rules if has_one_tier else ():
        capacity = rule.quota.limit if rule.quota.burst is None else rule.quota.burst
        if cost > capacity > 0:  # type: ignore[operator]
            raise ConfigError(f"every request costs {cost}, but {rule} never admits more than {capacity}")


def _predicate(count: Outcomes | None) -> Callable[[int], bool] | None:
    if count is None or callable(count):
        return count
    return lambda status: status in count


def is_async(part: object) -> bool:
    """Return whether calling it gives something to await."""
    # Not only functions: also objects whose __call__ is a coroutine function.
    return inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(type(part).__call__)


async def _value(part: Any, request: Any) -> Any:
    value = part(request) if callable(part) else part
    return await value if inspect.isawaitable(value) else value
