"""Limits for any WSGI application: a middleware without dependencies.

    app = RateLimitMiddleware(app, "100/minute")

As `headgate.http.asgi`, for threads. Key, cost and tier see the request as an ASGI scope, with the WSGI environment under
`"wsgi"`, so that the same key functions serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from headgate import Hold, Limiter
from headgate.errors import ConfigError, CostTooHigh, StoreError
from headgate.hooks import logger
from headgate.http.headers import Asked, Field, Fields, all_fields, distinct_names, released
from headgate.http.limit import Cost, Keys, Outcomes, RequestLimit, Tier, by_path, rule_of
from headgate.http.problems import Answer, refusal, too_costly
from headgate.rules import Rule

Environ = MutableMapping[str, Any]
Headers = list[tuple[str, str]]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

ASKED = "headgate.asked"
"""Where an environment has the list of who was asked about it. Whoever put it there writes the fields of all."""


class RateLimitMiddleware:
    """Asks a limiter about every request, and answers those that it refuses.

    Args:
        app: The application behind it.
        limiter: Who decides, perhaps one of a policy file; or a rule, counted in memory.
        key: Whose units: a function of the scope, or one for each scope of the rules. By default the client's address.
        cost: How many units, as a number or a function of the scope.
        tier: Which tier, as a name or a function of the scope.
        count: Which statuses count. The units are held while the application works, and given back if its answer has
            another status, or if it raises and 500 does not count.
        exempt: Which requests are let through unasked, as paths or a function of the scope.
        address: How the client's address is found; see `by_address`. Used by default, and where `key` returns `None`.
        fields: Which header fields to write; by default those that the limiter's policy asks for, or else all.
    """

    def __init__(
        self,
        app: App,
        limiter: Limiter | Rule | str,
        *,
        key: Keys | None = None,
        cost: Cost = 1,
        tier: Tier = None,
        count: Outcomes | None = None,
        exempt: Collection[str] | Callable[[Any], bool] = (),
        address: Callable[[Any], str] | None = None,
        fields: Fields | None = None,
    ) -> None:
        self.app = app
        self.limit = RequestLimit(
            limiter if isinstance(limiter, Limiter) else Limiter(rule_of(limiter, Limiter)),
            key=key,
            cost=cost,
            tier=tier,
            count=count,
            exempt=exempt if callable(exempt) else by_path(exempt),
            address=address,
            fields=fields,
        )
        if self.limit.awaits:
            raise ConfigError("coroutine functions are for the ASGI middleware")

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        scope, limit = _Scope(environ), self.limit
        if limit.exempt is not None and limit.exempt(scope):
            return self.app(environ, start_response)
        all_asked: list[Asked] | None = environ.get(ASKED)
        if all_asked is None:
            environ[ASKED] = all_asked = []
            start_response = _adding_fields(start_response, all_asked)
        accept = environ.get("HTTP_ACCEPT", "").encode("latin-1")
        try:
            asked, hold = self._ask(scope)
        except CostTooHigh as error:
            return _answered(start_response, too_costly(error, accept))
        all_asked.append(asked)
        if not asked[1].allowed:
            return _answered(start_response, refusal(asked[1], distinct_names(all_asked)[-1], accept))
        if hold is None:
            return self.app(environ, start_response)
        settle = _settler(all_asked, limit, hold)

        def start_and_settle(status: str, headers: Headers, *exc_info: Any) -> Callable[[bytes], object]:
            settle(int(status[:3]))
            return start_response(status, headers, *exc_info)

        try:
            return self.app(environ, start_and_settle)
        except Exception:
            settle(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def _ask(self, scope: _Scope) -> tuple[Asked, Hold | None]:
        limit = self.limit
        key, cost, tier = limit.question(scope)
        way, hold = limit.way, None  # once: the limiter's policy may change while it decides
        if limit.counts is None:
            decision = way.limiter.hit(key, cost, tier=tier)
        else:
            hold = way.limiter.hold(key, cost, tier=tier)
            decision = hold.decision
        if way.tier_for is not None:
            tier = way.tier_for(key, tier)
        return (way.writer, decision, tier, limit.now_us()), hold


class _Scope(dict[str, Any]):
    """A WSGI environment as an ASGI scope; header fields are collected when somebody reads them."""

    def __init__(self, environ: Environ) -> None:
        peer = environ.get("REMOTE_ADDR")
        super().__init__(
            type="http",
            method=environ.get("REQUEST_METHOD", ""),
            path=environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""),
            query_string=environ.get("QUERY_STRING", "").encode("latin-1"),
            client=(peer, 0) if peer else None,
            wsgi=environ,
        )

    def __missing__(self, name: str) -> list[Field]:
        if name != "headers":
            raise KeyError(name)
        self["headers"] = [
            (key[5:].replace("_", "-").lower().encode("latin-1"), value.encode("latin-1"))
            for key, value in self["wsgi"].items()
            if key.startswith("HTTP_")
        ]
        return self["headers"]  # type: ignore[no-any-return]  # just put there


def _adding_fields(start_response: StartResponse, asked: list[Asked]) -> StartResponse:
    def start_with_fields(status: str, headers: Headers, *exc_info: Any) -> Callable[[bytes], object]:
        fields = [(name.decode().title(), value.decode()) for name, value in all_fields(asked)]
        return start_response(status, [*headers, *fields], *exc_info)

    return start_with_fields


def _settler(all_asked: list[Asked], limit: RequestLimit[Limiter], hold: Hold) -> Callable[[int], None]:
    place, is_open = len(all_asked) - 1, True

    def settle(status: int) -> None:
        nonlocal is_open
        if not is_open:
            return  # an application may start its response anew, to report an error
        is_open = False
        if limit.counts is None or limit.counts(status):
            hold.settle(hold.cost)
            return
        all_asked[place] = released(all_asked[place], hold.cost)
        try:
            hold.release()
        except StoreError:
            # The response is worth more than the units, which expire by themselves.
            logger.warning("%d held units could not be given back", hold.cost, exc_info=True)

    return settle


def _answered(start_response: StartResponse, answer: Answer) -> Iterable[bytes]:
    headers = [(name.decode().title(), value.decode()) for name, value in answer.fields]
    start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
    return [answer.body]
