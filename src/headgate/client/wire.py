"""Encode requests to a server and decode its answers; no I/O.

Each request comes with the function that reads its answer (`EncodedRequest`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import quote

from headgate.client.values import KeyState, ServerLimiter, WaitHint
from headgate.clock import to_microseconds
from headgate.decision import Decision, Verdict
from headgate.errors import ConfigError, CostTooHigh, HeadgateError, StoreMisconfigured, StoreUnavailable
from headgate.outage.policies import policy_from_data
from headgate.quota import Quotas
from headgate.rules import REQUESTS, Kind, Rule, calendar, concurrent, make_rule
from headgate.usage import RuleUsage

T = TypeVar("T")

BATCH_PATH = "/v1/batch"

NOT_FOUND, NOT_IMPLEMENTED = 404, 501
"""Statuses with a specific meaning; 501 is a limiter whose store does not support holds."""

_TRY_LATER = frozenset({408, 409, 425, 429})
"""Statuses below 500 that do not depend on the request itself."""

_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions raised while reading a malformed answer."""


class HttpRequest(NamedTuple):
    """A request to the server.

    Attributes:
        method: The HTTP method.
        path: The path below the server's URL.
        body: JSON, or empty.
        entry: The same call as an entry of a batch; `None` if it must be sent alone.
        may_repeat: Whether sending it twice has the same effect as once.
    """

    method: str
    path: str
    body: bytes = b""
    entry: bytes | None = None
    may_repeat: bool = False


class Response(NamedTuple):
    """The answer of the server: the HTTP status and the JSON document, or `None`."""

    status: int
    body: Any


# --- Requests ---------------------------------------------------------------------------------------------------------

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def packed(document: object) -> bytes:
    """Return a document as JSON.

    Raises:
        ConfigError: A text contains a lone surrogate. JSON can escape it, but two escaped surrogates decode to one
            character, and so to a different key.
    """
    try:
        return _encode(document).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("text with lone surrogates cannot be sent to a server; make it bytes") from None


def limiter_request(limiter: str, operation: str, members: Mapping[str, object]) -> HttpRequest:
    """Return a call of a limiter's operation, which may be sent in a batch."""
    call = {name: value for name, value in members.items() if value is not None}
    return HttpRequest(
        "POST",
        f"/v1/limiters/{quote(limiter, safe='')}/{operation}",
        packed(call),
        packed({"limiter": limiter, "operation": operation, **call}),
    )


def alone(request: HttpRequest) -> HttpRequest:
    """Return the request without a batch entry, so that it is sent alone."""
    return request._replace(entry=None)


def hold_request(
    hold: str, operation: Literal["settle", "confirm", "renew"], members: Mapping[str, object]
) -> HttpRequest:
    """Return a call about a hold, which may be sent in a batch. Settling and renewing are idempotent."""
    return HttpRequest(
        "POST",
        f"/v1/holds/{quote(hold, safe='')}/{operation}",
        packed(members),
        packed({"hold": hold, "operation": operation, **members}),
        may_repeat=operation != "confirm",
    )


def packed_quotas(rules: tuple[Rule, ...], quotas: Quotas | None) -> dict[str, str | int] | None:
    """Return the quotas of a call by rule name, in the format of a policy file."""
    if quotas is None:
        return None
    return {
        rule.name: rule.data_of(quota) for rule, quota in zip(rules, quotas, strict=True) if quota is not None
    }


def batch_request(entries: list[bytes]) -> HttpRequest:
    """Return one request for several calls."""
    return HttpRequest("POST", BATCH_PATH, b'{"calls":[' + b",".join(entries) + b"]}")


# --- Answers ----------------------------------------------------------------------------------------------------------


def success(server: str, answer: Response) -> Any:
    """Return the body of a successful answer.

    Raises:
        ConfigError: The request can never succeed: a bad key, an unknown limiter.
        StoreMisconfigured: The server rejects the token, or the URL is wrong.
        CostTooHigh: The cost can never be admitted.
        StoreUnavailable: The server cannot answer now.
    """
    if 200 <= answer.status < 300:
        return answer.body
    raise failure(server, answer)


def failure(server: str, answer: Response) -> HeadgateError:
    """Return the exception for an answer that is not a success."""
    status, body = answer
    problem = body if isinstance(body, dict) else {}
    match problem:
        case {"cost": int(cost), "capacity": int(capacity), "rule": str(rule)}:
            return CostTooHigh(cost, capacity, rule, problem.get("unit", REQUESTS))
    detail = problem.get("detail") or problem.get("title")
    said = f"{server} answered {status}{f': {detail}' if detail else ''}"
    if status in _TRY_LATER or (status >= 500 and status != NOT_IMPLEMENTED):
        return StoreUnavailable(said)
    if status == 401:
        # Without the server's detail: it contains the name of a header field, and redaction masks the text after it.
        return StoreMisconfigured(
            f"{server} answered 401; give a valid token: the argument token, or HEADGATE_TOKEN for the command"
        )
    if status == 403:
        return StoreMisconfigured(f"{said}; the token's permissions are set in the server's policy file")
    if status == 421 or 300 <= status < 400:
        return StoreMisconfigured(f"{said}; give the store the URL of the server itself")
    # Without a detail the answer is not from a Headgate server, but from a proxy or another server at that address.
    return ConfigError(said) if detail else StoreMisconfigured(f"{said}, not as a Headgate server does")


