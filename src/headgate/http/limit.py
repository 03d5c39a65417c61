"""A limiter together with the functions that turn a request into a call. Each framework's module is a thin layer over this.

    request  --question-->  Request(key, cost, tier)  --gate of the version's limiter-->  Decision  --its writer-->  fields

All limiters take this path: with several rules, scopes, tiers, a policy file, on any store.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from headgate import AsyncLimiter, Limiter
from headgate._checks import check_kind, check_list, check_statuses
from headgate._limiting import HeaderStyle
from headgate._steps import Steps
from headgate.clock import Clock, dating
from headgate.costs import Cost as Units
from headgate.costs import check_whole
from headgate.decision import Decision
from headgate.errors import ConfigError, listed
from headgate.hooks import Hook
from headgate.http.headers import Asked, Headers, Terms, Writer, headers_of
from headgate.http.keys import KeyFunction, by_address, check_function, is_async, takes_scope
from headgate.keys import Key
from headgate.outage.policies import OnStoreError
from headgate.quota import Quotas
from headgate.quotas import QuotaCache, QuotaValue, caller_of, check_kept_for, quotas_of
from headgate.rules import Rule, scopes_of
from headgate.stores.request import Request, new_request

AnyLimiter = TypeVar("AnyLimiter", Limiter, AsyncLimiter)
AnyApp = TypeVar("AnyApp")

AnyKeyFunction = KeyFunction | Callable[[Any], Awaitable[Key | None]]
Keys = AnyKeyFunction | Mapping[str, AnyKeyFunction]
"""A key function, or one key function per scope of the rules."""

Cost = Units | Callable[[Any], Units | Awaitable[Units]]
"""The number of units, or a function that returns it."""
Tier = str | Callable[[Any], str | Awaitable[str | None] | None] | None
RequestQuota = QuotaValue | Callable[[Any], QuotaValue | Awaitable[QuotaValue | None] | None] | None
Outcomes = Collection[int] | Callable[[int], bool]
"""Statuses that count: `{401, 403}`, `range(200, 300)`, or a function of the status."""


class LimitOptions(TypedDict, total=False):
    """The arguments of every limit of requests, except its limiter."""

    key: Keys | None
    cost: Cost
    tier: Tier
    quota: RequestQuota
    quota_for: float
    count: Outcomes | None
    address: Callable[[Any], str] | None
    headers: Headers | HeaderStyle | None


class RequestOptions(LimitOptions, total=False):
    """The arguments of `RequestLimit`, except its limiter."""

    exempt: Callable[[Any], bool] | None


class LimitDefaults(TypedDict, total=False):
    """The arguments of limiters that may be set for a whole application."""

    store: Any  # a Store, an AsyncStore or the URL of one, as the limiter needs
    on_store_error: OnStoreError | None
    deadline: float | None
    hooks: Iterable[Hook]


class LimiterOptions(LimitDefaults, total=False):
    """The arguments of the limiter that is created from rules."""

    name: str | None
    clock: Clock | None


class ViewOptions(RequestOptions, LimiterOptions, total=False):
    """The options of `limit` in every framework."""


class MiddlewareOptions(LimitOptions, LimiterOptions, total=False):
    """The options of a middleware, except `exempt`."""


def split_options(options: Mapping[str, Any]) -> tuple[RequestOptions, LimiterOptions]:
    """Return the options of the limit, and those of the limiter that is created for it."""
    names = LimiterOptions.__annotations__
    own = {name: value for name, value in options.items() if name not in names}
    limiter = {name: options[name] for name in names if options.get(name) not in (None, ())}
    return own, limiter  # type: ignore[return-value]  # the same names


def has_already(options: Iterable[str]) -> str:
    """Return the error message for options of a limiter beside a given limiter."""
    return f"the limiter has its {listed(options)} already: pass {min(options)}= to the limiter"


@dataclass(frozen=True, slots=True)
class LimitVersion(Generic[AnyLimiter]):
    """The limiter and writer for one request, read once so that both belong to the same version of a policy.

    Attributes:
        limiter: The limiter. Its rules never change.
        holds: Whether units are held while a request is handled, because some of them may be returned.
        writer: Writes the fields of the limiter's decisions.
        now_us: Returns the time for the fields, in microseconds since the epoch.
        quotas: The cached quotas of callers: from the limit's function, then from the limiter's function.
    """

    limiter: AnyLimiter
    holds: bool
    writer: Writer
    now_us: Callable[[], int]
    quotas: tuple[QuotaCache, ...]

    def asked(self, question: Request, decision: Decision, quotas: Quotas | None) -> Asked:
        """Return the result of the limiter for the response to a request."""
        tier, terms_for = question.tier, self.limiter.terms_for
        if terms_for is not None:
            tier, quotas = terms_for(question.key, tier, quotas)
        terms: Terms = tier
        if quotas is not None:
            terms = tuple(
                own or rule.quota_for(tier) for own, rule in zip(quotas, self.limiter.rules, strict=True)
            )
        return self.writer, decision, terms, self.now_us()

    def own_quotas(self, question: Request, request: Any) -> Steps:
        """Return the caller-specific quotas of a request or `None`, in steps that may have to be awaited."""
        caller = caller_of(question.key, question.tier)
        for cache in self.quotas:
            is_known, found = cache.get(caller)
            if not is_known:
                is_of_limiter = cache is self.limiter.quotas
                value = (
                    yield cache.function(question.key, question.tier)
                    if is_of_limiter
                    else cache.function(request)
                )
                if value is None and is_of_limiter and not cache.seconds:
                    value = {}  # overrides no rule; with None, the limiter's gate would call the same function again
                found = cache.keep(caller, value)
            if found is not None:
                return found
        return None

    def complete(self, question: Request, quotas: Quotas | None) -> Request:
        """Return the question with a cost for each rule and with the caller-specific quotas."""
        if type(question.cost) is not int:
            question = question.with_costs(self.limiter.units.costs(question.cost))
        return question if quotas is None else question.with_quotas(quotas)

    def by_name(self, quotas: Quotas | None) -> QuotaValue | None:
        """Return quotas by rule name, as the `quota` argument of a call."""
        return (
            None
            if quotas is None
            else {rule.name: quota for rule, quota in zip(self.limiter.rules, quotas, strict=True)}
        )


class RequestLimit(Generic[AnyLimiter]):
    """A limiter with functions that find the key, cost and tier of a request.

    The arguments are those of `headgate.http.asgi.RateLimitMiddleware`; functions take the request of the framework, and
    `exempt` must be a function.

    If the limiter comes from a policy file and the file changes, the next request uses the new version.
    """

    def __init__(
        self,
        limiter: AnyLimiter,
        *,
        key: Keys | None = None,
        cost: Cost = 1,
        tier: Tier = None,
        quota: RequestQuota = None,
        quota_for: float = 60.0,
        count: Outcomes | None = None,
        exempt: Callable[[Any], bool] | None = None,
        address: Callable[[Any], str] | None = None,
        headers: Headers | HeaderStyle | None = None,
    ) -> None:
        _check_cost(cost, tier, limiter)
        check_kept_for("quota_for=", quota_for)
        if limiter.current.rules and not callable(quota):
            quotas_of(limiter.current.rules, quota)  # raises if the quota is not valid
        scopes = scopes_of(limiter.current.rules)
        if scopes and (key is None or (isinstance(key, Mapping) and not scopes <= key.keys())):
            raise ConfigError(
                f"the rules count by {listed(scopes)}: write key={{{min(scopes)!r}: function, …}}"
            )
        if not callable(tier):
            check_kind("tier=", tier, str | None, "a name or a function of the request")
        self.limiter: AnyLimiter = limiter
        self._headers = None if headers is None else headers_of(headers)
        self.exempt = exempt
        if exempt is not None:
            check_function("exempt=", exempt, can_await=False)
        self.counts = _predicate(count)
        self.address = address or by_address()
        check_function("address=", self.address, can_await=False)
        self.key = _one_function(self.address if key is None else key, self.address, limiter)
        self.cost: Any = cost
        self.tier: Any = tier
        self.quota: Any = quota
        self._quota_for = quota_for
        self.awaits = any(map(is_async, (self.key, cost, tier, quota)))
        """Whether some function of the request must be awaited."""
        limiter._on_change(self.renew)  # registered before the first read, so that no change is missed
        self.renew()
        all_limits.add(self)

    def renew(self) -> None:
        """Use the current version of the limiter."""
        self.substitute(substitutes[-1](self.limiter) if substitutes else None)

    def substitute(self, limiter: AnyLimiter | None) -> None:
        """Replace the limiter in a test; `None` restores the limit's own limiter."""
        self.substituted: AnyLimiter | None = limiter
        own = self.limiter.current
        deciding: Any = own if limiter is None else limiter
        clock = deciding.clock
        writer = Writer(own.rules, self._headers or own.headers or "both")
        quotas: list[QuotaCache] = []
        if self.quota is not None and deciding.rules:
            quota = self.quota
            function = quota if callable(quota) else lambda request: quota
            quotas.append(QuotaCache(deciding.rules, function, self._quota_for, clock, "quota"))
        if deciding.quotas is not None and deciding.rules:
            quotas.append(deciding.quotas)
        holds = self.counts is not None or deciding.units.has_places
        self.version: LimitVersion[AnyLimiter] = LimitVersion(
            deciding, holds, writer, dating(clock).now_us, tuple(quotas)
        )
        """The current version, for new requests."""
        if self.limiter.current is not own:
            self.renew()  # another thread reloaded the policy

    def question(self, request: Any) -> Request:
        """Return the call to the limiter for a request."""
        key = self.key(request)
        if key is None:
            key = self.address(request).encode()
        cost, tier = self.cost, self.tier
        if type(cost) is not int and callable(cost):
            cost = cost(request)
        if tier is not None:
            tier = tier(request) if callable(tier) else tier
            self._check_tier(tier)
        return new_request("hit", key, cost, tier, None)

    async def awaited_question(self, request: Any) -> Request:
        """Like `question`, but await the functions that are coroutine functions."""
        key = await _value(self.key, request)
        if key is None:
            key = self.address(request).encode()
        cost, tier = await _value(self.cost, request), await _value(self.tier, request)
        self._check_tier(tier)
        return Request("hit", key, cost, tier)

    def _check_tier(self, tier: str | None) -> None:
        if tier is not None:
            self.version.limiter._check_tier(tier)