def batch_answers(answer: Response, count: int) -> list[Response]:
    """Return the answer to each call of a batch; a failure of the whole batch is the answer to every call.

    Raises:
        ValueError: The number of answers differs from the number of calls.
    """
    if not 200 <= answer.status < 300:
        return [answer] * count
    try:
        answers = [Response(int(each["status"]), each["body"]) for each in answer.body["answers"]]
    except _UNREADABLE as error:
        raise ValueError("the answer to a batch is malformed") from error
    if len(answers) != count:
        raise ValueError(f"a batch of {count} calls has {len(answers)} answers")
    return answers


def reading(server: str, read: Callable[[Any], T]) -> Callable[[Response], T]:
    """Return a function that reads an answer, given a function that reads its body.

    It raises the exceptions of `success`, and StoreMisconfigured if the body is not from a Headgate server.
    """

    def read_answer(answer: Response) -> T:
        body = success(server, answer)
        try:
            return read(body)
        except HeadgateError:
            raise
        except _UNREADABLE as error:
            raise StoreMisconfigured(f"{server} did not answer as a Headgate server does") from error

    return read_answer


def read_decision(body: dict[str, Any]) -> Decision:
    """Return the server's decision unchanged."""
    results = body["results"]
    names = tuple(result["name"] for result in results)
    decision = Decision.make(names, [_read_verdict(result) for result in results], degraded=body["degraded"])
    allowed, retry_after_us = _read_allowed(body), _microseconds(body["retry_after"])
    if not allowed:
        # The listed rules may all admit: the server omits the rules of a limiter whose store is down.
        return decision.as_refused(retry_after_us or 0)
    if not decision:
        raise ValueError("the answer admits a call that one of its rules refuses")
    return decision


def _read_verdict(result: dict[str, Any]) -> Verdict:
    return Verdict(
        _read_allowed(result),
        result["limit"],
        result["remaining"],
        _microseconds(result["retry_after"]),
        _microseconds(result["reset_after"]),
    )


def _read_allowed(body: dict[str, Any]) -> bool:
    allowed = body["allowed"]
    if not isinstance(allowed, bool):  # any non-empty text would be true
        raise TypeError("allowed must be true or false")
    return allowed


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else to_microseconds(seconds)


def read_limiters(body: dict[str, Any]) -> tuple[ServerLimiter, ...]:
    """Return all limiters of the server."""
    return tuple(read_limiter(limiter) for limiter in body["limiters"])


def find_limiter(server: str, name: str, body: dict[str, Any]) -> ServerLimiter:
    """Return the limiter of that name.

    Raises:
        ConfigError: The server has no limiter of that name.
    """
    known = {limiter["name"]: limiter for limiter in body["limiters"]}
    if name not in known:
        raise ConfigError(f"{server} has no limiter {name!r}; it has {', '.join(map(repr, known))}")
    return read_limiter(known[name])


def read_limiter(body: dict[str, Any]) -> ServerLimiter:
    """Return a limiter of the server."""
    return ServerLimiter(
        name=body["name"],
        rules=tuple(map(_read_rule, body["rules"])),
        shadow=tuple(map(_read_rule, body["shadow"])),
        store=body["store"],
        on_store_error=policy_from_data(body["on_store_error"]),
        default_tier=body["default_tier"],
        headers=body["headers"],
    )


def _read_rule(body: dict[str, Any]) -> Rule:
    if body["kind"] not in get_args(Kind):
        raise ValueError(f"unknown kind of rule: {body['kind']!r}")
    unit = body.get("unit", REQUESTS)  # older servers count only requests
    own = {"unit": unit, **{name: body[name] for name in ("scope", "tiers", "name")}}
    if body["kind"] == "concurrent":
        return concurrent(body["quota"], lease=body["lease"], **own)
    if body["kind"] == "calendar":
        return calendar(body["quota"], timezone=body["timezone"], **own)
    if body["kind"] == "penalty":
        longest = None if body["growth"] == 1 else to_microseconds(body["longest"])
        return make_rule(
            "penalty",
            body["quota"],
            body["scope"],
            name=body["name"],
            growth=body["growth"],
            longest_us=longest,
        )
    return make_rule(body["kind"], body["quota"], buckets=body["buckets"], strict=body["strict"], **own)


def read_wait_hint(body: dict[str, Any]) -> WaitHint:
    """Return the wait hint in a body."""
    return WaitHint(body["allowed"], body["wait"])


_USAGE_FIELDS = [field.name for field in fields(RuleUsage)]


def _read_usage(body: dict[str, Any]) -> RuleUsage:
    """Return the usage of a rule; older servers send fewer members, and newer ones may send more."""
    return RuleUsage(**{name: body[name] for name in _USAGE_FIELDS if name in body})


def read_key_states(body: dict[str, Any]) -> tuple[KeyState, ...]:
    """Return the state of a key in each limiter."""
    return tuple(
        KeyState(
            limiter["name"],
            tuple(map(_read_usage, limiter["results"])),
            limiter["error"],
        )
        for limiter in body["limiters"]
    )


def read_events(server: str, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield server-sent events as pairs of name and data.

    Raises:
        StoreMisconfigured: The data is not JSON.
    """
    name = "message"
    for line in lines:
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            try:
                data = json.loads(value)
            except ValueError as error:
                raise StoreMisconfigured(f"{server} did not answer as a Headgate server does") from error
            yield name, data