all_limits: weakref.WeakSet[RequestLimit[Any]] = weakref.WeakSet()
"""Every existing limit, so that a test can replace their limiters."""

substitutes: list[Callable[[Any], Any]] = []
"""Functions with which tests replace each limiter, innermost last."""


def rule_of(limit: object, kind: type) -> str | Rule:
    """Return a rule or its text; raise `ConfigError` that names the expected limiter class for anything else."""
    expected = f"a rule like '5/minute' or a limiter of type {kind.__name__}"
    return check_kind("a limit", limit, str | Rule, expected)  # type: ignore[return-value]


def on_scope(options: ViewOptions, scope_of: Callable[[Any], Any]) -> ViewOptions:
    """Return options whose functions take a framework's request; functions of a scope receive the request's scope.

    Args:
        options: The options, as passed by the user.
        scope_of: Returns the scope of a request.
    """

    def seen(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {scope: seen(function) for scope, function in part.items()}
        return (lambda request: part(scope_of(request))) if takes_scope(part) else part

    given: ViewOptions = {**options, "address": seen(options.get("address") or by_address())}
    if "key" in given:
        given["key"] = seen(given["key"])
    return given


class LimitMiddleware(Generic[AnyLimiter, AnyApp]):
    """A wrapped application, and the limit of all requests to it."""

    kind: type[AnyLimiter]
    """The class of the limiter: `Limiter` or `AsyncLimiter`."""

    def __init__(
        self,
        app: AnyApp,
        limiter: AnyLimiter | Rule | str,
        *,
        exempt: Collection[str] | Callable[[Any], bool] = (),
        **options: Unpack[MiddlewareOptions],
    ) -> None:
        self.app = app
        own, more = split_options(options)
        if not isinstance(limiter, self.kind):
            limiter = self.kind(rule_of(limiter, self.kind), **more)
        elif more:
            raise ConfigError(has_already(more))
        own["exempt"] = exempt if callable(exempt) else by_path(exempt)
        self.limit: RequestLimit[AnyLimiter] = RequestLimit(limiter, **own)
        if self.limit.awaits and self.kind is Limiter:
            raise ConfigError("coroutine functions are for the ASGI middleware")


def by_path(paths: Collection[str]) -> Callable[[Any], bool] | None:
    """Return a function that tells whether a scope has one of these paths; `None` for an empty collection."""
    exempt = frozenset(check_list("exempt=", paths, str, "['/health'], or a function"))
    return (lambda scope: scope["path"] in exempt) if exempt else None


def _one_function(key: Keys, address: Callable[[Any], str], limiter: object) -> Callable[[Any], Any]:
    """Return a key function; for one function per scope of the rules, a function that returns all keys as a mapping."""
    given = key if isinstance(key, Mapping) else {"": key}
    for function in given.values():
        check_function("key=", function)
    awaits = isinstance(limiter, AsyncLimiter)
    functions = {scope: getattr(part, "awaited", part) if awaits else part for scope, part in given.items()}
    if not isinstance(key, Mapping):
        return functions[""]

    def complete(keys: dict[str, Any], request: Any) -> dict[str, Any]:
        return {scope: address(request).encode() if found is None else found for scope, found in keys.items()}

    def mapping(request: Any) -> dict[str, Any]:
        return complete({scope: function(request) for scope, function in functions.items()}, request)

    async def awaited(request: Any) -> dict[str, Any]:
        return complete({scope: await _value(part, request) for scope, part in functions.items()}, request)

    return awaited if any(map(is_async, functions.values())) else mapping


def _check_cost(cost: object, tier: object, limiter: Limiter | AsyncLimiter) -> None:
    """Raise `ConfigError` for a fixed cost with which no request would ever be admitted."""
    if callable(cost):
        return
    limiter = limiter.current
    costs = limiter.units.costs(cost)  # type: ignore[arg-type]  # raises if the cost is not valid
    each = costs if isinstance(costs, tuple) else (costs,) * len(limiter.rules)
    for units in each:
        check_whole(units)
    has_one_tier = tier is None and limiter.terms_for is None
    for rule, units in zip(limiter.rules, each, strict=True) if has_one_tier else ():
        capacity = rule.quota.limit if rule.quota.burst is None else rule.quota.burst
        if units > capacity > 0:
            raise ConfigError(f"every request costs {units}, but {rule} never admits more than {capacity}")


def _predicate(count: Outcomes | None) -> Callable[[int], bool] | None:
    if count is None or (callable(count) and not is_async(count)):
        return count
    # A coroutine function is not accepted: its result would be true for every status.
    return frozenset(check_statuses("count=", count, "[401, 403], or a function of the status")).__contains__


async def _value(part: Any, request: Any) -> Any:
    value = part(request) if callable(part) else part
    return await value if inspect.isawaitable(value) else value
